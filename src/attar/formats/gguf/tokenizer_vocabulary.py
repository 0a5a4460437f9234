"""The tokens of a GGUF file by id: text, type and score, one for each row of the embedding.

Types are llama.cpp's (``llama.h``): 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte. An id
without a token gets the unused token ``[PAD<id>]``, and so does a token that llama.cpp cannot hold: without
text, or with a NUL in it, where its strings end. llama.cpp finds tokens by text, so no two may be equal.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from attar.errors import ModelError
from attar.formats.gguf.values import MetadataValue, TypedValue

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPACE = "\u2581"  # how SentencePiece writes a space
BEFORE = {"type": "Replace", "pattern": {"Regex": r"\A(?= *[^ ])"}, "content": " "}
"""A normalizer that puts a space before a text, but not before one of spaces alone."""
BYTE_TEXT = re.compile("<0x[0-9A-F]{2}>")
UNUSED_SCORE, ADDED_SCORE = -10000.0, -1000.0


class TokenEntry(NamedTuple):
    """A token: its text, its type, and its score where the kind of tokenizer has scores."""

    text: str
    type: int
    score: float = 0.0


def pad_text(index: int) -> str:
    """The text of the unused token that fills an id."""
    return f"[PAD{index}]"


def listed(entries: Mapping[int, TokenEntry], size: int | None, where: Path) -> list[TokenEntry]:
    """Tokens in the order of their ids, as many as the embedding has rows.

    Args:
        entries: by id.
        size: rows of the embedding; None for as many as there are tokens.
        where: the file, for messages.

    Raises:
        ModelError: a token of the model has no row in the embedding, or two have the same text.
    """
    count = max(entries, default=-1) + 1 if size is None else size
    beyond = [index for index in sorted(entries) if index >= count and entries[index].type == NORMAL]
    if beyond:
        raise ModelError(
            f"{where}: token {beyond[0]} ({entries[beyond[0]].text!r}) is beyond vocab_size {count}",
            hint="this tokenizer belongs to another model",
        )
    filled = [entries.get(index, TokenEntry(pad_text(index), UNUSED, UNUSED_SCORE)) for index in range(count)]
    seen: dict[str, int] = {}
    for index, entry in enumerate(filled):
        if not entry.text or "\0" in entry.text:
            filled[index] = entry = TokenEntry(pad_text(index), UNUSED, UNUSED_SCORE)
        if seen.setdefault(entry.text, index) != index:
            raise ModelError(
                f"{where}: tokens {seen[entry.text]} and {index} have the same text {entry.text!r}",
                hint="llama.cpp finds tokens by their text",
            )
    return filled


def metadata(kind: str, entries: list[TokenEntry], *, scored: bool) -> dict[str, MetadataValue]:
    """The keys of a vocabulary."""
    found: dict[str, MetadataValue] = {
        "tokenizer.ggml.model": kind,
        "tokenizer.ggml.tokens": TypedValue("[str]", [entry.text for entry in entries]),
        "tokenizer.ggml.token_type": TypedValue("[i32]", [entry.type for entry in entries]),
    }
    if scored:
        found["tokenizer.ggml.scores"] = TypedValue("[f32]", [entry.score for entry in entries])
    return found
