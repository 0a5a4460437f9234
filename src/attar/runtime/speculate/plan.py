"""A pass that is being planned: which drafts are in it, what it takes and what it brings.

speed = (B + sum of survivals) / (t(B, tokens) + steps of the draft model)
loss  = time / plain time - 1, in plain passes: what is lost if every draft is rejected
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from attar.runtime.speculate.cost import Cost


class Chance(NamedTuple):
    """A draft that could be made or kept.

    Attributes:
        survival: tokens it adds to the pass.
        place: of its sequence in the batch.
        depth: from 1.
        node: its index in the draft, from 1.
        size: tokens run for it.
    """

    survival: float
    place: int
    depth: int
    node: int
    size: int = 1


class Pass:
    """What has been planned so far.

    Args:
        cost: the times.
        batch: B, sequences that decode.
        beside: tokens of prompts in the pass.
        drafted: a model is run for the drafts, step by step: one step for every depth, at the width there.
        most: tokens that may be added.
    """

    def __init__(self, cost: Cost, batch: int, beside: int, drafted: bool, most: int) -> None:
        self.cost, self.batch, self.drafted, self._base = cost, batch, drafted, batch + beside
        self.plain = cost.plain(batch)
        self.prompts = cost.plain(batch, beside) - self.plain if beside else 0.0
        self._times = cost.targets(batch, self._base, most + 1)
        self.reset(())

    def reset(self, chances: Sequence[Chance]) -> None:
        """Starts again, with these."""
        self.added, self.gain, self.steps, self._widths = 0, 0.0, 0.0, [0]
        for chance in chances:
            self._count(chance, 1)

    def add(self, chance: Chance) -> float:
        """One more draft; the loss if all are rejected."""
        self._count(chance, 1)
        return self.loss

    def drop(self, chance: Chance) -> None:
        """Takes the last one back."""
        self._count(chance, -1)

    def perfect(self, count: int) -> float:
        """Tokens a second if one sequence had ``count`` drafts and all were accepted; where only
        one size was measured, without end.
        """
        if self.cost.guesses:
            return math.inf
        steps = count * self.cost.draft(1) if self.drafted else 0.0
        time = self.cost.target(self.batch, self._base + count) - self.prompts + steps
        return (self.batch + count) / time

    @property
    def time(self) -> float:
        """Seconds, without what the prompts beside take anyway."""
        return self._times[self.added] - self.prompts + self.steps

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return (self.batch + self.gain) / self.time

    @property
    def loss(self) -> float:
        """Plain passes lost if all drafts are rejected."""
        return self.time / self.plain - 1

    def _count(self, chance: Chance, sign: int) -> None:
        self.added += sign * chance.size
        self.gain += sign * chance.survival
        if self.drafted:
            self._widen(chance.depth, sign)

    def _widen(self, depth: int, sign: int) -> None:
        """So many more sequences in the draft model's step at a depth."""
        self._widths += [0] * (depth - len(self._widths))
        before = self._widths[depth - 1]
        self._widths[depth - 1] += sign
        self.steps += self.cost.draft(before + sign) - self.cost.draft(before)
