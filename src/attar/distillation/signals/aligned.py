"""The online signal of a teacher with another tokenizer: it reads the same text in its own tokens.

Where both tokenizations have an edge at the same byte (``alignment/spans.py``), their predictions are compared:
by an objective on what can be matched (``alignment/gold.py``), or by their sorted probabilities
(``alignment/uld.py``). The loss is the sum over groups of tokens, divided by the student's predictions n, so that
it does not depend on how a step is divided. Groups with a token that is not predicted (a prompt's, the first one)
are left out.

Letters: B rows a batch, n the student's predictions, m the teacher's, V and W columns of their logits, g groups.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attar.data.examples import Examples
from attar.data.packing import PADDING
from attar.distillation.objectives import SLOPES
from attar.distillation.objectives.chunked import Slopes
from attar.distillation.outputs import Insides, ModelOutputs, run_model
from attar.distillation.settings import LearnSettings
from attar.distillation.signals.alignment.gold import GroupSide, Matching, gold_values, uld_values
from attar.distillation.signals.alignment.retokenize import Retokenizer
from attar.distillation.signals.alignment.spans import groups_of
from attar.distillation.signals.alignment.tokenizers import vocabulary_size
from attar.distillation.signals.target import SignalSource

GROUPS = 256  # compared at once

Key = tuple[bool, bytes]
"""Which side has more bytes before its last token (True: the student), and these bytes."""

Values = Callable[[Tensor, Tensor, GroupSide, GroupSide, Matching], Tensor]
"""``values(z, t, ours, theirs, matching)``: the loss of each group, differentiable by z."""


def aligned_signal(source: SignalSource, student: Any, settings: LearnSettings) -> AlignedTeacher:
    """The settings' objective, or ULD, between models of two tokenizers."""
    assert source.retokenizer is not None
    if settings.teacher_signals.alignment == "uld":
        values: Values = partial(_uld, T=settings.temperature)
    else:
        objective = partial(SLOPES[settings.soft_loss], **vars(settings.loss))
        values = partial(gold_values, objective=objective, T=settings.temperature)
    return AlignedTeacher(source.teacher, source.retokenizer, Vocabularies.of(source.retokenizer), values)


def _uld(z: Tensor, t: Tensor, ours: GroupSide, theirs: GroupSide, _: Matching, T: float) -> Tensor:
    return uld_values(z, t, ours, theirs, T)


@dataclass(frozen=True)
class Vocabularies:
    """The bytes of the tokens of both models, and which of them match.

    Attributes:
        sizes: token numbers of student and teacher; columns beyond are padding.
        pairs: of tokens with the same bytes or role.
        longer: for both sides the tokens in the order of their bytes, to look for those that begin with some.
        ids: for both sides token numbers by bytes.
    """

    sizes: tuple[int, int]
    pairs: list[tuple[int, int]]
    longer: tuple[list[tuple[bytes, int]], list[tuple[bytes, int]]]
    ids: tuple[dict[bytes, int], dict[bytes, int]]
    matchings: dict[Key, Matching] = field(default_factory=dict)

    @classmethod
    def of(cls, retokenizer: Retokenizer) -> Vocabularies:
        """Of a student and its teacher."""
        tables = (retokenizer.our_bytes, retokenizer.their_bytes)
        pieces = [
            sorted((piece, number) for number, piece in table.items() if isinstance(piece, bytes) and piece)
            for table in tables
        ]
        ids = [{piece: number for piece, number in reversed(side)} for side in pieces]
        sizes = (vocabulary_size(retokenizer.student), vocabulary_size(retokenizer.teacher))
        return cls(sizes, retokenizer.pairs, (pieces[0], pieces[1]), (ids[0], ids[1]))

    def matching(self, key: Key, device: torch.device) -> Matching:
        """The tokens that end a group of this key in the same text."""
        if key not in self.matchings:
            pairs = list(self._continuations(key)) if key[1] else self.pairs
            ours, theirs = (torch.tensor([pair[side] for pair in pairs], dtype=torch.int64) for side in (0, 1))
            rests = (_without(matched, size) for matched, size in zip((ours, theirs), self.sizes, strict=True))
            weight = len(self.pairs) / self.sizes[1]
            columns = (x.to(device) for x in (ours, theirs, *rests))
            self.matchings[key] = Matching(*columns, single=not key[1], weight=weight)
        return self.matchings[key]

    def _continuations(self, key: Key) -> Iterator[tuple[int, int]]:
        """Pairs (student's token, teacher's token) where the side with fewer bytes before its last token has
        these bytes first in its token."""
        ours_more, lead = key
        side = 1 if ours_more else 0
        pieces, ids = self.longer[side], self.ids[1 - side]
        for piece, number in pieces[bisect_left(pieces, (lead, -1)) :]:
            if not piece.startswith(lead):
                return
            other = ids.get(piece[len(lead) :])
            if other is not None and self.ids[side][piece] == number:
                yield (other, number) if ours_more else (number, other)


def _without(matched: Tensor, size: int) -> Tensor:
    """Numbers below ``size`` that are not matched."""
    rest = torch.ones(size, dtype=torch.bool)
    rest[matched] = False
    return rest.nonzero()[:, 0]


