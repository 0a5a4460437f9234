"""General on-policy logit distillation (GOLD): Patino et al. 2025, huggingface.co/spaces/HuggingFaceH4/
on-policy-distillation, and TRL's ``GOLDTrainer``: objectives between models with different tokenizers.

A group of tokens that covers the same bytes on both sides (``spans.py``) has merged probabilities: those of
the actual tokens before its last one, times the whole distribution at the last one,

    P(v) = prod_{i < last} p_i(x_i) * p_last(v)        (chain rule; v follows the actual tokens of the group)

Tokens v, w of both sides are matched where the bytes of the group so far and the token's are the same text:

    one token on both sides   v and w have the same bytes
    several on one side       that side has r bytes more before its last token: w = r v

The objective compares the matched outcomes and one more, everything else: distributions on both sides, so
that any objective applies, none is below 0, and with one tokenizer on both sides the loss is the plain one.
What is not matched at single tokens is compared by :mod:`uld <attar.distillation.signals.alignment.uld>`:

    L = objective(matched, everything else) + ULD(unmatched)

The second part weighs what it is worth: it is at most the probability of unmatched tokens on both sides.

Differs from TRL: the outcome "everything else"; matching by bytes instead of spelling, also inside groups
(TRL compares p_last(v) with q(v) although they continue different texts); ULD at single tokens alone; no
weights by the number of matched tokens, by which a student with 4,096 tokens would have 7 % of the objective
of a teacher with 49,152.

Letters: z (n, V) student's logits; t (m, W) teacher's; q, p their distributions; g groups; C matched
outcomes; T temperature.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attar.distillation.objectives.chunked import LossAndGrad, wide
from attar.distillation.signals.alignment.uld import sorted_distance

EPSILON = 1e-7  # of probability, for what is computed as 1 less a sum


@dataclass(frozen=True)
class GroupSide:
    """The tokens of g groups in one model.

    Attributes:
        last: int64 (g,), the row of logits that predicts each group's last token.
        earlier: int64 (e,), rows that predict the tokens before.
        tokens: int64 (e,), these tokens.
        group: int64 (e,), the group of each.
    """

    last: Tensor
    earlier: Tensor
    tokens: Tensor
    group: Tensor

    def chosen(self, part: slice) -> GroupSide:
        """Some of the groups."""
        numbers = range(*part.indices(len(self.last)))
        inside = (self.group >= numbers.start) & (self.group < numbers.stop)
        group = self.group[inside] - numbers.start
        return GroupSide(self.last[part], self.earlier[inside], self.tokens[inside], group)


@dataclass(frozen=True)
class Matching:
    """Which tokens end a group in the same text.

    Attributes:
        ours, theirs: int64 (C,), matched tokens of student and teacher.
        rests: int64, their tokens without a match, where groups are one token on both sides; else None.
    """

    ours: Tensor
    theirs: Tensor
    rests: tuple[Tensor, Tensor] | None


def merged(logits: Tensor, side: GroupSide, T: float = 1.0) -> tuple[Tensor, Tensor]:
    """log P of every token, as two parts that are added: at the last token (g, V), and of the actual tokens
    before it (g,). Logits of rows, any float type."""
    log_p = torch.log_softmax(wide(logits[side.last]) / T, -1)
    before = torch.log_softmax(wide(logits[side.earlier]) / T, -1)
    actual = before.gather(1, side.tokens[:, None])[:, 0]
    return log_p, log_p.new_zeros(len(side.last)).index_add(0, side.group, actual)


def gold_values(
    z: Tensor,
    t: Tensor,
    ours: GroupSide,
    theirs: GroupSide,
    matching: Matching,
    objective: LossAndGrad,
    T: float = 1.0,
) -> Tensor:
    """L of each group (g,), differentiable by z.

    Args:
        objective: see :mod:`attar.distillation.objectives`.
    """
    log_q, our_start = merged(z, ours, T)
    with torch.no_grad():
        log_p, their_start = merged(t, theirs, T)
    Q, P = log_q[:, matching.ours] + our_start[:, None], log_p[:, matching.theirs] + their_start[:, None]
    if matching.rests is None:
        Q, P = _with(Q, _complement(Q)), _with(P, _complement(P))
    elif len(matching.rests[0]):  # else the distributions are those of the matched tokens
        Q, P = (
            _with(x, _sum(y, unmatched))
            for x, y, unmatched in zip((Q, P), (log_q, log_p), matching.rests, strict=True)
        )
    values = differentiable(objective, T * Q, T * P, T)
    if matching.rests is not None and len(matching.rests[0]):
        q, p = (log_q[:, matching.rests[0]].exp(), log_p[:, matching.rests[1]].exp())
        values = values + sorted_distance(q, p)
    return values


def uld_values(
    z: Tensor, t: Tensor, ours: GroupSide, theirs: GroupSide, matching: Matching | None = None, T: float = 1.0
) -> Tensor:
    """ULD of the merged probabilities of each group (g,), differentiable by z; nothing is matched."""
    q, p = ((log_p + start[:, None]).exp() for log_p, start in (merged(z, ours, T), merged(t, theirs, T)))
    return sorted_distance(q, p.detach())


def _with(outcomes: Tensor, other: Tensor) -> Tensor:
    """One more outcome, (g, C + 1), of at least the probability EPSILON."""
    return torch.cat([outcomes, other.clamp(min=math.log(EPSILON))[:, None]], 1)


def _complement(outcomes: Tensor) -> Tensor:
    """The logarithm of the probability that none of the outcomes has, (g,): other tokens, now or before."""
    return (1.0 - outcomes.logsumexp(-1).exp()).clamp(min=EPSILON).log()


def _sum(log_p: Tensor, tokens: Tensor) -> Tensor:
    """The logarithm of the probability of some tokens together, (g,)."""
    return log_p[:, tokens].logsumexp(-1)


def differentiable(objective: LossAndGrad, z: Tensor, t: Tensor, T: float) -> Tensor:
    """The values (g,) of an objective, differentiable by z."""
    values: Tensor = _Values.apply(z, t, objective, T)
    return values


class _Values(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, z: Tensor, t: Tensor, objective: LossAndGrad, T: float
    ) -> Tensor:
        values, dz = objective(z, t, T)
        ctx.save_for_backward(dz)
        return values

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, *upstream: Tensor
    ) -> tuple[Tensor, None, None, None]:
        (dz,) = ctx.saved_tensors
        return dz * upstream[0][:, None], None, None, None
