"""The merges of a BPE, and the scores that llama.cpp's SentencePiece tokenizer has in their place.

A BPE joins, again and again, the neighbouring pair of lowest rank, the leftmost of equals. llama.cpp's
SentencePiece tokenizer (``llm_tokenizer_spm``) knows no pairs: it joins the neighbours whose text together is
the token of highest score. The two do the same when

    score(t) = -rank of the pair that makes t, where t stands alone,

and every token t can be made by the merges. For: the two agree up to some step, and two neighbours u, v now
have the text of a token t. Between their outer ends merges have run as they would on t alone, so t alone came
to u, v as well, and from there nothing leads to t but the pair (u, v): it is the pair that makes t. Every
joint that the scores allow is thus a merge, of the rank that its score says.

A token t that its merges do not make harms only if t alone ends as two symbols: those the scores would join.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from attar.errors import CheckpointError, ModelError

TokenPair = tuple[str, str]


def read_merges(merges: Iterable[Any], where: str) -> dict[TokenPair, int]:
    """The merges of a tokenizer.json: pairs by rank, in their order. Of equal pairs the last counts.

    Args:
        merges: ``"a b"`` or ``["a", "b"]``, the spelling that holds tokens with a space.
        where: the file, for messages.

    Raises:
        CheckpointError: a merge is no pair.
    """
    ranks: dict[TokenPair, int] = {}
    for rank, merge in enumerate(merges):
        pair = tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge)
        if len(pair) != 2:
            raise CheckpointError(f"{where}: merge {rank} is no pair: {merge!r}")
        ranks.pop(pair, None)
        ranks[pair] = rank
    return ranks


def derive(token: str, ranks: Mapping[TokenPair, int]) -> tuple[list[str], int]:
    """What a text becomes under merges.

    Returns:
        Its symbols, and the rank of the last merge (-1 for none).
    """
    symbols, last = list(token), -1
    while len(symbols) > 1:
        candidates = [(ranks[pair], place) for place, pair in enumerate(pairwise(symbols)) if pair in ranks]
        if not candidates:
            break
        last, place = min(candidates)
        symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]
    return symbols, last


def complete(tokens: Iterable[str], ranks: Mapping[TokenPair, int]) -> bool:
    """Whether merges make every token: then ``ignore_merges`` changes nothing."""
    return all(len(derive(token, ranks)[0]) == 1 for token in tokens)


def scores(tokens: Sequence[str], ranks: Mapping[TokenPair, int], where: str) -> list[float]:
    """The score of each token, with which llama.cpp's SentencePiece tokenizer does what the merges do.

    A token that no merge makes gets one below all others.

    Raises:
        ModelError: no scores can do that; names a token.
    """
    found: list[float] = []
    for token in tokens:
        symbols, last = derive(token, ranks)
        if len(symbols) == 2:
            raise ModelError(
                f"{where}: the merges leave the token {token!r} as {symbols[0]!r} and {symbols[1]!r}, which "
                "llama.cpp's SentencePiece tokenizer would join",
                hint="a vocabulary whose merges make every token can be written",
            )
        found.append(float(-last if len(symbols) == 1 and last >= 0 else -len(ranks)))
    return found


def merges_of(tokens: Sequence[str], score: Mapping[str, float]) -> list[TokenPair]:
    """The merges that do what scores do: every pair of tokens whose text together is a token, by the token's
    score, the highest first. Of tokens with equal scores the earlier comes first.

    Args:
        tokens: those that merges may make or join, in the order of their ids.
        score: by token.
    """
    pieces = set(tokens)
    order = sorted(range(len(tokens)), key=lambda index: (-score[tokens[index]], index))
    return [
        (token[:cut], token[cut:])
        for token in (tokens[index] for index in order)
        for cut in range(1, len(token))
        if token[:cut] in pieces and token[cut:] in pieces
    ]
