"""The online signal of a teacher with another tokenizer: it reads the same text in its own tokens.

Where both tokenizations have an edge at the same byte (``alignment/spans.py``), their predictions are
compared: by an objective on what can be matched (``alignment/gold.py``), or by their sorted probabilities
(``alignment/uld.py``). The loss is the sum over groups of tokens, divided by the student's predictions n, so
that it does not depend on how a step is divided. Groups with a token that is not predicted (a prompt's, the
first one, those beyond the teacher's context) are left out.

Letters: B rows a batch, n the student's predictions, V and W columns of the student's and the teacher's
logits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attar.data.examples import Examples
from attar.data.packing import PADDING, row_length
from attar.distillation.objectives import OBJECTIVES
from attar.distillation.outputs import Intermediates, ModelOutputs, run_model
from attar.distillation.settings import LearnSettings
from attar.distillation.signals.alignment.gold import GroupSide, Matching, gold_values, uld_values
from attar.distillation.signals.alignment.matching import Key, Vocabularies
from attar.distillation.signals.alignment.retokenize import Retokenizer, TwoTokenizations
from attar.distillation.signals.alignment.spans import SpanGroup, groups_of
from attar.distillation.signals.target import SignalSource

GROUPS = 256  # compared at once
UNLIMITED = 1 << 40  # tokens

GroupValues = Callable[[Tensor, Tensor, GroupSide, GroupSide, Matching], Tensor]
"""``values(z, t, ours, theirs, matching)``: the loss of each group, differentiable by z."""


def aligned_signal(source: SignalSource, student: Any, settings: LearnSettings) -> AlignedTeacher:
    """The settings' objective, or ULD, between models of two tokenizers."""
    retokenizer, T = source.tokens.retokenizer, settings.temperature
    assert retokenizer is not None
    if settings.alignment == "uld":
        values: GroupValues = partial(uld_values, T=T)
    else:
        objective = partial(OBJECTIVES[settings.soft_loss], **vars(settings.loss))
        values = partial(gold_values, objective=objective, T=T)
    context = UNLIMITED if source.checkpoint is None else row_length(UNLIMITED, source.checkpoint.config)
    return AlignedTeacher(source.teacher, retokenizer, Vocabularies.of(retokenizer), values, context)


@dataclass(frozen=True)
class AlignedTeacher:
    """A teacher that reads each batch in its own tokens.

    Attributes:
        context: the most tokens that it reads; a text may have more of them than of the student's.
    """

    model: Any
    retokenizer: Retokenizer
    vocabularies: Vocabularies
    values: GroupValues
    context: int = UNLIMITED

    def target(self, batch: Examples, intermediates: Intermediates) -> AlignedTarget:
        """See :class:`attar.distillation.signals.target.Signal`; positions differ, so no intermediates."""
        assert intermediates == Intermediates(), "positions of two tokenizers cannot be compared"
        rows = batch.tokens.tolist()
        texts = [self.retokenizer(row).cut(self.context) for row in rows]
        examples = _examples(texts, batch.tokens.device)
        collected = self._collect(batch, examples, rows, texts)
        with torch.no_grad():
            logits = run_model(self.model, examples).logits()
        device = batch.tokens.device
        comparisons = [
            GroupComparison(self.vocabularies.matching(key, device), *groups.sides(device))
            for key, groups in sorted(collected.items())
        ]
        return AlignedTarget(logits, comparisons, self.vocabularies.sizes, self.values)

    def _collect(
        self, batch: Examples, examples: Examples, rows: list[list[int]], texts: list[TwoTokenizations]
    ) -> dict[Key, GroupList]:
        """The groups of all rows whose tokens are predicted on both sides."""
        collected: dict[Key, GroupList] = defaultdict(GroupList)
        numbers = zip(_numbers(batch), _numbers(examples), strict=True)
        for row, text, (ours, theirs) in zip(rows, texts, numbers, strict=True):
            for group in groups_of(text.ours, text.theirs):
                pair = GroupTokens.of(group, (row, text.tokens), (ours, theirs))
                if pair is not None:
                    collected[self.vocabularies.key(*pair.tokens)].add(pair)
        return collected


