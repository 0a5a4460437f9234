"""How many tokens to draft: acceptance rates, measured times, one maximum and one bound on the loss.

    a_l        acceptance rate of level l (``acceptance.py``)
    survival   of a draft: the product of the rates on its path, the tokens that it is expected to add
    speed      (B + sum of survivals) / (t(B, n) + seconds of the proposer: begin + steps)
    left       plain passes that may still be lost (``loss_budget.py``)
    pause      passes without a proposal after one without drafts: its seconds / (asking t(B, B)), PAUSE at
               most for a free proposer, until the next trial for one that runs a model

The drafts of the batch are sorted by survival. A child's is never above its parent's, so each prefix of the
list consists of whole paths; the prefix with the highest speed is run. For one sequence and one rate this is
the K of Leviathan, Kalman, Matias 2023, "Fast Inference from Transformers via Speculative Decoding" (arXiv
2211.17192, section 3.5). Drafts run only where rejecting all costs at most half of ``left``: T tokens of a
sequence lose at most ``size`` + LOSS T, and ASKING T by asking in vain. Where none pays, the best
chain, or a free draft, is tried after ``gap`` passes, which a rejection doubles.

A proposer that knows more about a draft than rates do, before it is drawn, gets ``least``: a draft with this
chance of being accepted is worth what the chosen ones take in the mean, at the speed that they reach.

Letters: B sequences that decode, n tokens of a pass, t seconds (``latency.py``), l level of a kind of draft.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from attar.runtime.speculate.acceptance import AcceptanceRates
from attar.runtime.speculate.draft import LEVELS, Draft, kind_of, kinds_of
from attar.runtime.speculate.latency import Latency
from attar.runtime.speculate.loss_budget import LossBudget
from attar.runtime.speculate.proposer import DraftFeedback

ASKING = 0.0075  # share of the plain time, for proposals without drafts
PAUSE = 12  # passes without a proposal, at most, after a free proposer had no draft
WAIT = 128  # while the budget refuses a trial: sequences may come for which drafts pay
GAIN = 1.02  # times the plain speed, that drafts must reach
LEAST = 0.01  # survival of a draft that is considered
TRIALS = 0.005  # share of the time, for trials of one sequence in the long run
PLAIN_EVERY = 128  # passes with drafts until a plain one is measured again

Ints = Sequence[int]


class Candidate(NamedTuple):
    """A draft that may be run, of a ``row`` of the batch: a node of its tree, or a kind before drafting.

    ``steps``: it takes a step of the draft model. ``sibling``: of the chain's draft at its depth, with which
    alone it is run.
    """

    survival: float
    row: int
    depth: int
    node: int
    size: int = 1  # tokens
    steps: bool = False
    sibling: bool = False


@dataclass
class Trial:
    """A trial draft of a sequence for which none pays: after ``gap`` passes; ``idle`` of them are over."""

    gap: int = 1
    idle: int = 0
    running: bool = False
    longest: int = 1  # gap
    cost: float = 0.0  # plain passes of one sequence


class DraftPolicy:
    """Chooses the drafts of each pass, at most ``most`` a sequence, and learns from every pass."""

    def __init__(
        self, latency: Latency, most: int = 16, budget: LossBudget | None = None, asking: float = ASKING
    ) -> None:
        self.latency, self.most, self.budget, self.asking = latency, most, budget or LossBudget(), asking
        self.acceptance = AcceptanceRates()
        self.least = 0.0  # of the round that was chosen last
        self._wait = 0  # passes until the next trial is due, where nothing was chosen
        self._refused = 0.0  # what a trial may lose that is due and waits for the budget
        self._trials: dict[int, Trial] = {}
        self._since_plain = 0

    @property
    def open(self) -> bool:  # whether the proposer is called at all
        return self.budget.open and self.latency.settled and self._since_plain < PLAIN_EVERY

    def choose(
        self, sequences: Ints, limits: Ints, prompt_tokens: int = 0, branches: int = 1, free: float = math.inf
    ) -> list[set[int]]:
        """Kinds of the drafts, chain and siblings, that a draft model should make for each sequence: at most
        its limit, ``branches`` after one token, and ``free`` in the batch."""
        limits = [min(limit, self.most) for limit in limits]
        rows = enumerate(zip(sequences, limits, strict=True))
        trees = [one for row, (sequence, limit) in rows for one in self._tree(row, sequence, limit, branches)]
        return [set(kinds) for kinds in self._best(sequences, trees, limits, prompt_tokens, free)]

    def select(
        self, sequences: Ints, drafts: Sequence[Draft | None], prompt_tokens: int = 0, whole: bool = False
    ) -> list[Draft | None]:
        """The drafts of a free proposer, cut to the nodes that pay; None where none does. ``whole``: trees
        are run completely or not at all, for lookahead, which learns from all their nodes."""
        trees = self._all_nodes(sequences, drafts, whole)
        limits = [len(draft or ()) for draft in drafts]
        kept = self._best(sequences, trees, limits, prompt_tokens, math.inf)
        pairs = zip(drafts, kept, strict=True)
        return [draft and (draft if whole and run else draft.pruned(run)) for draft, run in pairs]

    def trim(
        self, sequences: Ints, drafts: Sequence[Draft | None], prompt_tokens: int = 0
    ) -> list[Draft | None]:
        """Trees that were chosen and made, cut to the nodes that pay: their first node at least, and drawn
        ones whole."""
        if not self.latency.known:
            return list(drafts)
        fixed = [draft if draft is not None and draft.q is None else None for draft in drafts]
        limits = [len(draft or ()) for draft in fixed]
        nodes, run = self._all_nodes(sequences, fixed), _Pass(self.latency, len(sequences), prompt_tokens)
        front = self._front(nodes, limits, math.inf, run)
        kept: list[list[int]] = [[] for _ in sequences]
        for one in front:
            kept[one.row].append(one.node)
        rows = zip(drafts, fixed, kept, strict=True)
        return [draft if tree is None else tree.pruned(these or [1]) for draft, tree, these in rows]

    def note(
        self,
        feedback: Sequence[DraftFeedback],
        seconds: float,
        drafting: float = 0.0,
        prompt_tokens: int = 0,
        steps: int = 0,
        prefilled: bool = False,
    ) -> None:
        """Learn from a pass: ``seconds`` with verification, after ``drafting`` seconds of the proposer, in
        ``steps``; 0: as deep as the drafts are, -1: it ran no model. ``prefilled``: it read a prompt before
        the pass, which takes longer after that."""
        if not feedback:
            return
        batch, tokens, accepted, doubted = len(feedback), len(feedback), 0, False
        drafted = list[DraftFeedback]()
        for one in feedback:
            if one.doubted is not None:
                self._learn_doubt(one, one.doubted)
                doubted = True
            if one.draft is not None:
                drafted.append(one)
                tokens, accepted = tokens + len(one.draft), accepted + len(one.path)
        if not prompt_tokens and not prefilled:
            self.latency.note_target(batch, tokens, seconds)
        plain = self.latency.target(batch, batch)
        if plain > 0:
            extra = self.latency.target(batch, tokens, prompt_tokens) / plain - 1.0
            proposing = self._charge(drafting, plain) if drafted or doubted else 0.0
            self.budget.note(1.0 + extra + proposing, 1.0 + accepted / batch)
        self._since_plain = self._since_plain + 1 if drafted else 0
        if drafted and drafting > 0 and steps >= 0:
            depth = steps or max(max(one.draft.depths) for one in drafted if one.draft)
            self.latency.note_draft(len(drafted), drafting, depth)
        for one in drafted:
            self._learn(one)

    def passes_to_skip(self, batch: int, proposing: float, free: bool = True) -> int:
        """Passes to skip after one whose proposer took ``proposing`` seconds and had no draft (0: it had).
        What these passes do not pay for is charged. Unless the proposer is ``free`` and looks at the text,
        there is nothing to ask before the next trial is due."""
        plain = self.latency.target(batch, batch) if batch else 0.0
        if proposing <= 0 or plain <= 0:
            return self.budget.closed_passes
        most = PAUSE if free else max(self._wait - 1, 0)
        self.charge_asking(batch, proposing, pause=most)
        if not self.open:
            return self.budget.closed_passes
        pause = min(int(self._charge(proposing, plain) / self.asking), most)
        if not free:
            pause = max(pause, min(self.budget.passes_until(self._refused), WAIT))
            for trial in self._trials.values():
                trial.idle += pause
        return pause

    def charge_asking(self, batch: int, seconds: float, times: int = 1, pause: int = PAUSE) -> None:
        """Charge proposals in vain with what pauses of ``pause`` passes do not pay for."""
        plain = self.latency.target(batch, batch) if times else 0.0
        if plain > 0:
            unpaid = self._charge(seconds, plain) - times * (1 + pause) * self.asking
            if unpaid > 0:
                self.budget.note(unpaid, 0.0)

    def speedup(self, sequence: int, draft: int | Draft, width: int = 1) -> float:
        """Expected speedup of one sequence with the best part of a fixed draft, or with the best chain of at
        most ``draft`` tokens of a draft model; in a pass of ``width`` sequences that all have such drafts, so
        that a step of the model is divided over them."""
        if isinstance(draft, Draft):
            nodes = sorted(self._nodes(0, sequence, draft), key=lambda one: -one.survival)
        else:
            nodes = self._tree(0, sequence, min(draft, self.most), 1)
        run = _Pass(self.latency, width)
        speeds = [run.speed, *(run.add(one, width).speed for one in nodes)]
        return max(speeds) / speeds[0]

    def forget(self, sequence: int) -> None:
        self.acceptance.forget(sequence)
        self._trials.pop(sequence, None)

    def _charge(self, seconds: float, plain: float) -> float:
        """Its seconds in plain passes, half of the budget at most: the machine may have stood still."""
        return min(seconds / plain, self.budget.size / 2)

    def _tree(self, row: int, sequence: int, limit: int, branches: int) -> list[Candidate]:
        """The chain of a draft model, and siblings of the ranks that were counted before."""
        ranks = [rank for rank in range(1, branches) if self.acceptance.seen(kind_of(rank, 1))]
        siblings = {rank: self.acceptance.rates(sequence, rank, limit, first=0.0) for rank in ranks}
        candidates, survival = [], 1.0
        for depth, rate in enumerate(self.acceptance.rates(sequence, 0, limit), 1):
            for rank, rates in siblings.items() if depth < LEVELS else ():
                below = survival * min(rates[depth - 1], rate)
                candidates.append(Candidate(below, row, depth, kind_of(rank, depth), sibling=True))
            survival *= rate
            candidates.append(Candidate(survival, row, depth, depth, 1, True))
        return candidates

    def _all_nodes(
        self, sequences: Ints, drafts: Sequence[Draft | None], whole: bool = False
    ) -> list[Candidate]:
        rows = enumerate(zip(sequences, drafts, strict=True))
        trees = [self._nodes(row, sequence, draft, whole) for row, (sequence, draft) in rows if draft]
        return [one for tree in trees for one in tree]

    def _nodes(self, row: int, sequence: int, draft: Draft, whole: bool = False) -> list[Candidate]:
        """Every node of a draft with its survival; ``whole``: all nodes as one candidate."""
        survivals, kinds = [1.0], kinds_of(draft)
        deepest = {kind // LEVELS: kind % LEVELS for kind in sorted(set(kinds))}
        rates = {group: self.acceptance.rates(sequence, group, last) for group, last in deepest.items()}
        for parent, kind in zip(draft.parents, kinds, strict=True):
            survivals.append(survivals[parent] * rates[kind // LEVELS][kind % LEVELS - 1])
        if whole:
            return [Candidate(sum(survivals[1:]), row, 1, 1, len(draft))]
        return [Candidate(survivals[n], row, draft.depths[n], n) for n in range(1, len(survivals))]

    def _best(
        self, sequences: Ints, nodes: list[Candidate], limits: Ints, prompt_tokens: int, free: float
    ) -> list[list[int]]:
        """The nodes of each sequence that are run."""
        kept: list[list[int]] = [[] for _ in sequences]
        self._wait, self._refused = PAUSE + 1, 0.0  # where none may be tried
        if not (nodes and self.latency.known and self.open):
            return kept
        batch = len(sequences)
        self.budget.hold_rounds(self.latency.beginning(batch) / self.latency.target(batch, batch))
        run = _Pass(self.latency, batch, prompt_tokens)
        for one in self._front(nodes, limits, free, run):
            kept[one.row].append(one.node)
        self.least = run.least
        firsts = {one.row: one for one in reversed(nodes) if one.depth == 1 and not one.sibling}
        for row, first in sorted(firsts.items()):
            if kept[row]:
                self._trials.pop(sequences[row], None)
            else:
                deeper = [one for one in nodes if one.row == row and one.steps and one.depth > 1]
                trial = self._trials.setdefault(sequences[row], Trial())
                kept[row] += self._try(trial, [first, *deeper], run)
        waiting = [self._trials[sequences[row]] for row in firsts if not kept[row]]
        self._wait = min((trial.gap - trial.idle for trial in waiting), default=0)
        self._refused = run.refused
        return kept

    def _front(self, nodes: list[Candidate], limits: Ints, free: float, run: _Pass) -> list[Candidate]:
        """The first nodes, by survival, with the highest speed, added to ``run``; ``nodes`` is sorted."""
        nodes.sort(key=lambda one: (-one.survival, one.depth, one.sibling, one.row, one.node))
        front, best, count = list[Candidate](), run.speed * GAIN, 0
        counts, chain, stake = [0] * len(limits), [0] * len(limits), self.budget.stake
        for one in nodes:
            if one.survival < LEAST or len(front) == free:
                break
            if counts[one.row] >= limits[one.row] or (one.sibling and chain[one.row] < one.depth):
                continue
            if run.add(one).loss > stake:
                run.add(one, -1)
                break
            front.append(one)
            counts[one.row] += 1
            chain[one.row] += one.steps
            if run.speed > best:
                best, count = run.speed, len(front)
        for one in reversed(front[count:]):
            run.add(one, -1)
        return front[:count]

    def _try(self, trial: Trial, chain: Sequence[Candidate], run: _Pass) -> list[int]:
        """The trial of a sequence without drafts, if ``gap`` passes are over and the budget allows: the part
        of its chain with the highest speed, since a block head is paid as a whole when it begins."""
        trial.running, trial.idle, before = False, trial.idle + 1, run.loss
        if trial.idle < trial.gap:
            return []
        best, count = 0.0, 0
        for depth, one in enumerate(chain, 1):
            if run.add(one).speed > best:
                best, count = run.speed, depth
        for one in reversed(chain[count:]):
            run.add(one, -1)
        if run.loss > self.budget.stake:  # a shorter one would not pay: the budget is filled first
            run.refused = run.loss
            for one in reversed(chain[:count]):
                run.add(one, -1)
            return []
        trial.cost = run.batch * (run.loss - before)
        trial.running, trial.idle, trial.longest = True, 0, max(math.ceil(trial.cost / TRIALS), 1)
        return [one.node for one in chain[:count]]

    def _learn(self, feedback: DraftFeedback) -> None:
        """Count every draft whose parent was accepted, and the result of a trial."""
        draft, accepted = feedback.draft, {0, *feedback.path}
        if draft is None:
            return
        for node, (parent, kind) in enumerate(zip(draft.parents, kinds_of(draft), strict=True), 1):
            if parent in accepted:
                self.acceptance.note(feedback.sequence, kind, node in accepted)
        trial = self._trials.get(feedback.sequence)
        if trial is not None and trial.running:
            trial.gap = 1 if len(feedback.path) > trial.cost else min(2 * trial.gap, trial.longest)
            trial.running = False

    def _learn_doubt(self, feedback: DraftFeedback, drafts: int) -> None:
        """What a confident proposer would not draft was rejected: depths are chosen before it doubts."""
        if feedback.path[:drafts] == tuple(range(1, drafts + 1)):
            self.acceptance.note(feedback.sequence, kind_of(0, drafts + 1), False)


class _Pass:
    """Time and expected tokens of a pass while drafts are added, without the time of its prompts."""

    def __init__(self, latency: Latency, batch: int, prompt_tokens: int = 0) -> None:
        self.latency, self.batch, self.prompt_tokens = latency, batch, prompt_tokens
        self.plain = self.seconds = latency.target(batch, batch)
        self.tokens, self.gain, self.steps = batch, 0.0, 0.0
        self.levels: dict[int, tuple[int, float]] = {}  # sequences and seconds of a step, by depth
        self.speed, self.loss = batch / self.plain, 0.0  # tokens a second; plain passes, if all are rejected
        self.refused = 0.0  # the loss of a trial that the budget does not hold

    def add(self, one: Candidate, times: int = 1) -> _Pass:
        """Add a draft, of so many sequences; with -1 remove it."""
        self.tokens, self.gain = self.tokens + times * one.size, self.gain + times * one.survival
        if one.steps:
            width, before = self.levels.get(one.depth, (0, 0.0))
            step = self.latency.draft(width + times, one.depth == 1)
            self.levels[one.depth] = width + times, step
            self.steps += step - before
        self.seconds = self.latency.target(self.batch, self.tokens, self.prompt_tokens) + self.steps
        self.speed, self.loss = (self.batch + self.gain) / self.seconds, self.seconds / self.plain - 1
        return self

    @property
    def least(self) -> float:
        """Survival of a draft that is worth its part of the pass; 0 where there are none."""
        drafts, verifying = self.tokens - self.batch, self.seconds - self.steps - self.plain
        return min(self.speed * verifying / drafts, 1.0) if drafts else 0.0
