"""How many tokens to draft: as many as bring the most tokens a second, at a bounded loss.

    survival   of a draft: the product of the acceptance rates on its path: the tokens that it adds to a pass
    speed      (B + sum of survivals) / (t(B, tokens of the pass) + steps of the draft model)

The drafts of the batch are sorted by survival (a parent's is never below its child's, so every front of the
list consists of whole paths), and the front with the highest speed is run. For one sequence and one rate this
is the K of Leviathan, Kalman, Matias 2023, "Fast Inference from Transformers via Speculative Decoding", arXiv
2211.17192, section 3.5. Where no draft pays, one is run from time to time to measure its rate again: after
``gap`` passes, a gap that doubles with every rejection.

Letters: B sequences that decode, a acceptance rate, t seconds (``latency.py``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from attar.runtime.speculate.acceptance import LEVELS, AcceptanceRates, kind_of, kinds_of
from attar.runtime.speculate.budget import LossBudget
from attar.runtime.speculate.draft import Draft
from attar.runtime.speculate.latency import Latency
from attar.runtime.speculate.proposer import News

MARGIN = 0.02  # of speed, that drafts must gain
LEAST = 0.01  # survival of a draft that is considered
LONGEST_GAP = 128  # passes between two trial drafts of a sequence
PLAIN_EVERY = 128  # passes with drafts until a plain one is measured again


class Candidate(NamedTuple):
    """A draft that may be run.

    Attributes:
        survival: tokens that it adds to the pass.
        row: of its sequence in the batch.
        depth: from 1.
        node: its index in the draft, from 1; before a draft model has run, its kind.
        size: tokens that are run for it.
        step: whether the draft model runs a step for it.
        sibling: beside the chain of a draft model.
    """

    survival: float
    row: int
    depth: int
    node: int
    size: int = 1
    step: bool = False
    sibling: bool = False


@dataclass
class Trial:
    """Of a sequence without drafts: a draft is tried after ``gap`` passes, of which ``idle`` are over."""

    gap: int = 1
    idle: int = 0
    running: bool = False


class DraftPolicy:
    """Chooses the drafts of each pass, and learns from every pass.

    Args:
        latency: seconds of the target and of the draft model.
        most: drafts of a sequence at most.
        budget: what may be lost.
    """

    def __init__(self, latency: Latency, most: int = 16, budget: LossBudget | None = None) -> None:
        self.latency, self.most, self.budget = latency, most, budget or LossBudget()
        self.acceptance = AcceptanceRates()
        self._trials: dict[int, Trial] = {}
        self._since_plain = 0

    @property
    def open(self) -> bool:
        """Whether a proposer should be asked at all, which takes time too."""
        return self.budget.open and self.latency.settled and self._since_plain < PLAIN_EVERY

    def choose(
        self,
        sequences: Sequence[int],
        limits: Sequence[int],
        prompt_tokens: int = 0,
        branches: int = 1,
        room: int | None = None,
    ) -> list[set[int]]:
        """Kinds of the drafts that a draft model should make for each sequence: its chain, and siblings.

        Args:
            sequences: all that decode in the pass.
            limits: drafts that each may have; ``self.most`` is the other limit.
            prompt_tokens: of the pass.
            branches: drafts that may follow one token; 1: chains alone.
            room: drafts that all may have together; None: no limit.
        """
        limits = [min(limit, self.most) for limit in limits]
        candidates: list[Candidate] = []
        for row, (sequence, limit) in enumerate(zip(sequences, limits, strict=True)):
            candidates += self._tree(row, sequence, limit, branches)
        return [set(kinds) for kinds in self._best(sequences, candidates, limits, prompt_tokens, room)]

    def prune(
        self, sequences: Sequence[int], drafts: Sequence[Draft | None], prompt_tokens: int = 0
    ) -> list[Draft | None]:
        """The drafts of a free proposer, cut to the nodes that pay; None where none does."""
        candidates: list[Candidate] = []
        for row, (sequence, draft) in enumerate(zip(sequences, drafts, strict=True)):
            candidates += self._nodes(row, sequence, draft) if draft is not None else ()
        limits = [0 if draft is None else len(draft) for draft in drafts]
        kept = self._best(sequences, candidates, limits, prompt_tokens)
        return [draft and draft.pruned(nodes) for draft, nodes in zip(drafts, kept, strict=True)]

    def whole(
        self, sequences: Sequence[int], drafts: Sequence[Draft | None], prompt_tokens: int = 0
    ) -> list[Draft | None]:
        """The drafts of a proposer that learns from its whole tree (lookahead): all of a tree or nothing."""
        candidates = []
        for row, (sequence, draft) in enumerate(zip(sequences, drafts, strict=True)):
            if draft is not None:
                survival = sum(one.survival for one in self._nodes(row, sequence, draft))
                candidates.append(Candidate(survival, row, 1, 1, len(draft)))
        kept = self._best(sequences, candidates, [1] * len(sequences), prompt_tokens)
        return [draft if nodes else None for draft, nodes in zip(drafts, kept, strict=True)]

    def note(
        self, news: Sequence[News], seconds: float, drafting: float = 0.0, prompt_tokens: int = 0
    ) -> None:
        """Learn from a pass.

        Args:
            news: of every sequence that decoded in it.
            seconds: of the pass, verification included.
            drafting: seconds of the proposer.
            prompt_tokens: of the pass.
        """
        if not news:
            return
        batch, drafts = len(news), [one.draft for one in news if one.draft is not None]
        tokens = batch + prompt_tokens + sum(map(len, drafts))
        plain = self.latency.target(batch, batch)
        if plain > 0:
            cost = self.latency.extra(batch, tokens, seconds, prompt_tokens) / plain if drafts else 0.0
            asked = min(drafting / plain, self.budget.size / 2)  # the machine may have stood still
            self.budget.note(1.0 + cost + asked, sum(len(one.path) + 1 for one in news) / batch)
        self.latency.note_target(batch, tokens, seconds)
        if drafts and drafting > 0:
            self.latency.note_draft(len(drafts), drafting / max(len(draft.counts) for draft in drafts))
        self._since_plain = self._since_plain + 1 if drafts else 0
        for one in news:
            self._learn(one)

    def rest(self, batch: int, asking: float) -> int:
        """Passes to come in which nothing should be asked, learnt or measured.

        Args:
            batch: sequences of the last pass.
            asking: seconds of the proposer, where it had no draft in the last pass; else 0.
        """
        if not self.open:
            return self.budget.rest
        plain = self.latency.target(batch, batch) if batch else 0.0
        return self.budget.pause(asking / plain) if plain > 0 else 0

    def speedup(self, sequence: int, limit: int) -> float:
        """Tokens a second with the best chain of a draft model, of one sequence, over those without."""
        candidates = self._tree(0, sequence, min(limit, self.most), 1)
        plain, best, gain, steps = self.latency.target(1, 1), 1.0, 0.0, 0.0
        for one in candidates:
            gain, steps = gain + one.survival, steps + self.latency.draft(1)
            best = max(best, (1 + gain) * plain / (self.latency.target(1, 1 + one.depth) + steps))
        return best

    def fork(self, sequence: int, child: int) -> None:
        """``child`` begins with what is known of ``sequence``."""
        self.acceptance.fork(sequence, child)
        if sequence in self._trials:
            self._trials[child] = replace(self._trials[sequence])

    def forget(self, sequence: int) -> None:
        """A sequence ended."""
        self.acceptance.forget(sequence)
        self._trials.pop(sequence, None)

    def _tree(self, row: int, sequence: int, limit: int, branches: int) -> list[Candidate]:
        """The chain of a draft model, and siblings of the ranks that were ever accepted or seen."""
        chain = self.acceptance.rates(sequence, 0, limit)
        ranks = [rank for rank in range(1, branches) if self.acceptance.seen(kind_of(rank, 1))]
        others = [self.acceptance.rates(sequence, rank, limit, first=0.0) for rank in ranks]
        candidates, survival = [], 1.0
        for depth, rate in enumerate(chain, 1):
            for rank, rates in zip(ranks, others, strict=True) if depth < LEVELS else ():
                below = survival * min(rates[depth - 1], rate)
                candidates.append(Candidate(below, row, depth, kind_of(rank, depth), sibling=True))
            survival *= rate
            candidates.append(Candidate(survival, row, depth, depth, step=True))
        return candidates

    def _nodes(self, row: int, sequence: int, draft: Draft) -> list[Candidate]:
        """Every node of a draft with its survival."""
        survivals, kinds = [1.0], kinds_of(draft)
        deepest = {kind // LEVELS: kind % LEVELS for kind in sorted(set(kinds))}
        rates = {group: self.acceptance.rates(sequence, group, last) for group, last in deepest.items()}
        for parent, kind in zip(draft.parents, kinds, strict=True):
            survivals.append(survivals[parent] * rates[kind // LEVELS][kind % LEVELS - 1])
        return [
            Candidate(survivals[node], row, draft.depths[node], node) for node in range(1, len(survivals))
        ]

    def _best(
        self,
        sequences: Sequence[int],
        candidates: list[Candidate],
        limits: Sequence[int],
        prompt_tokens: int,
        room: int | None = None,
    ) -> list[list[int]]:
        """Nodes of each sequence that are run."""
        kept: list[list[int]] = [[] for _ in sequences]
        if not (candidates and self.latency.known and self.open):
            return kept
        candidates.sort(key=lambda one: (-one.survival, one.depth, one.sibling, one.row, one.node))
        chosen = _within(candidates, limits, room)
        plan = _Pass(self.latency, len(sequences), prompt_tokens, sum(one.size for one in chosen))
        best, count = plan.speed * (1 + MARGIN), 0
        for index, one in enumerate(chosen, 1):
            plan.add(one)
            if one.survival < LEAST or plan.loss > self.budget.left:
                break
            if plan.speed > best:
                best, count = plan.speed, index
        for one in chosen[:count]:
            kept[one.row].append(one.node)
        self._try(sequences, chosen, kept, plan.reset(chosen[:count]))
        return kept

    def _try(
        self, sequences: Sequence[int], candidates: Sequence[Candidate], kept: list[list[int]], plan: _Pass
    ) -> None:
        """Give one draft to sequences that have had none for ``gap`` passes."""
        firsts = {one.row: one for one in reversed(candidates) if one.depth == 1}
        for row, first in sorted(firsts.items()):
            trial = self._trials.setdefault(sequences[row], Trial())
            trial.running = False
            if kept[row]:
                trial.gap, trial.idle = 1, 0
                continue
            trial.idle += 1
            if trial.idle < trial.gap:
                continue
            plan.add(first)
            if plan.loss > self.budget.left:
                plan.add(first, -1)
                continue
            kept[row].append(first.node)
            trial.running, trial.idle = True, 0

    def _learn(self, news: News) -> None:
        """Acceptance of every draft whose parent was accepted; a trial's result."""
        if news.draft is None:
            return
        accepted = {0, *news.path}
        for node, (parent, kind) in enumerate(zip(news.draft.parents, kinds_of(news.draft), strict=True), 1):
            if parent in accepted:
                self.acceptance.note(news.sequence, kind, node in accepted)
        trial = self._trials.get(news.sequence)
        if trial is not None and trial.running:
            trial.gap = max(trial.gap // 4, 1) if news.path else min(2 * trial.gap, LONGEST_GAP)
            trial.running = False


class _Pass:
    """Time and gain of a pass that is being filled with drafts."""

    def __init__(self, latency: Latency, batch: int, prompt_tokens: int, most: int) -> None:
        self.latency, self.batch = latency, batch
        self.seconds = latency.targets(batch, batch + prompt_tokens, most + 1)
        self.plain = latency.target(batch, batch)
        self.prompts = self.seconds[0] - self.plain
        self.reset(())

    def reset(self, candidates: Sequence[Candidate]) -> _Pass:
        self.tokens, self.gain, self.steps, self.widths = 0, 0.0, 0.0, Counter[int]()
        for one in candidates:
            self.add(one)
        return self

    def add(self, one: Candidate, sign: int = 1) -> None:
        """One draft more; with ``sign`` -1 one less."""
        self.tokens, self.gain = self.tokens + sign * one.size, self.gain + sign * one.survival
        if one.step:
            before = self.latency.draft(self.widths[one.depth])
            self.widths[one.depth] += sign
            self.steps += self.latency.draft(self.widths[one.depth]) - before

    @property
    def time(self) -> float:
        """Seconds without what the prompts of the pass take anyway."""
        return self.seconds[self.tokens] - self.prompts + self.steps

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return (self.batch + self.gain) / self.time

    @property
    def loss(self) -> float:
        """Plain passes that are lost if every draft is rejected."""
        return self.time / self.plain - 1


def _within(candidates: Sequence[Candidate], limits: Sequence[int], room: int | None) -> list[Candidate]:
    """The candidates, best first, as far as each sequence and the pass have room. A sibling needs the chain's
    draft at its depth: the draft model computes both from one row."""
    counts, chosen = Counter[int](), list[Candidate]()
    depths = Counter[int]()
    for one in candidates:
        full = counts[one.row] >= limits[one.row] or (room is not None and len(chosen) >= room)
        if full or (one.sibling and depths[one.row] < one.depth):
            continue
        counts[one.row] += 1
        depths[one.row] = max(depths[one.row], one.depth if one.step else 0)
        chosen.append(one)
    return chosen
