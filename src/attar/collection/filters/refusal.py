"""Answers that refuse: phrases with which an assistant declines, near the beginning of its answer.

A phrase counts only in the first :data:`HEAD` characters and at the start of a sentence, so that a text which
quotes a refusal later is kept. What it cannot do: a refusal in other words, or in a language that no phrase
is of (``refusals`` takes a file of one's own), is not seen.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from attar.collection.filters.row import CollectedRow, answer_of
from attar.collection.filters.settings import FilterSettings
from attar.errors import DataError

HEAD = 240  # characters of an answer in which it says no

PHRASES = (
    "i can't assist",
    "i can't comply",
    "i can't fulfill",
    "i can't help",
    "i can't provide",
    "i cannot assist",
    "i cannot comply",
    "i cannot create",
    "i cannot fulfill",
    "i cannot help",
    "i cannot provide",
    "i am not able to help",
    "i am not able to provide",
    "i am unable to",
    "i'm unable to",
    "i'm not able to",
    "i won't be able to",
    "i must decline",
    "i have to decline",
    "as an ai, i can't",
    "as an ai, i cannot",
    "as an ai language model, i can't",
    "as an ai language model, i cannot",
    "as an ai language model, i do not",
    "as an ai language model, i don't",
    "i'm just an ai",
    "sorry, but i can't",
    "sorry, but i cannot",
    "sorry, i can't",
    "sorry, i cannot",
    "unfortunately, i cannot",
    "unfortunately, i can't",
    "ich kann dir dabei nicht helfen",
    "ich kann ihnen dabei nicht helfen",
    "es tut mir leid, aber ich kann",
    "je ne peux pas vous aider",
    "je suis désolé, mais je ne peux",
    "lo siento, pero no puedo",
    "no puedo ayudar",
    "desculpe, mas não posso",
    "mi dispiace, ma non posso",
    "我无法",
    "很抱歉,我",
    "抱歉,我",
    "申し訳ありませんが",
    "죄송하지만",
)


def refusal(rows: Sequence[CollectedRow], settings: FilterSettings) -> list[str]:
    """Reasons against rows; "" keeps one.

    Raises:
        DataError: the file of phrases cannot be read, or is empty.
    """
    pattern = _pattern(_phrases(settings.refusals))
    matches = [pattern.search(_plain(answer_of(row))[:HEAD]) for row in rows]
    return [f"refuses: {match[1]!r}" if match else "" for match in matches]


def _phrases(file: str) -> Sequence[str]:
    if not file:
        return PHRASES
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"refusals: {file}: cannot be read as text: {error}") from error
    phrases = [line.strip() for line in lines if line.strip()]
    if not phrases:
        raise DataError(f"refusals: {file}: has no phrase", hint="one phrase a line")
    return phrases


def _pattern(phrases: Sequence[str]) -> re.Pattern[str]:
    """One of the phrases at the start of a sentence or of a clause after but, that, however."""
    listed = "|".join(re.escape(_plain(phrase)) for phrase in phrases)
    return re.compile(rf"(?:^|[.!?,;:\n]\s*|\b(?:but|that)\s+)({listed})")


def _plain(text: str) -> str:
    """Lower case, single spaces, straight apostrophes and commas."""
    text = text.lower().replace("\u2019", "'").replace("\uff0c", ",").replace("\u3002", ".")
    return re.sub(r"[ \t]+", " ", text).strip()
