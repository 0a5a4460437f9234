"""A runner without a model: it keeps tokens in the slots where keys and values would be, and its logits are a
function of the tokens that it finds there. So a wrong block, slot or copy gives other texts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from attar.runtime.step import StepInput

VOCABULARY = 50
EMPTY = -7


def logits_after(tokens: Sequence[int]) -> Tensor:
    """The model: (VOCABULARY,) float32 from all tokens so far."""
    seed = 1469598103
    for token in tokens:
        seed = (seed ^ (int(token) + 1)) * 1099511628211 % 2**63
    draws = np.random.default_rng(seed)
    return torch.from_numpy(draws.standard_normal(VOCABULARY).astype(np.float32) * 2)


def seen(position: int, index: int, tree: Sequence[int] | None) -> list[int]:
    """Places that token ``index`` of a span sees: the prefix, its ancestors and itself."""
    own = []
    while index >= 0:
        own.append(position + index)
        index = index - 1 if tree is None else tree[index]
    return [*range(position), *reversed(own)]


class FakeRunner:
    """A ``Runner`` whose keys are the tokens themselves."""

    repeats = True

    def __init__(self, blocks: int = 64, block_size: int = 4, context: int | None = 200) -> None:
        self.capacity, self.block_size, self.context = blocks, block_size, context
        self.vocabulary = VOCABULARY
        self.pool = np.full(blocks * block_size, EMPTY)
        self.ran = 0  # tokens
        self.steps: list[StepInput] = []
        self.fails: Exception | None = None
        self.poison: set[int] = set()  # logits after these tokens are NaN

    def run(self, step: StepInput) -> Tensor:
        step.check(self.block_size, self.capacity)
        if self.fails is not None:
            raise self.fails
        self.ran += step.count
        self.steps.append(step)
        blocks = self.pool.reshape(self.capacity, self.block_size)
        for old, new in step.copies:
            blocks[new] = blocks[old]
        self.pool[step.slots(self.block_size)] = step.tokens
        rows = [
            self._logits(span.context(self.block_size)[seen(span.offset, index, tree)])
            for span, tree in step.trees()
            for index in range(span.count - span.wants, span.count)
        ]
        return torch.stack(rows) if rows else torch.empty(0, self.vocabulary)

    def _logits(self, slots: np.ndarray) -> Tensor:
        tokens = self.pool[slots]
        assert EMPTY not in tokens, "a slot is read that was never written"
        nan = int(tokens[-1]) in self.poison
        return torch.full((VOCABULARY,), torch.nan) if nan else logits_after(tokens)

    def move(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            self.pool[target] = self.pool[source]

    def fork(self, sequence: int, child: int) -> None:
        pass

    def forget(self, sequence: int) -> None:
        pass
