"""How far losses add up: a factor of all, and one of pairs in a block, from points measured as a whole.

    J(c) = a sum_g l_g + 2 b sum_{g < h of one block} sqrt(l_g l_h)         l_g = loss[g, c_g]

    (a, b) = argmin sum_c ((a S_c + b P_c) / J_c - 1)^2      a, b >= 0      S, P: the two sums of point c

Two changes of one block add to the same hidden state: to second order the KL of both has a mixed term, of at
most twice the geometric mean. The budget is solved again with the loss of each option beside the measured
plan, where the other groups h of its block are as they were:

    loss'[g, o] = a l_go + b sqrt(l_go) sum_h sqrt(l_h)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from attar.planner.solve import PlanPoint
from attar.quantization.mixed_precision.allocate import Option

LEAST = 0.1  # of the sum: the least that groups add to a cut
OptionsFunction = Callable[[], Mapping[str, Sequence[Option]]]


def corrected_losses(
    options: OptionsFunction,
    measured: Sequence[PlanPoint],
    blocks: Sequence[str],
    apart: Mapping[str, float],
) -> OptionsFunction:
    """The options with corrected losses.

    Args:
        options: with the losses of each group alone.
        measured: points whose ``loss`` was measured as a whole; the first is the plan.
        blocks: names of the blocks, with which the names of their groups begin.
        apart: KL of what is no group, by format of keys and values: theirs, and of a cut; it counts as it is.
    """
    table = {(group, o.name): o.loss for group, listed in options().items() for o in listed}
    losses = [{group: table[group, name] for group, name in point.choice.items()} for point in measured]
    sums = [math.fsum(parts.values()) for parts in losses]
    pairs = [pair_sum(parts, blocks) for parts in losses]
    joint = [
        max(point.loss - apart.get(point.kv_dtype, 0.0), LEAST * total, 1e-30)
        for point, total in zip(measured, sums, strict=True)
    ]
    a, b = fitted(sums, pairs, joint)
    roots = _roots_of_blocks(losses[0], blocks)
    plan_losses = losses[0]

    def corrected() -> dict[str, list[Option]]:
        return {
            group: [
                replace(option, loss=a * option.loss + b * math.sqrt(option.loss) * _others(group))
                for option in listed
            ]
            for group, listed in options().items()
        }

    def _others(group: str) -> float:
        """sum_h sqrt(l_h)."""
        block = _block_of(group, blocks)
        return 0.0 if block is None else max(roots[block] - math.sqrt(plan_losses[group]), 0.0)

    return corrected


def fitted(sums: Sequence[float], pairs: Sequence[float], joint: Sequence[float]) -> tuple[float, float]:
    """a and b; where b would be negative it is 0, and where a would be, a alone is fitted."""
    rows = [(s / j, p / j) for s, p, j in zip(sums, pairs, joint, strict=True)]
    ss, sp, pp = (math.fsum(x[i] * x[k] for x in rows) for i, k in ((0, 0), (0, 1), (1, 1)))
    s, p = (math.fsum(x[i] for x in rows) for i in (0, 1))
    alone = s / ss if ss > 0 else 1.0
    determinant = ss * pp - sp * sp
    if len(rows) < 3 or determinant <= 1e-6 * ss * pp:
        return alone, 0.0
    a, b = (pp * s - sp * p) / determinant, (ss * p - sp * s) / determinant
    return (a, b) if a > 0 and b > 0 else (alone, 0.0)


def pair_sum(losses: Mapping[str, float], blocks: Sequence[str]) -> float:
    """P: twice the sum over pairs of one block of the roots of their products."""
    roots = _roots_of_blocks(losses, blocks)
    squares = math.fsum(loss for group, loss in losses.items() if _block_of(group, blocks) is not None)
    return math.fsum(root * root for root in roots.values()) - squares


def _roots_of_blocks(losses: Mapping[str, float], blocks: Sequence[str]) -> dict[str, float]:
    """sum_g sqrt(l_g) by block."""
    roots = dict.fromkeys(blocks, 0.0)
    for group, loss in losses.items():
        block = _block_of(group, blocks)
        if block is not None:
            roots[block] += math.sqrt(loss)
    return roots


def _block_of(group: str, blocks: Sequence[str]) -> str | None:
    return next((block for block in blocks if group.startswith(f"{block}.")), None)
