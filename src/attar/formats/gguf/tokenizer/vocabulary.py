"""The vocabulary of a GGUF file: text, type and score of each token by id, merges of a BPE, and the scores
that replace merges in llama.cpp's SentencePiece tokenizer.

Types are llama.cpp's (``llama.h``): 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte. The
list has one token for each row of the embedding. An id without a token gets the unused token ``[PAD<id>]``,
and so does a token that llama.cpp cannot hold: without text, or with a NUL, where its strings end. llama.cpp
finds tokens by text, so no two may be equal.

A BPE joins, again and again, the neighbouring pair of lowest rank, the leftmost of equals. llama.cpp's
SentencePiece tokenizer (``llm_tokenizer_spm``) has no pairs: it joins the neighbours whose joined text is the
token of highest score. Both give the same tokens when

    score(t) = -rank of the pair that makes t from t's own text,

and the merges can make every token t. Proof: assume that both agree up to some step, and two neighbours u, v
now have the text of a token t. Between their outer ends the merges have run as they would on t alone, so t
alone reached u, v as well, and the only pair that leads from there to t is (u, v): it is the pair that makes
t. So every join that the scores allow is a merge, of the rank that its score states.

A token t that its merges do not make does harm only if t alone ends as two symbols, which the scores would
join.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from attar.errors import CheckpointError, ModelError
from attar.formats.gguf.values import MetadataValue, TypedValue

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPACE = "\u2581"  # how SentencePiece writes a space
BEFORE = {"type": "Replace", "pattern": {"Regex": r"\A(?= *[^ ])"}, "content": " "}
"""A normalizer that puts a space before a text, except one of only spaces."""
BYTE_TEXT = re.compile("<0x[0-9A-F]{2}>")
UNUSED_SCORE, ADDED_SCORE = -10000.0, -1000.0

SymbolPair = tuple[str, str]


class TokenEntry(NamedTuple):
    """A token: its text, its type, and its score where the kind of tokenizer has scores."""

    text: str
    type: int
    score: float = 0.0


def pad_text(index: int) -> str:
    """The text of the unused token that fills an id."""
    return f"[PAD{index}]"


def token_list(entries: Mapping[int, TokenEntry], size: int | None, where: Path) -> list[TokenEntry]:
    """Tokens in the order of their ids, one for each row of the embedding.

    Args:
        entries: by id.
        size: rows of the embedding; None: the number of tokens.

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


def vocabulary_metadata(kind: str, entries: list[TokenEntry], *, scored: bool) -> dict[str, MetadataValue]:
    """The metadata of a vocabulary."""
    metadata: dict[str, MetadataValue] = {
        "tokenizer.ggml.model": kind,
        "tokenizer.ggml.tokens": TypedValue("[str]", [entry.text for entry in entries]),
        "tokenizer.ggml.token_type": TypedValue("[i32]", [entry.type for entry in entries]),
    }
    if scored:
        metadata["tokenizer.ggml.scores"] = TypedValue("[f32]", [entry.score for entry in entries])
    return metadata


def read_merges(merges: Iterable[Any], where: str) -> dict[SymbolPair, int]:
    """The merges of a tokenizer.json: ranks by pair, in order. Of equal pairs the last counts.

    Args:
        merges: ``"a b"``, or ``["a", "b"]`` where tokens have a space.

    Raises:
        CheckpointError: a merge is no pair.
    """
    ranks: dict[SymbolPair, int] = {}
    for rank, merge in enumerate(merges):
        pair = tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge)
        if len(pair) != 2:
            raise CheckpointError(f"{where}: merge {rank} is no pair: {merge!r}")
        ranks.pop(pair, None)
        ranks[pair] = rank
    return ranks


def apply_merges(token: str, ranks: Mapping[SymbolPair, int]) -> tuple[list[str], int]:
    """The symbols of a text after all merges, and the rank of the last merge (-1 for none)."""
    symbols, last = list(token), -1
    while len(symbols) > 1:
        candidates = [(ranks[pair], index) for index, pair in enumerate(pairwise(symbols)) if pair in ranks]
        if not candidates:
            break
        last, index = min(candidates)
        symbols[index : index + 2] = [symbols[index] + symbols[index + 1]]
    return symbols, last


def merges_make_all(tokens: Iterable[str], ranks: Mapping[SymbolPair, int]) -> bool:
    """Whether merges make every token: then ``ignore_merges`` changes nothing."""
    return all(len(apply_merges(token, ranks)[0]) == 1 for token in tokens)


def merge_scores(tokens: Sequence[str], ranks: Mapping[SymbolPair, int], where: str) -> list[float]:
    """Scores with which llama.cpp's SentencePiece tokenizer tokenizes as the merges do.

    A token that no merge makes gets the lowest score.

    Raises:
        ModelError: no scores do that; names a token.
    """
    scores: list[float] = []
    for token in tokens:
        symbols, last = apply_merges(token, ranks)
        if len(symbols) == 2:
            raise ModelError(
                f"{where}: the merges leave the token {token!r} as {symbols[0]!r} and {symbols[1]!r}, which "
                "llama.cpp's SentencePiece tokenizer would join",
                hint="a vocabulary whose merges make every token can be written",
            )
        scores.append(float(-last if len(symbols) == 1 and last >= 0 else -len(ranks)))
    return scores


def merges_of(tokens: Sequence[str], score: Mapping[str, float]) -> list[SymbolPair]:
    """The merges that tokenize as scores do: every pair of tokens whose joined text is a token, highest score
    of that token first. Of tokens with equal scores the earlier comes first.

    Args:
        tokens: that merges may make or join, in the order of their ids.
    """
    pieces = set(tokens)
    order = sorted(range(len(tokens)), key=lambda index: (-score[tokens[index]], index))
    return [
        (token[:cut], token[cut:])
        for token in (tokens[index] for index in order)
        for cut in range(1, len(token))
        if token[:cut] in pieces and token[cut:] in pieces
    ]
