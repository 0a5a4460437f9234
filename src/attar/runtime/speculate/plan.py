"""A pass that is being planned: which drafts are in it, what it takes and what it brings.

speed = (B + sum of survivals) / (t(B, tokens) + steps of the draft model)
loss  = time / plain time - 1, in plain passes: what is lost if every draft is rejected
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from attar.runtime.speculate.cost import Cost


@dataclass(frozen=True)
class Chance:
    """A draft that could be made or kept.

    Args:
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
    """

    def __init__(self, cost: Cost, batch: int, beside: int, drafted: bool) -> None:
        self.cost, self.batch, self.beside, self.drafted = cost, batch, beside, drafted
        self.plain = cost.plain(batch)
        self.prompts = cost.plain(batch, beside) - self.plain
        self.reset(())

    def reset(self, chances: Sequence[Chance]) -> None:
        """Starts again, with these."""
        self.tokens, self.gain, self.widths = self.batch + self.beside, 0.0, [0]
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
        time = self.cost.target(self.batch, self.batch + self.beside + count) - self.prompts + steps
        return (self.batch + count) / time

    @property
    def time(self) -> float:
        """Seconds, without what the prompts beside take anyway."""
        steps = sum(self.cost.draft(width) for width in self.widths) if self.drafted else 0.0
        return self.cost.target(self.batch, self.tokens) - self.prompts + steps

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return (self.batch + self.gain) / self.time

    @property
    def loss(self) -> float:
        """Plain passes lost if all drafts are rejected."""
        return self.time / self.plain - 1

    def _count(self, chance: Chance, sign: int) -> None:
        self.tokens += sign * chance.size
        self.gain += sign * chance.survival
        while len(self.widths) < chance.depth:
            self.widths.append(0)
        self.widths[chance.depth - 1] += sign
