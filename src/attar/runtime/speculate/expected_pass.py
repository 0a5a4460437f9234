"""A pass of the target while drafts are added to it: its expected tokens, its seconds, and what it may lose.

    speed      (B + sum of survivals) / (t(B, n) + seconds of the proposer: begin + steps)
    loss       (t(B, n) + seconds of the proposer) / t(B, B) - 1, if all drafts are rejected

Letters: B sequences that decode, n tokens of the pass, t seconds (``latency.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from attar.runtime.speculate.latency import Latency


class Candidate(NamedTuple):
    """A draft that may be run, of a ``row`` of the batch: a node of its tree, or a kind before drafting.

    ``steps``: it takes a step of the draft model. ``sibling``: of the chain's draft at its depth.
    """

    survival: float
    row: int
    depth: int
    node: int
    size: int = 1  # tokens
    steps: bool = False
    sibling: bool = False

    def order(self) -> tuple[float, int, bool, int, int]:
        """The likeliest first, parents before children."""
        return -self.survival, self.depth, self.sibling, self.row, self.node


class ExpectedPass:
    """Time and expected tokens of a pass while drafts are added, without the time of its prompts."""

    def __init__(self, latency: Latency, batch: int, prompt_tokens: int = 0) -> None:
        self.latency, self.batch, self.prompt_tokens = latency, batch, prompt_tokens
        self.plain = self.seconds = latency.target(batch, batch)
        self.tokens, self.gain, self.steps = batch, 0.0, 0.0
        self.levels: dict[int, tuple[int, float]] = {}  # sequences and seconds of a step, by depth
        self.speed, self.loss = batch / self.plain, 0.0  # tokens a second; plain passes, if all are rejected

    def add(self, candidate: Candidate, times: int = 1) -> ExpectedPass:
        """Add a draft, of so many sequences; with -1 remove it."""
        self.tokens, self.gain = self.tokens + times * candidate.size, self.gain + times * candidate.survival
        if candidate.steps:
            width, before = self.levels.get(candidate.depth, (0, 0.0))
            step = self.latency.draft(width + times, candidate.depth == 1)
            self.levels[candidate.depth] = width + times, step
            self.steps += step - before
        self.seconds = self.latency.target(self.batch, self.tokens, self.prompt_tokens) + self.steps
        self.speed, self.loss = (self.batch + self.gain) / self.seconds, self.seconds / self.plain - 1
        return self

    def remove(self, candidates: Sequence[Candidate]) -> None:
        for candidate in reversed(candidates):
            self.add(candidate, -1)

    @property
    def min_chance(self) -> float:
        """Survival of a draft that is worth its part of the pass; 0 where there are none."""
        drafts, verifying = self.tokens - self.batch, self.seconds - self.steps - self.plain
        return min(self.speed * verifying / drafts, 1.0) if drafts else 0.0