@dataclass(frozen=True)
class GroupTokens:
    """The tokens of a group in student and teacher, and the rows of logits that predict them."""

    tokens: tuple[list[int], list[int]]
    rows: tuple[list[int], list[int]]

    @classmethod
    def of(
        cls, group: SpanGroup, tokens: tuple[list[int], list[int]], numbers: tuple[list[int], list[int]]
    ) -> GroupTokens | None:
        """Of both rows' tokens and the numbers of their predictions; None where a token is not predicted."""
        if group.ours.start == 0 or group.theirs.start == 0:
            return None
        ranges = (group.ours, group.theirs)
        ours, theirs = (part[span.start : span.stop] for part, span in zip(tokens, ranges, strict=True))
        our_rows, their_rows = (
            part[span.start - 1 : span.stop - 1] for part, span in zip(numbers, ranges, strict=True)
        )
        return None if -1 in our_rows or -1 in their_rows else cls((ours, theirs), (our_rows, their_rows))


@dataclass
class GroupList:
    """Groups with one matching, as they are collected: rows of the logits and tokens, for both sides."""

    last: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))
    earlier: tuple[list[list[int]], list[list[int]]] = field(default_factory=lambda: ([], []))

    def add(self, pair: GroupTokens) -> None:
        """One more group."""
        number = len(self.last[0])
        for side in (0, 1):
            rows, tokens = pair.rows[side], pair.tokens[side]
            self.last[side].append(rows[-1])
            self.earlier[side].extend(
                [row, token, number] for row, token in zip(rows[:-1], tokens[:-1], strict=True)
            )

    def sides(self, device: torch.device) -> tuple[GroupSide, GroupSide]:
        """Of student and teacher."""
        ours, theirs = (self._side(side, device) for side in (0, 1))
        return ours, theirs

    def _side(self, side: int, device: torch.device) -> GroupSide:
        last = torch.tensor(self.last[side], dtype=torch.int64, device=device)
        earlier = torch.tensor(self.earlier[side], dtype=torch.int64, device=device).reshape(-1, 3)
        return GroupSide(last, *earlier.unbind(1))


@dataclass(frozen=True)
class GroupComparison:
    """Groups with one matching."""

    matching: Matching
    ours: GroupSide
    theirs: GroupSide


@dataclass(frozen=True)
class AlignedTarget:
    """The teacher's predictions of a batch in its own tokens, and the groups that are compared.

    Attributes:
        unchunked: all predictions are needed at once: a group may end in another chunk.
    """

    logits: Tensor
    comparisons: Sequence[GroupComparison]
    sizes: tuple[int, int]
    values: GroupValues
    outputs: ModelOutputs | None = None
    unchunked: bool = True

    def loss_and_grad(self, z: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        """See :class:`attar.distillation.signals.target.SoftTarget`, for all predictions: a group's loss is
        that of its last token, its gradient that of all its tokens."""
        student, t = z[:, : self.sizes[0]], self.logits[:, : self.sizes[1]]
        values = z.new_zeros(len(z), dtype=torch.promote_types(z.dtype, torch.float32))
        gradient = torch.zeros_like(z)
        known = gradient[:, : student.shape[1]]
        with torch.enable_grad(), torch.autocast(z.device.type, enabled=False):
            for comparison in self.comparisons:
                for start in range(0, len(comparison.ours.last), GROUPS):
                    block = slice(start, start + GROUPS)
                    ours, theirs = comparison.ours.chosen(block), comparison.theirs.chosen(block)
                    rows, local = _own_rows(ours)
                    x = student[rows].detach().requires_grad_()
                    losses = self.values(x, t, local, theirs, comparison.matching)
                    (dz,) = torch.autograd.grad(losses.sum(), x)
                    values[ours.last] = losses.detach().to(values.dtype)
                    known[rows] += dz
        return values, gradient


def _own_rows(side: GroupSide) -> tuple[Tensor, GroupSide]:
    """The rows that a side reads, and the side with their numbers instead."""
    rows, inverse = torch.cat([side.last, side.earlier]).unique(return_inverse=True)
    last, earlier = inverse.split([len(side.last), len(side.earlier)])
    return rows, GroupSide(last, earlier, side.tokens, side.group)


def _examples(texts: Sequence[TwoTokenizations], device: torch.device) -> Examples:
    """The teacher's rows, padded on the right."""
    rows = torch.full((len(texts), max(len(text.tokens) for text in texts)), PADDING)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text.tokens)] = torch.tensor(text.tokens)
    return Examples.of_text(rows.to(device))


def _numbers(batch: Examples) -> list[list[int]]:
    """The number of each position's prediction; -1 where nothing is predicted."""
    predicted = batch.predicted
    numbers = predicted.flatten().cumsum(0).reshape(predicted.shape) - 1
    return list(numbers.masked_fill(~predicted, -1).tolist())
