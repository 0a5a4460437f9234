"""Conversations whose answers alone are learned: rows of tokens, and which of them are predicted.

A conversation is rendered by the tokenizer's chat template. The tokens of the assistant's messages are the
targets, with what ends a message, because a model must learn to stop; what asks it to begin is not. Of a row
with prompt and completion, the completion is the answer; of a plain text, everything. Without a chat template
a single prompt and its answer are one text, as a model without one continues it.

The parts of a rendered text that are answers are taken from

- ``{% generation %}`` blocks, where the template has them: they were written for this;
- else prefixes: the text up to a message is the conversation rendered up to it with the words that ask for an
  answer, the text with it is the conversation rendered up to and including it;
- else, where such a prefix is no prefix of the whole (a template that moves the system prompt to the last
  turn, or forgets the reasoning of earlier ones), the place where the rendered text changes when the message
  is exchanged for another, and the special token after it.

A token belongs to an answer if one of its characters does.

Letters: N rows, S tokens a row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from attar.chat_template import apply_template
from attar.data.examples import Examples
from attar.data.packing import CHUNK, PADDING, end_token, front_tokens, is_plain, render
from attar.data.sources import read_split
from attar.data.splits import Document
from attar.errors import DataError

Span = tuple[int, int]
OPEN_ROWS = 64  # rows that a packed conversation may still join

_GENERATION = re.compile(r"\{%(-?)\s*generation\s*(-?)%\}")
_END_GENERATION = re.compile(r"\{%(-?)\s*endgeneration\s*(-?)%\}")
_OPEN, _CLOSE = "\uf8f0", "\uf8f1"  # of a private use area: marks around a generation block


@dataclass(frozen=True)
class Dialogue:
    """The tokens of a document, and for each whether it is predicted."""

    tokens: list[int]
    predicted: list[bool]


@dataclass
class AnswerRows:
    """Rows of conversations, and what did not fit.

    Attributes:
        examples: targets are PADDING outside of answers.
        documents: read, dropped documents included.
        cut: documents longer than a row, whose end is missing.
        dropped: documents without a predicted token in the first S, or at all.
        shared: the reason why other splits hold the same text; empty if they do not.
    """

    examples: Examples = field(default_factory=lambda: Examples.of_text(torch.zeros(0, 2, dtype=torch.int64)))
    documents: int = 0
    cut: int = 0
    dropped: int = 0
    shared: str = ""


def pack_answers(
    tokenizer: Any,
    data: str,
    split: str,
    *,
    length: int,
    rows: int | None,
    seed: int,
    packing: str = "stream",
    bos: str = "auto",
) -> AnswerRows:
    """Rows of a source's split. Arguments as in :func:`attar.data.packing.pack`; a document is never in two
    rows. With ``packing`` ``stream`` several that fit share a row, and may attend to each other.

    Raises:
        DataError: the source has no document with an answer that fits.
    """
    front = front_tokens(tokenizer, bos)
    result = AnswerRows()
    for unsplit in (False, True):
        text = read_split(data, split, seed, unsplit=unsplit)
        result = AnswerRows(shared=text.shared)
        parts = _fitting(dialogues(text.documents, tokenizer, front), length - len(front), result)
        examples = _packed(parts, length, front, rows, packing == "separate")
        if len(examples):
            result.examples = examples
            return result
    raise DataError(
        f"{data}: no answer of the {split} split fits into {length} tokens ({result.documents} documents)",
        hint="give more text, or a larger --sequence-length",
    )


def has_conversations(data: str, split: str = "train") -> bool:
    """Whether a source's split holds conversations, or prompts with completions."""
    return any(isinstance(document, list) for document in read_split(data, split).documents[:CHUNK])


def dialogues(documents: Iterable[Document], tokenizer: Any, front: Sequence[int] = ()) -> Iterator[Dialogue]:
    """Documents as tokens without the tokenizer's own in front; a document that ends without a special token
    gets the end-of-text token."""
    end, specials = end_token(tokenizer), _special_tokens(tokenizer)
    for document in documents:
        text = render(document, tokenizer)
        spans = answer_spans(document, text, tokenizer)
        tokens, predicted = tokenized(text, spans, tokenizer)
        if front and tokens[: len(front)] == list(front):
            tokens, predicted = tokens[len(front) :], predicted[len(front) :]
        if tokens and not any(text.rstrip().endswith(token) for token in specials):
            tokens, predicted = tokens + end, predicted + predicted[-1:] * len(end)
        yield Dialogue(tokens, predicted)


