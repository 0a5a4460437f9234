"""Tokens as spans of a text's bytes, and the groups of tokens in which two tokenizations of it agree.

    text      n   a   ï       v   e      bytes 0..6, "ï" takes two
    student  [n   a] [ï] ..] [v   e]     (0, 2) (2, 3) (3, 4) (4, 6)
    teacher  [n] [a   ï     ] [v   e]    (0, 1) (1, 4) (4, 6)
    groups   {0, 1, 2 | 0, 1}  {3 | 2}   between the edges that both have: 0, 4, 6

Bytes rather than decoded strings: halves of a character compare, and a token that is no text (BOS), or that
one side alone has, shifts nothing. A special token takes one byte of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

ByteSpan = tuple[int, int]
"""First byte of a token, and the byte after its last; :data:`NOWHERE` for a token that is no part of the
text."""

NOWHERE: ByteSpan = (-1, -1)


@dataclass(frozen=True)
class SpanGroup:
    """The fewest tokens of both sides that cover the same bytes: positions in their rows."""

    ours: range
    theirs: range


def groups_of(ours: Sequence[ByteSpan], theirs: Sequence[ByteSpan]) -> list[SpanGroup]:
    """Groups in order; bytes that one side does not cover are in none.

    Args:
        ours, theirs: spans of the tokens of the same text, in order.
    """
    edges = sorted(_edges(ours) & _edges(theirs))
    return [
        SpanGroup(our_span, their_span)
        for our_span, their_span in zip(_between(edges, ours), _between(edges, theirs), strict=True)
        if our_span and their_span
    ]


def _edges(spans: Sequence[ByteSpan]) -> set[int]:
    return {edge for span in spans if span != NOWHERE for edge in span}


def _between(edges: list[int], spans: Sequence[ByteSpan]) -> list[range]:
    """For each pair of neighbouring edges the tokens that cover all between them; empty where bytes are left
    out."""
    ranges = []
    token = 0
    for low, high in pairwise(edges):
        while token < len(spans) and spans[token][0] < low:
            token += 1
        first, covered = token, low
        while token < len(spans) and spans[token][0] < high and spans[token] != NOWHERE:
            covered = spans[token][1] if spans[token][0] <= covered else high + 1  # a gap
            token += 1
        ranges.append(range(first, token if covered == high else first))
    return ranges


def texts_of(content: bytes) -> Iterator[tuple[int, str]]:
    """The valid UTF-8 in bytes that may begin and end inside a character: offset and text."""
    start = 0
    while start < len(content):
        try:
            yield start, content[start:].decode()
            return
        except UnicodeDecodeError as error:
            if error.start:
                yield start, content[start : start + error.start].decode()
            start += error.end