@dataclass
class _Groups:
    """Groups with one matching: rows of the logits, as they are collected."""

    last: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))
    earlier: tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]] = field(
        default_factory=lambda: ([], [])
    )

    def add(self, rows: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]) -> None:
        """A group: on both sides the rows that predict its tokens, and the tokens."""
        number = len(self.last[0])
        for side in (0, 1):
            self.last[side].append(rows[side][-1])
            self.earlier[side].extend(
                (row, token, number) for row, token in zip(rows[side][:-1], tokens[side][:-1], strict=True)
            )

    def sides(self, device: torch.device) -> list[GroupSide]:
        """Of student and teacher."""
        sides = []
        for last, earlier in zip(self.last, self.earlier, strict=True):
            columns = torch.tensor(earlier, dtype=torch.int64, device=device).reshape(-1, 3).unbind(1)
            rows = torch.tensor(last, dtype=torch.int64, device=device)
            sides.append(GroupSide(rows, *columns))
        return sides


@dataclass(frozen=True)
class AlignedTeacher:
    """A teacher that reads each batch in its own tokens.

    Attributes:
        whole: its targets take all predictions of a batch at once: a group may end in another chunk.
    """

    model: Any
    retokenizer: Retokenizer
    vocabularies: Vocabularies
    values: Values
    whole: bool = True

    def target(self, batch: Examples, insides: Insides) -> AlignedTarget:
        """See :class:`attar.distillation.signals.target.Signal`; positions differ, so no insides."""
        assert insides == Insides(), "positions of two tokenizers cannot be compared"
        texts = [self.retokenizer(row) for row in batch.tokens.tolist()]
        rows = torch.full((len(texts), max(len(text.tokens) for text in texts)), PADDING)
        for row, text in zip(rows, texts, strict=True):
            row[: len(text.tokens)] = torch.tensor(text.tokens)
        examples = Examples.of_text(rows.to(batch.tokens.device))
        collected: dict[Key, _Groups] = defaultdict(_Groups)
        our_rows, their_rows = _numbers(batch), _numbers(examples)
        for number, (text, tokens) in enumerate(zip(texts, batch.tokens.tolist(), strict=True)):
            for group in groups_of(text.ours, text.theirs):
                parts = (group.ours, group.theirs)
                numbers = [
                    [table[number][token - 1] if token else -1 for token in part]
                    for table, part in zip((our_rows, their_rows), parts, strict=True)
                ]
                chosen = [[tokens[token] for token in parts[0]], [text.tokens[token] for token in parts[1]]]
                if min(min(side) for side in numbers) >= 0:
                    collected[self._key(chosen)].add(numbers, chosen)
        with torch.no_grad():
            outputs = run_model(self.model, examples, insides)
        device = batch.tokens.device
        comparisons = [
            (self.vocabularies.matching(key, device), *groups.sides(device))
            for key, groups in sorted(collected.items())
        ]
        return AlignedTarget(outputs.logits(), comparisons, self.vocabularies.sizes, self.values)

    def _key(self, tokens: Sequence[Sequence[int]]) -> Key:
        """Of a group: the bytes before its last token that one side has more than the other."""
        tables = (self.retokenizer.our_bytes, self.retokenizer.their_bytes)
        starts = [
            b"".join(_plain(table[token]) for token in side[:-1])
            for table, side in zip(tables, tokens, strict=True)
        ]
        ours_more = len(starts[0]) > len(starts[1])
        longer, shorter = starts if ours_more else starts[::-1]
        return ours_more, longer[len(shorter) :]


def _plain(piece: bytes | str) -> bytes:
    return piece if isinstance(piece, bytes) else b""


def _numbers(batch: Examples) -> list[list[int]]:
    """The number of each position's prediction; -1 where nothing is predicted."""
    predicted = batch.predicted
    numbers = predicted.flatten().cumsum(0).reshape(predicted.shape) - 1
    return list(numbers.masked_fill(~predicted, -1).tolist())


@dataclass(frozen=True)
class AlignedTarget:
    """The teacher's predictions of a batch in its own tokens, and the groups that are compared."""

    logits: Tensor
    comparisons: Sequence[tuple[Matching, GroupSide, GroupSide]]
    sizes: tuple[int, int]
    values: Values
    outputs: ModelOutputs | None = None

    def slopes(self, z: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        """See :class:`attar.distillation.signals.target.SoftTarget`, for all predictions: a group's loss is
        that of its last token, its gradient that of all its tokens."""
        student = z[:, : self.sizes[0]]
        t = self.logits[:, : self.sizes[1]]
        values = z.new_zeros(len(z), dtype=torch.promote_types(z.dtype, torch.float32))
        gradient = torch.zeros_like(z)
        with torch.enable_grad(), torch.autocast(z.device.type, enabled=False):
            for matching, ours, theirs in self.comparisons:
                for start in range(0, len(ours.last), GROUPS):
                    block = slice(start, start + GROUPS)
                    one, other = ours.chosen(block), theirs.chosen(block)
                    rows, local = _own_rows(one)
                    x = student[rows].detach().requires_grad_()
                    losses = self.values(x, t, local, other, matching)
                    (dz,) = torch.autograd.grad(losses.sum(), x)
                    values[one.last] = losses.detach().to(values.dtype)
                    gradient[rows, : self.sizes[0]] += dz
        return values, gradient


def _own_rows(side: GroupSide) -> tuple[Tensor, GroupSide]:
    """The rows that a side reads, and the side with their numbers instead."""
    rows, inverse = torch.cat([side.last, side.earlier]).unique(return_inverse=True)
    last, earlier = inverse.split([len(side.last), len(side.earlier)])
    return rows, GroupSide(last, earlier, side.tokens, side.group)