def answer_spans(document: Document, text: str, tokenizer: Any) -> list[Span]:
    """The parts [start, stop) of a rendered document that are predicted, ascending.

    Args:
        text: the document as :func:`attar.data.packing.render` gives it.
    """
    if isinstance(document, str):
        return [(0, len(text))]
    if is_plain(document, tokenizer):
        return [(len(str(document[0]["content"])), len(text))]
    marked, first = _generation_spans(document, text, tokenizer), getattr(document, "first", 0)
    if marked is not None and first == 0:
        return marked
    specials = _special_tokens(tokenizer)
    roles = [message.get("role") for message in document]
    numbers = [number for number in range(first, len(roles)) if roles[number] == "assistant"]
    return [_span(document, number, text, tokenizer, specials) for number in numbers]


def tokenized(text: str, spans: Sequence[Span], tokenizer: Any) -> tuple[list[int], list[bool]]:
    """Token ids of a text, and for each whether a character of it is in a span."""
    offsets = _offsets(text, tokenizer)
    if offsets is None:  # a tokenizer that does not say where its tokens are
        edges = sorted({0, len(text), *(edge for span in spans for edge in span)})
        pieces = [(start, _ids(text[start:stop], tokenizer)) for start, stop in pairwise(edges)]
        inside = [any(start <= at < stop for start, stop in spans) for at, _ in pieces]
        tokens = [token for _, ids in pieces for token in ids]
        return tokens, [flag for flag, (_, ids) in zip(inside, pieces, strict=True) for _ in ids]
    tokens, positions = offsets
    predicted, number = [], 0
    for start, stop in positions:
        while number < len(spans) and spans[number][1] <= start:
            number += 1
        predicted.append(number < len(spans) and start < spans[number][1] and stop > spans[number][0])
    return tokens, predicted


def _span(
    messages: Sequence[dict[str, Any]], number: int, text: str, tokenizer: Any, specials: Sequence[str]
) -> Span:
    """The part of a conversation's text that message ``number`` is."""
    last = number == len(messages) - 1
    before = _rendered(messages[:number], tokenizer, add_generation_prompt=True)
    through = text if last else _rendered(messages[: number + 1], tokenizer)
    begun = before is not None and text.startswith(before)
    ended = through is not None and text.startswith(through)
    changed = (0, 0) if begun and ended else _changed(messages, number, text, tokenizer)
    start = len(before or "") if begun else changed[0]
    return start, max(start, _end(through or "", specials) if ended else _after(text, changed[1], specials))


def _rendered(messages: Sequence[dict[str, Any]], tokenizer: Any, **options: Any) -> str | None:
    """A conversation's text; None where the template refuses it."""
    try:
        return apply_template(tokenizer, list(messages), **options)
    except Exception:  # a template is a program of the checkpoint and may raise anything
        return None


def _changed(messages: Sequence[dict[str, Any]], number: int, text: str, tokenizer: Any) -> Span:
    """The part of the text that is another when a message says something else.

    Two other messages are tried, whose characters differ at both ends: one alone may begin or end as the
    message does.
    """
    spans = []
    for other in ("\u03b1 1 \u03b2", "\u03b3 2 \u03b4"):
        message = {"role": messages[number]["role"], "content": other}
        changed = _rendered([*messages[:number], message, *messages[number + 1 :]], tokenizer)
        if changed is not None:
            start = _common(text, changed)
            spans.append((start, len(text) - _common(text[start:][::-1], changed[start:][::-1])))
    if not spans:
        return len(text), len(text)
    return min(start for start, _ in spans), max(stop for _, stop in spans)


