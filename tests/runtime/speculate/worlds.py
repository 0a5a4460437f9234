"""Worlds with known times and a known law of acceptance: the speed that the policy reaches in them.

speed     tokens / (seconds of passes, of asking and of drafting), over that of plain passes
law       chance that a draft is accepted if its parent was, by position in the text, depth and rank;
          the ranks of one parent exclude each other
load      factor of the seconds that the policy sees, by pass: other processes
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from attar.runtime.speculate.draft import LEVELS, Draft, kind_of
from attar.runtime.speculate.latency import Latency
from attar.runtime.speculate.policy import DraftPolicy
from attar.runtime.speculate.proposer import DraftFeedback

TINY = {1: 0.366e-3, 2: 0.366e-3, 3: 0.547e-3, 5: 0.631e-3, 9: 0.944e-3, 17: 1.6e-3, 33: 3.0e-3}
LARGE = {1: 18.1e-3, 3: 20.6e-3, 4: 20.6e-3, 5: 22.8e-3, 7: 28.5e-3, 13: 44e-3, 33: 100e-3}
"""Seconds of a pass over n tokens, measured (``docs/speculation.md``)."""

Law = Callable[[int, int, int], float]
Paths = tuple[tuple[int, ...], ...]


def always(*ranks: float, decay: float = 1.0) -> Law:
    """The same everywhere: a of each rank, ``decay`` times that with each depth."""
    return lambda position, depth, rank: ranks[rank] * decay ** (depth - 1) if rank < len(ranks) else 0.0


def switching(first: Law, second: Law, tokens: int) -> Law:
    """Stretches of one law and of the other."""
    return lambda position, depth, rank: (first, second)[position // tokens % 2](position, depth, rank)


def chain(most: int) -> Paths:
    return tuple((0,) * depth for depth in range(1, most + 1))


@dataclass(frozen=True)
class Proposing:
    """What a proposer is like.

    Args:
        tree: ranks of each node, parents first.
        asking: seconds of a proposal.
        step: seconds of each level of it; 0: a free proposer.
        confidence: chance of a depth that a draft is accepted, known before it is drawn, and then true; its
            mean is the law. None: the proposer knows nothing.
        finds: whether a free proposer has drafts at a position.
    """

    tree: Paths
    asking: float = 0.0
    step: float = 0.0
    confidence: Callable[[random.Random, float], float] | None = None
    finds: Callable[[int], bool] = lambda position: True

    def kinds(self) -> tuple[int, ...]:
        return tuple(kind_of(path[-1], len(path)) for path in self.tree)

    def drafts(self, nodes: int) -> Draft:
        """The first nodes of the tree."""
        index = {(): 0} | {path: node for node, path in enumerate(self.tree, 1)}
        parents = tuple(index[path[:-1]] for path in self.tree[:nodes])
        return Draft((7,) * len(parents), parents, kinds=self.kinds()[:nodes])


@dataclass
class World:
    """A sequence that is decoded."""

    times: Mapping[int, float]
    law: Law
    proposing: Proposing
    load: Callable[[int], float] = lambda number: 1.0
    seed: int = 0
    settle: int = 12
    fixed: int | None = None  # levels of a chain, or nodes of a tree, whatever they bring
    passes: list[int] = field(default_factory=list)  # drafts of each

    def __post_init__(self) -> None:
        timed = self.proposing.step > 0
        begin = {1: self.proposing.asking} if timed else {}
        latency = Latency(self.times, {1: self.proposing.step} if timed else {}, self.settle, begin=begin)
        self.policy, self.curve = DraftPolicy(latency, len(self.proposing.tree)), Latency(self.times)
        self.random, self.seconds, self.position = random.Random(self.seed), 0.0, 0
        self.skipped = self.steps = 0
        self.chances: list[float] = []
        self.stopped: int | None = None

    def speed(self, tokens: int) -> float:
        """Over further tokens."""
        start, seconds = self.position, self.seconds
        while self.position < start + tokens:
            self.turn()
        return (self.position - start) * self.curve.target(1, 1) / (self.seconds - seconds)

    def turn(self) -> None:
        """A pass with its proposal, or one that is skipped."""
        load = self.load(len(self.passes))
        if self.skipped:
            self.skipped, self.position = self.skipped - 1, self.position + 1
            self.seconds += self.curve.target(1, 1)
            self.passes.append(0)
            return
        self.stopped = None
        draft, asking = self.proposed()
        path = [] if draft is None else self.accepted(draft)
        took, tokens = self.curve.target(1, 1 + len(draft or ())), [7] * (len(path) + 1)
        feedback = DraftFeedback(0, draft, tuple(path), tokens, stopped_by_confidence=self.stopped)
        self.position, self.seconds = self.position + len(path) + 1, self.seconds + took + asking
        self.passes.append(len(draft or ()))
        if self.fixed is None:
            timed = self.proposing.step > 0
            self.policy.note([feedback], took * load, asking * load, 0, self.steps if timed else 0)
            empty = 0.0 if draft or self.stopped is not None else asking
            self.skipped = self.policy.passes_to_skip(1, empty * load, is_lookup=not timed)

    def proposed(self) -> tuple[Draft | None, float]:
        """The drafts that are run, and the seconds of asking for them."""
        proposing, tree = self.proposing, self.proposing.tree
        timed, trees = proposing.step > 0, tree != chain(len(tree))
        if self.fixed is not None:
            deepest = max((len(path) for path in tree[: self.fixed]), default=0)
            draft = proposing.drafts(self.fixed) if self.fixed and proposing.finds(self.position) else None
            return draft, (proposing.asking + deepest * proposing.step) * (self.fixed > 0)
        if not self.policy.open:
            return None, 0.0
        if not timed:
            found = proposing.drafts(len(tree)) if proposing.finds(self.position) else None
            return self.policy.select([0], [found])[0] if found else None, proposing.asking
        (kinds,) = self.policy.choose([0], [len(tree)])
        depth = sum(kind < LEVELS for kind in kinds)
        if not depth:
            return None, 0.0
        if proposing.confidence is not None and self.policy.min_chance > 0:
            return self.confident_chain(len(tree))
        self.steps = min(depth, max(map(len, tree)))
        seconds = proposing.asking + self.steps * proposing.step
        if not trees:
            return proposing.drafts(self.steps), seconds
        nodes = sum(len(path) <= depth for path in tree)
        return self.policy.trim([0], [proposing.drafts(nodes)])[0], seconds

    def confident_chain(self, most: int) -> tuple[Draft | None, float]:
        """A chain that ends where it does not pay, by what is known before each token is drawn."""
        survival, self.chances = 1.0, list[float]()
        while len(self.chances) < most:
            chance = self.confident(len(self.chances) + 1)
            survival *= chance
            if survival < self.policy.min_chance:
                break
            self.chances.append(chance)
        self.steps = len(self.chances)
        self.stopped = self.steps if self.steps < most else None
        draft = self.proposing.drafts(self.steps) if self.steps else None
        return draft, self.proposing.asking + self.steps * self.proposing.step

    def confident(self, depth: int) -> float:
        a = self.law(self.position, depth, 0)
        return a if self.proposing.confidence is None else self.proposing.confidence(self.random, a)

    def accepted(self, draft: Draft) -> list[int]:
        """The path that the law draws."""
        node, path = 0, list[int]()
        while children := draft.children(node):
            if self.chances:
                chances = [self.chances[len(path)]]
            elif self.proposing.confidence is not None:
                chances = [self.confident(len(path) + 1)]
            else:
                ranks = [
                    kind // LEVELS for kind in (draft.kinds or ()) and [draft.kinds[c - 1] for c in children]
                ]
                chances = [self.law(self.position, len(path) + 1, rank) for rank in ranks]
            draw = self.random.random()
            node = 0
            for child, chance in zip(children, chances, strict=True):
                if draw < chance:
                    node = child
                    break
                draw -= chance
            if not node:
                break
            path.append(node)
        self.chances = []
        return path


def best_fixed(times, law, proposing, counts, tokens=4000, seed=1) -> float:
    """The speed of the best number of drafts, run in every pass; 1 of none."""
    speeds = [World(times, law, proposing, seed=seed, fixed=count).speed(tokens) for count in counts]
    return max([1.0, *speeds])
