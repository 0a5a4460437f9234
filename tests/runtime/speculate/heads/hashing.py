"""A head whose drafts depend on every decided token and every state of it, and what its states must be.

StatesOfTexts      the states of known texts, from one forward each
HashingHead        checks what it is given against them, and drafts from all of it
RestlessPolicy     drafts, rests, and closes at random
check_pool         the pool of every running sequence, after any step
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from attar.runtime.engine import Engine
from attar.runtime.kv.hidden_pool import HiddenPool
from attar.runtime.speculate.draft import kind_of
from attar.runtime.step import FREED, slots
from tests.runtime.speculate.proposing import Eager


class StatesOfTexts:
    """Texts (prompt and completion) and their states (n, m, H).

    Args:
        bound: relative error of a position's states that rounding explains.
    """

    def __init__(self, texts: Sequence[Sequence[int]], states: Callable[[list[int]], Tensor], bound: float):
        self.texts, self.bound = [list(text) for text in texts], bound
        self._states = [states(text) for text in self.texts]

    def of(self, tokens: Sequence[int]) -> tuple[list[list[int]], Tensor]:
        """The texts that begin with these tokens, and the states of the tokens but for the last."""
        tokens = list(tokens)
        found = [index for index, text in enumerate(self.texts) if text[: len(tokens)] == tokens]
        assert found, f"{tokens} begins no text"
        return [self.texts[index] for index in found], self._states[found[0]][: len(tokens) - 1]

    def check(self, states: Tensor, wanted: Tensor, first: int, what: str) -> None:
        """States of positions from ``first`` on are the wanted ones (n, m, H)."""
        assert states.shape == wanted[first:].shape, f"{what}: {states.shape}, not {wanted[first:].shape}"
        off = (states - wanted[first:]).flatten(1).norm(dim=1) / wanted[first:].flatten(1).norm(dim=1)
        wrong = (off > self.bound).nonzero().flatten()
        places = [first + int(index) for index in wrong]
        assert not places, f"{what}: states of {places} are off by {off.max():.2g}"


class HashingHead:
    """A ``ChainHead``.

    Args:
        known: what it must be given; None: it is not checked.
        right: chance that the right token gets the highest logit, or the second highest.
    """

    def __init__(self, known: StatesOfTexts | None, vocabulary: int, *, drafts=5, right=0.8) -> None:
        self.known, self.vocabulary, self.drafts, self.right = known, vocabulary, drafts, right
        self.held: dict[int, tuple[int, Tensor]] = {}  # first position, states from there
        self.rounds = self.read_positions = 0

    def read(self, sequence: int, tokens: Sequence[int], start: int, states: Tensor) -> None:
        first, held = self.held.get(sequence, (start, states[:0]))
        stop = first + len(held)
        gap = start > stop
        assert start >= 0 and start + len(states) == len(tokens) - 1
        if gap or start < first:
            first, held = start, states[:0]
        self.held[sequence] = first, torch.cat([held[: start - first], states])
        self.read_positions += len(states)

    def begin(self, drafts) -> None:
        self.rounds += 1
        for draft in drafts:
            first, held = self.held[draft.request.sequence]
            assert first + len(held) == len(draft.request.tokens) - 1, "a position was not read"
            if self.known is not None:
                _, wanted = self.known.of(draft.request.tokens)
                self.known.check(held, wanted, first, f"sequence {draft.request.sequence}")

    def logits(self, drafts) -> Tensor:
        return torch.stack([self._row(draft) for draft in drafts])

    def forget(self, sequence: int) -> None:
        self.held.pop(sequence, None)

    def _row(self, draft) -> Tensor:
        tokens = [*draft.request.tokens, *draft.tokens]
        _, held = self.held[draft.request.sequence]
        digest = int.from_bytes(held.to(torch.bfloat16).view(torch.int16).numpy().tobytes()[-512:], "little")
        draws = np.random.default_rng([*tokens, digest % 2**62, int(1e3 * abs(float(held.sum())))])
        row = torch.from_numpy(draws.normal(size=self.vocabulary).astype(np.float32))
        if self.known is not None:
            texts, _ = self.known.of(draft.request.tokens)
            going = [t for t in texts if t[: len(tokens)] == tokens and len(t) > len(tokens)]
            if going and draws.random() < self.right:
                row[going[0][len(tokens)]] = draws.choice([20.0, 10.0])
                row[int(draws.integers(self.vocabulary))] = 15.0
        return row


class RestlessPolicy(Eager):
    """Drafts most of the time, with siblings; now and then it is closed, or rests for a few passes."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.random, self.rested = random.Random(seed), 0

    @property
    def open(self) -> bool:
        return self.random.random() < 0.9

    def passes_to_skip(self, batch, proposing, is_lookup=True):
        skip = self.random.choice([0, 0, 0, 0, 0, 3])
        self.rested += skip
        return skip

    def choose(self, sequences, limits, prompt_tokens=0, branches=1):
        depths = [self.random.randint(0, limit) for limit in limits]
        every = range(branches if self.random.random() < 0.6 else 1)
        return [{kind_of(rank, depth) for depth in range(1, K + 1) for rank in every} for K in depths]


def check_pool(engine: Engine, pool: HiddenPool, known: StatesOfTexts, layers=None) -> int:
    """States of all decided tokens that have been run, of every running sequence; how many."""
    manager, count = engine.scheduler.manager, 0
    for sequence in engine.scheduler.running:
        blocks = manager.readable(sequence.id)
        stop = min(sequence.computed, len(sequence.tokens) - 1)
        held = next((i for i, block in enumerate(blocks) if block != FREED), len(blocks))
        first = min(held * manager.block_size, stop)
        _, wanted = known.of(sequence.tokens)
        states = pool.read(slots(blocks, first, stop, manager.block_size), layers) if stop > first else None
        if states is not None:
            known.check(states, wanted[:stop], first, f"the pool of sequence {sequence.id}")
            count += stop - first
    return count