def _common(left: str, right: str) -> int:
    """Length of the common beginning of two texts."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _end(text: str, specials: Sequence[str]) -> int:
    """The end of a text without the blanks after a special token."""
    bare = text.rstrip()
    return len(bare) if any(bare.endswith(token) for token in specials) else len(text)


def _after(text: str, stop: int, specials: Sequence[str]) -> int:
    """The end of the special token that follows at ``stop``, after blanks; else ``stop``."""
    tail = text[stop:]
    blanks = len(tail) - len(tail.lstrip())
    following = [token for token in specials if tail.startswith(token, blanks)]
    return stop + blanks + len(max(following, key=len)) if following else stop


def _generation_spans(document: Sequence[dict[str, Any]], text: str, tokenizer: Any) -> list[Span] | None:
    """The parts that the template's generation blocks wrote; None where it has none, or where marks change
    its text."""
    template = _template(tokenizer)
    if not _GENERATION.search(template):
        return None
    opened = r"{%\1 if true %}{{ '" + _OPEN + r"' }}{% endif %}{% if true \2%}"
    closed = r"{%\1 endif %}{% if true %}{{ '" + _CLOSE + r"' }}{% endif \2%}"
    marking = _END_GENERATION.sub(closed, _GENERATION.sub(opened, template))
    marked = _rendered(document, tokenizer, chat_template=marking)
    if marked is None or marked.replace(_OPEN, "").replace(_CLOSE, "") != text:
        return None
    spans, position, start = [], 0, 0
    for piece in re.split(f"([{_OPEN}{_CLOSE}])", marked):
        if piece == _OPEN:
            start = position
        elif piece == _CLOSE:
            spans.append((start, position))
        else:
            position += len(piece)
    return spans


def _template(tokenizer: Any) -> str:
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("default")
    return template if isinstance(template, str) else ""


def _special_tokens(tokenizer: Any) -> list[str]:
    """Texts of the special tokens, the added ones of chat templates too."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    marked = [str(token.content) for token in added.values() if getattr(token, "special", False)]
    return list(dict.fromkeys([*map(str, tokenizer.all_special_tokens), *marked]))


def _offsets(text: str, tokenizer: Any) -> tuple[list[int], list[Span]] | None:
    """Token ids and the characters [start, stop) of each; None where the tokenizer cannot say."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    encoding = backend.encode(text, add_special_tokens=False)
    return list(encoding.ids), [(int(start), int(stop)) for start, stop in encoding.offsets]


def _ids(text: str, tokenizer: Any) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _fitting(parts: Iterable[Dialogue], room: int, result: AnswerRows) -> Iterator[Dialogue]:
    """The documents that have a predicted token in their first ``room``, cut to it; counts the others."""
    for part in parts:
        result.documents += 1
        # the first token of a row has none before it, from which it could be predicted
        if not any(part.predicted[1:room]):
            result.dropped += 1
            continue
        result.cut += len(part.tokens) > room
        yield Dialogue(part.tokens[:room], part.predicted[:room])


def _packed(
    parts: Iterable[Dialogue], length: int, front: Sequence[int], rows: int | None, separate: bool
) -> Examples:
    """Rows of whole documents: one in each, or first fit among the rows that are open."""
    room = length - len(front)
    filled: list[Dialogue] = []
    for part in parts:
        row = None if separate else _open_row(filled, room - len(part.tokens))
        if row is not None:
            row.tokens.extend(part.tokens)
            row.predicted.extend(part.predicted)
        elif rows is not None and len(filled) >= rows:
            break
        else:
            filled.append(Dialogue([*part.tokens], [*part.predicted]))
    tokens = torch.full((len(filled), length), PADDING, dtype=torch.int64)
    targets = tokens.clone()
    for number, row in enumerate(filled):
        ids = torch.tensor([*front, *row.tokens])
        wanted = torch.tensor([*(False for _ in front), *row.predicted])
        tokens[number, : len(ids)] = ids
        targets[number, : len(ids) - 1] = torch.where(wanted[1:], ids[1:], PADDING)
    return Examples(tokens, targets)


def _open_row(filled: Sequence[Dialogue], largest: int) -> Dialogue | None:
    """The first of the latest rows with at most so many tokens."""
    return next((row for row in filled[-OPEN_ROWS:] if len(row.tokens) <= largest), None)
