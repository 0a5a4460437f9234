"""Proposers for tests of the engine: one knows the texts and lies at random, one draws from any q."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import torch

from attar.runtime.sampling.sample import draw
from attar.runtime.speculate.draft import Draft, kind_of
from attar.runtime.speculate.latency import Latency
from attar.runtime.speculate.policy import DraftPolicy
from attar.runtime.speculate.proposer import DraftFeedback, DraftRequest
from attar.runtime.speculate.speculator import Speculator


class Eager(DraftPolicy):
    """Takes everything, so that tests do not hang on times."""

    def __init__(self) -> None:
        super().__init__(Latency(), share=math.inf)

    open = True  # type: ignore[assignment]

    def passes_to_skip(self, batch, proposing, is_lookup=True):
        return 0

    def choose(self, sequences, limits, prompt_tokens=0, branches=1):
        return [{kind_of(0, depth) for depth in range(1, limit + 1)} for limit in limits]

    def select(self, sequences, drafts, prompt_tokens=0, complete=False):
        return list(drafts)

    def trim(self, sequences, drafts, prompt_tokens=0):
        return list(drafts)


class Oracle:
    """Trees of up to ``size`` tokens, of which some are those of ``texts`` (prompt and answer in one).

    Args:
        right: chance that a token on the right path is the right one.
        chains: chains, and no trees.
    """

    name, is_free_of_compute, samples_from_q, needs_full_tree = "oracle", True, False, False
    most, branches, confident, trees = 8, 1, False, False

    def __init__(self, texts, *, right=0.7, size=6, vocabulary=50, chains=False, seed=0):
        self.texts, self.right, self.size = [list(text) for text in texts], right, size
        self.vocabulary, self.chains, self.random = vocabulary, chains, random.Random(seed)
        self.forgotten: list[int] = []
        self.news: list[DraftFeedback] = []

    def propose(self, wishes: Sequence[DraftRequest]) -> list[Draft | None]:
        return [self.tree(wish) for wish in wishes]

    def tree(self, wish: DraftRequest) -> Draft | None:
        count, draws = self.random.randint(0, min(self.size, wish.most)), self.random
        nexts = [
            text[len(wish.tokens) :] for text in self.texts if text[: len(wish.tokens)] == list(wish.tokens)
        ]
        paths: list[tuple[int, ...]] = [()]
        parents = []
        for node in range(count):
            parent = node if self.chains else draws.randint(0, node)
            path = paths[parent]
            known = [
                text[len(path)]
                for text in nexts
                if tuple(text[: len(path)]) == path and len(text) > len(path)
            ]
            sure = known and draws.random() < self.right
            token = draws.choice(known) if sure else draws.randrange(self.vocabulary)
            paths.append((*path, token))
            parents.append(parent)
        if not count:
            return None
        draft = Draft(tuple(path[-1] for path in paths[1:]), tuple(parents))
        draft.check()
        return draft

    def observe(self, news: Sequence[DraftFeedback]) -> None:
        self.news += news

    def forget(self, sequence: int) -> None:
        self.forgotten.append(sequence)


class Drawer(Oracle):
    """Chains drawn from a q that has little to do with the target; it must be verified with q."""

    name, is_free_of_compute, samples_from_q = "drawer", False, True

    def tree(self, wish: DraftRequest) -> Draft | None:
        if not wish.most:
            return None
        assert wish.rules is not None
        if wish.rules.row().params.greedy:
            return Draft.chain(self.random.choices(range(self.vocabulary), k=min(wish.most, self.size)))
        tokens, rows = [], []
        for depth in range(min(wish.most, self.size)):
            weights = np.random.default_rng([depth, *wish.tokens[-2:], *tokens]).random(self.vocabulary) ** 6
            rows.append((weights / weights.sum()).astype(np.float32))
            tokens += draw(torch.from_numpy(rows[-1])[None], [wish.rules.key(depth)])
        draft = Draft.chain(tokens, rows)
        draft.check()
        return draft


def speculator(proposer, most=8, **options):
    return Speculator(proposer, Eager(), most=most, **options)
