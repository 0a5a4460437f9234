"""Which tokens of two vocabularies end a group in the same text (see ``gold.py``).

Letters: C matched tokens; r the bytes that one side has more before its last token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attar.distillation.signals.alignment.gold import Matching
from attar.distillation.signals.alignment.retokenize import Retokenizer
from attar.distillation.signals.alignment.tokenizers import vocabulary_size
from attar.models.token_bytes import TokenBytes

Key = tuple[bool, bytes]
"""Whether it is the student that has more bytes before its last token, and r."""

SAME: Key = (False, b"")


@dataclass(frozen=True)
class Pieces:
    """The tokens of a vocabulary that are text, in the order of their bytes."""

    pieces: list[tuple[bytes, int]]
    ids: dict[bytes, int]

    @classmethod
    def of(cls, table: Mapping[int, TokenBytes]) -> Pieces:
        """Of the bytes of each token; of tokens with the same bytes the first one."""
        pieces = sorted((piece, number) for number, piece in table.items() if piece and type(piece) is bytes)
        return cls(pieces, dict(reversed(pieces)))

    def beginning(self, lead: bytes) -> Iterator[tuple[bytes, int]]:
        """What follows ``lead`` in the tokens that begin with it, and the tokens."""
        for piece, number in self.pieces[bisect_left(self.pieces, (lead, -1)) :]:
            if not piece.startswith(lead):
                return
            if self.ids[piece] == number:
                yield piece[len(lead) :], number


@dataclass(frozen=True)
class Vocabularies:
    """The tokens of student and teacher.

    Attributes:
        tables: the bytes of each token.
        sizes: token numbers; columns of logits beyond are padding.
        pairs: of tokens with the same bytes or role.
    """

    tables: tuple[Mapping[int, TokenBytes], Mapping[int, TokenBytes]]
    sizes: tuple[int, int]
    pairs: list[tuple[int, int]]
    ours: Pieces
    theirs: Pieces
    matchings: dict[Key, Matching] = field(default_factory=dict)

    @classmethod
    def of(cls, retokenizer: Retokenizer) -> Vocabularies:
        """Of the models that a retokenizer joins."""
        tables = (retokenizer.our_bytes, retokenizer.their_bytes)
        sizes = (vocabulary_size(retokenizer.student), vocabulary_size(retokenizer.teacher))
        return cls(tables, sizes, retokenizer.pairs, Pieces.of(tables[0]), Pieces.of(tables[1]))

    def key(self, ours: Sequence[int], theirs: Sequence[int]) -> Key:
        """Of a group of tokens on both sides: those of one key have one matching."""
        start, other = (
            b"".join(_text(table, token) for token in tokens[:-1])
            for table, tokens in zip(self.tables, (ours, theirs), strict=True)
        )
        ours_more = len(start) > len(other)
        return ours_more, start[len(other) :] if ours_more else other[len(start) :]

    def matching(self, key: Key, device: torch.device) -> Matching:
        """The tokens that end groups of a key."""
        if key not in self.matchings:
            pairs = self.pairs if key == SAME else list(self._continuations(*key))
            ours, theirs = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).T.contiguous()
            rests = (_without(ours, self.sizes[0]).to(device), _without(theirs, self.sizes[1]).to(device))
            pair = (ours.to(device), theirs.to(device))
            self.matchings[key] = Matching(*pair, rests if key == SAME else None)
        return self.matchings[key]

    def _continuations(self, ours_more: bool, lead: bytes) -> Iterator[tuple[int, int]]:
        """(student's token, teacher's token): the side that has less before its last token has ``lead`` in
        it."""
        longer, shorter = (self.theirs, self.ours) if ours_more else (self.ours, self.theirs)
        for end, number in longer.beginning(lead):
            other = shorter.ids.get(end)
            if other is not None:
                yield (other, number) if ours_more else (number, other)


def _text(table: Mapping[int, TokenBytes], token: int) -> bytes:
    piece = table.get(token, b"")
    return piece if isinstance(piece, bytes) else b""


def _without(matched: Tensor, size: int) -> Tensor:
    """Numbers below ``size`` that are not matched."""
    unmatched = torch.ones(size, dtype=torch.bool)
    unmatched[matched] = False
    return unmatched.nonzero()[:, 0]
