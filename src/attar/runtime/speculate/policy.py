"""How many tokens to draft: acceptance rates, measured times, one maximum and one bound on the loss.

    a_l        acceptance rate of level l (``acceptance.py``)
    survival   of a draft: the product of the rates on its path, the tokens that it is expected to add
    speed      expected tokens of a pass over its seconds (``expected_pass.py``)
    left       plain passes that may still be lost (``loss_budget.py``)

The drafts of the batch are sorted by survival. A child's is never above its parent's, so each prefix of the
list consists of whole paths; the prefix with the highest speed is run. For one sequence and one rate this is
the K of Leviathan, Kalman, Matias 2023, "Fast Inference from Transformers via Speculative Decoding" (arXiv
2211.17192, section 3.5). Drafts run only where rejecting all costs at most half of ``left``, and every second
of the proposer is charged: T tokens of a sequence lose at most the budget's size + LOSS T.

Where no draft of a sequence pays, its best drafts are tried after ``gap`` passes, which a rejection doubles.
A proposal without drafts is followed by as many skipped passes as make its time SHARE of theirs.

A proposer that knows more about a draft than rates do, before it is drawn, gets ``min_chance``: a draft with
this chance of being accepted is worth what the chosen ones take in the mean, at the speed that they reach.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from attar.runtime.speculate.acceptance import AcceptanceRates
from attar.runtime.speculate.draft import LEVELS, Draft, kind_of, kinds_of
from attar.runtime.speculate.expected_pass import Candidate, ExpectedPass
from attar.runtime.speculate.latency import Latency
from attar.runtime.speculate.loss_budget import LOSS, LossBudget
from attar.runtime.speculate.proposer import DraftFeedback

SHARE = LOSS / 2  # of the time: for proposals without drafts, and for trials of one sequence
MIN_SPEEDUP = 1.02  # over plain decoding, that drafts must reach
MIN_SURVIVAL = 0.01  # of a draft that is considered
MAX_SKIPPED_PASSES = 12  # after a proposal without drafts: text that turns repetitive is noticed
PLAIN_EVERY = 128  # passes with drafts until a plain one is measured again

Ints = Sequence[int]


@dataclass
class Trial:
    """Drafts of a sequence for which none pays: in pass ``due``, or later where the budget refuses them."""

    due: int
    gap: int = 1
    cost: float = 0.0  # plain passes of one sequence
    running: bool = False

    def rejected(self, passes: int) -> None:
        """Wait twice as long, at most until trials take SHARE of the time."""
        self.gap = min(2 * self.gap, max(math.ceil(self.cost / SHARE), 1))
        self.due, self.running = passes + self.gap, False


class DraftPolicy:
    """Chooses the drafts of each pass, at most ``most`` a sequence, and learns from every pass.

    Attributes:
        min_chance: of the round that was chosen last.
        passes: so far, those without speculation too.
    """

    def __init__(
        self, latency: Latency, most: int = 16, budget: LossBudget | None = None, share: float = SHARE
    ) -> None:
        self.latency, self.most, self.budget, self.share = latency, most, budget or LossBudget(), share
        self.acceptance = AcceptanceRates()
        self.min_chance, self.passes = 0.0, 0
        self._trials: dict[int, Trial] = {}
        self._since_plain = 0

    @property
    def open(self) -> bool:
        """Whether to draft at all: the plain time is known and current, and the budget is not empty."""
        return self.budget.open and self.latency.settled and self._since_plain < PLAIN_EVERY

    def choose(
        self, sequences: Ints, limits: Ints, prompt_tokens: int = 0, branches: int = 1
    ) -> list[set[int]]:
        """Kinds of the drafts, chain and siblings, that a draft model should make for each sequence: at most
        its limit, and ``branches`` after one token."""
        limits = [min(limit, self.most) for limit in limits]
        rows = enumerate(zip(sequences, limits, strict=True))
        trees = [self._tree(row, sequence, limit, branches) for row, (sequence, limit) in rows]
        kinds = self._best(sequences, [candidate for tree in trees for candidate in tree], prompt_tokens)
        return [set(likeliest[:limit]) for likeliest, limit in zip(kinds, limits, strict=True)]

    def select(
        self, sequences: Ints, drafts: Sequence[Draft | None], prompt_tokens: int = 0, complete: bool = False
    ) -> list[Draft | None]:
        """The drafts of a lookup, cut to the nodes that pay; None where none does. ``complete``: whole trees
        or none, for lookahead, which learns from all their nodes."""
        nodes = self._best(sequences, self._all_nodes(sequences, drafts, complete), prompt_tokens)
        pairs = zip(drafts, nodes, strict=True)
        return [draft and (draft if complete and kept else draft.pruned(kept)) for draft, kept in pairs]

    def trim(
        self, sequences: Ints, drafts: Sequence[Draft | None], prompt_tokens: int = 0
    ) -> list[Draft | None]:
        """Trees that were chosen and made, cut to the nodes that pay: their first node at least, and drawn
        ones whole."""
        if not self.latency.known:
            return list(drafts)
        fixed = [draft if draft is not None and draft.q is None else None for draft in drafts]
        run = ExpectedPass(self.latency, len(sequences), prompt_tokens)
        nodes: list[list[int]] = [[] for _ in sequences]
        for candidate in self._fastest(self._all_nodes(sequences, fixed), run):
            nodes[candidate.row].append(candidate.node)
        rows = zip(drafts, fixed, nodes, strict=True)
        return [draft if tree is None else tree.pruned(kept or [1]) for draft, tree, kept in rows]

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
        ``steps`` of its model. ``prefilled``: the draft model read a prompt, which is no step's time, and the
        pass after that takes longer."""
        self.passes += 1
        drafted = [result for result in feedback if result.draft is not None]
        batch, tokens = len(feedback), len(feedback) + sum(len(result.draft or ()) for result in drafted)
        if not batch:
            return
        if not prompt_tokens and not prefilled:
            self.latency.note_target(batch, tokens, seconds)
        if plain := self.latency.target(batch, batch):
            accepted = sum(len(result.path) for result in drafted)
            cost = self.latency.target(batch, tokens, prompt_tokens) / plain
            self.budget.note(cost + self._in_passes(drafting, batch), 1.0 + accepted / batch)
        self._since_plain = self._since_plain + 1 if drafted else 0
        if drafted and steps and not prefilled:
            self.latency.note_draft(len(drafted), drafting, steps)
        for result in feedback:
            self._learn(result)

    def passes_to_skip(self, batch: int, proposing: float, is_lookup: bool = True) -> int:
        """Passes to skip, which are counted as plain ones, after a proposal that took ``proposing`` seconds
        and was empty (0: it was not). A proposer that does not look at the text has nothing to say before
        the next trial is due."""
        skipped = self.budget.closed_passes
        if not skipped and proposing > 0:
            due = math.inf if is_lookup else min((trial.due for trial in self._trials.values()), default=0)
            skipped = int(max(min(self._pause(self._in_passes(proposing, batch)), due - self.passes), 0))
        self.passes += skipped
        self.budget.note(skipped, skipped)
        return skipped

    def note_lookup(self, batch: int, seconds: float) -> int:
        """Count a plain pass after a lookup that found nothing; passes to skip."""
        cost = self._in_passes(seconds, batch)
        skipped = self._pause(cost)
        self.passes += 1 + skipped
        self.budget.note(1 + skipped + cost, 1 + skipped)
        return skipped if self.budget.open else skipped + self.passes_to_skip(batch, 0.0)

    def prefill_pays(self, sequence: int, most: int, tokens: int, remaining: int) -> bool:
        """Whether a draft model should prefill ``tokens`` of a sequence that may get ``remaining`` more: the
        budget covers the cost, or drafts are expected to save it. Half of the budget is charged at most."""
        plain, left = self.latency.target(1, 1), self.budget.left
        if plain <= 0:
            return True
        cost = self.latency.read(tokens) / plain
        if min(cost, self.budget.size / 2) + 1 > left:
            return False
        return cost + 1 <= left or cost <= remaining * (1 - 1 / self.speedup(sequence, most))

    def speedup(self, sequence: int, draft: int | Draft, width: int = 1) -> float:
        """Expected speedup of one sequence with the best part of a fixed draft, or with the best chain of at
        most ``draft`` tokens of a draft model; in a pass of ``width`` sequences that all have such drafts, so
        that a step of the model is divided over them."""
        if isinstance(draft, Draft):
            nodes = sorted(self._nodes(0, sequence, draft), key=Candidate.order)
        else:
            nodes = self._tree(0, sequence, min(draft, self.most), 1)
        run = ExpectedPass(self.latency, width)
        speeds = [run.speed, *(run.add(candidate, width).speed for candidate in nodes)]
        return max(speeds) / speeds[0]

    def forget(self, sequence: int) -> None:
        self.acceptance.forget(sequence)
        self._trials.pop(sequence, None)

    def _in_passes(self, seconds: float, batch: int) -> float:
        """In plain passes, half of the budget at most: the machine may have stood still."""
        plain = self.latency.target(batch, batch)
        return min(seconds / plain, self.budget.size / 2) if plain > 0 else 0.0

    def _pause(self, cost: float) -> int:
        """Passes of which a proposal that cost so many passes takes its share."""
        return min(int(cost / self.share), MAX_SKIPPED_PASSES)

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
        self, sequences: Ints, drafts: Sequence[Draft | None], complete: bool = False
    ) -> list[Candidate]:
        rows = enumerate(zip(sequences, drafts, strict=True))
        trees = [self._nodes(row, sequence, draft, complete) for row, (sequence, draft) in rows if draft]
        return [candidate for tree in trees for candidate in tree]

    def _nodes(self, row: int, sequence: int, draft: Draft, complete: bool = False) -> list[Candidate]:
        """Every node of a draft with its survival; ``complete``: all nodes as one candidate."""
        survivals, kinds = [1.0], kinds_of(draft)
        deepest = {kind // LEVELS: kind % LEVELS for kind in sorted(set(kinds))}
        rates = {group: self.acceptance.rates(sequence, group, last) for group, last in deepest.items()}
        for parent, kind in zip(draft.parents, kinds, strict=True):
            survivals.append(survivals[parent] * rates[kind // LEVELS][kind % LEVELS - 1])
        if complete:
            return [Candidate(sum(survivals[1:]), row, 1, 1, len(draft))]
        return [Candidate(survivals[n], row, draft.depths[n], n) for n in range(1, len(survivals))]

    def _best(self, sequences: Ints, candidates: list[Candidate], prompt_tokens: int) -> list[list[int]]:
        """The nodes of each sequence that are run."""
        nodes: list[list[int]] = [[] for _ in sequences]
        if not (candidates and self.latency.known and self.open):
            return nodes
        batch = len(sequences)
        self.budget.ensure_capacity(self.latency.beginning(batch) / self.latency.target(batch, batch))
        run = ExpectedPass(self.latency, batch, prompt_tokens)
        for candidate in self._fastest(candidates, run):
            nodes[candidate.row].append(candidate.node)
        self.min_chance = run.min_chance
        for row, sequence in enumerate(sequences):
            if nodes[row]:
                self._trials.pop(sequence, None)
            elif chain := [node for node in candidates if node.row == row and not node.sibling]:
                nodes[row] += self._try(self._trials.setdefault(sequence, Trial(self.passes)), chain, run)
        return nodes

    def _fastest(self, candidates: list[Candidate], run: ExpectedPass) -> list[Candidate]:
        """The first candidates, by survival, with the highest speed, added to ``run``; they are sorted."""
        candidates.sort(key=Candidate.order)
        best, count, added = run.speed * MIN_SPEEDUP, 0, 0
        for candidate in candidates:
            if candidate.survival < MIN_SURVIVAL:
                break
            added += 1
            if run.add(candidate).loss > self.budget.max_loss_per_pass:
                break
            if run.speed > best:
                best, count = run.speed, added
        run.remove(candidates[count:added])
        return candidates[:count]

    def _try(self, trial: Trial, candidates: list[Candidate], run: ExpectedPass) -> list[int]:
        """The trial of a sequence, if it is due and the budget allows: the first candidates with the highest
        speed, since a block head is paid as a whole when it begins."""
        if self.passes < trial.due:
            return []
        best, count, before = 0.0, 0, run.loss
        for depth, candidate in enumerate(candidates, 1):
            if run.add(candidate).speed > best:
                best, count = run.speed, depth
        run.remove(candidates[count:])
        trial.cost = run.batch * (run.loss - before)
        if run.loss > self.budget.max_loss_per_pass:  # a shorter trial would not pay: the budget fills first
            run.remove(candidates[:count])
            trial.rejected(self.passes)
            return []
        trial.running = True
        return [candidate.node for candidate in candidates[:count]]

    def _learn(self, feedback: DraftFeedback) -> None:
        """Count the drafts, and the result of a trial."""
        self.acceptance.learn(feedback)
        trial = self._trials.get(feedback.sequence)
        if feedback.draft is not None and trial is not None and trial.running:
            if len(feedback.path) > trial.cost:
                self._trials.pop(feedback.sequence)
            else:
                trial.rejected(self.passes)
