"""How many drafts pay, in each sequence of a batch and in each step, 0 among the answers.

    tokens a second = (B + sum of survivals) / (t(B, B + drafts) + draft steps)

A draft survives with the product of the a's on its path; its survival is what it adds to the tokens of the
pass. The drafts of the whole batch are sorted by survival (a parent's is never less than its child's, so
every front part is made of whole paths), and of all front parts the one with the most tokens a second is
taken: the next draft goes to the sequence that gains most by it, as far as the gain pays for its time.
Chains of a draft model pay for its steps too, one step for every depth, at the width that is left there.

What may be lost is held in a purse (``purse.py``); what costs more than is in it is not tried.

A sequence that gets none is probed with one draft: after ``gap`` steps without, and the gap doubles with
every probe that fails, up to B c / PROBE where a probe costs c plain passes; a probe that is accepted sets
it back. Loss by probes over T steps, if all fail: at most c (log2(c / PROBE) + 1) + PROBE T passes for B =
1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from attar.runtime.speculate.acceptance import Acceptance
from attar.runtime.speculate.cost import Cost
from attar.runtime.speculate.draft import Draft
from attar.runtime.speculate.plan import Chance, Pass
from attar.runtime.speculate.proposer import News
from attar.runtime.speculate.purse import Purse
from attar.runtime.speculate.trim import kinds_of, survivals, trimmed
from attar.runtime.speculate.watch import Watch

MARGIN = 0.02  # of tokens a second, gained at least
LEAST = 0.01  # survival below which no draft is looked at
PROBE = 0.005  # of the time, for probes in the long run
HOPELESS = 8  # times rarer where drafts would not pay if all were accepted
DOUBTFUL = 1.25  # a smaller speedup
LOOK, RARELY = 64, 256  # passes with drafts after which a plain one is measured, where doubtful and where not


class Chooser:
    """Decides what is drafted; told of every pass, it learns what pays.

    Args:
        cost: the times.
        most: drafts of one sequence at most.
        purse: what may be lost.
    """

    def __init__(self, cost: Cost, most: int = 16, purse: Purse | None = None) -> None:
        self.cost, self.most, self.purse = cost, most, purse or Purse()
        self.acceptance = Acceptance()
        self._watches: dict[int, Watch] = {}
        self._gap = 1  # of the last probe, whoever's: where new sequences begin
        self._since_plain, self._doubtful, self._held = 0, True, False  # held: a pass is plain to be measured

    @property
    def open(self) -> bool:
        """Whether anything should be asked at all: asking takes time too."""
        return self.purse.open and self.cost.settled

    def choose(self, sequences: Sequence[int], most: Sequence[int], beside: int = 0) -> list[int]:
        """K for each sequence of the batch, before a draft model is run.

        Args:
            sequences: all that decode in the pass.
            most: drafts that each may have; ``self.most`` is the other limit.
            beside: tokens of prompts in the pass.
        """
        chances = []
        for place, (sequence, limit) in enumerate(zip(sequences, most, strict=True)):
            survival = 1.0
            rates = self.acceptance.rates(sequence, 0, min(limit, self.most))
            for depth, rate in enumerate(rates, 1):
                survival *= rate
                chances.append(Chance(survival, place, depth, depth))
        kept = self._best(sequences, chances, beside, drafted=True)
        return [len(nodes) for nodes in kept]

    def prune(
        self, sequences: Sequence[int], drafts: Sequence[Draft | None], beside: int = 0
    ) -> list[Draft | None]:
        """The drafts of a free proposer, cut to the nodes that pay; None where none does.

        Args:
            sequences: all that decode in the pass.
            drafts: one for each, fixed, or None.
            beside: tokens of prompts in the pass.
        """
        chances: list[Chance] = []
        for place, (sequence, draft) in enumerate(zip(sequences, drafts, strict=True)):
            if draft is not None:
                chances += self._chances(place, sequence, draft)
        kept = self._best(sequences, chances, beside, drafted=False)
        return [draft and trimmed(draft, nodes) for draft, nodes in zip(drafts, kept, strict=True)]

    def whole(
        self, sequences: Sequence[int], drafts: Sequence[Draft | None], beside: int = 0
    ) -> list[Draft | None]:
        """The drafts of a proposer that learns from its whole tree (lookahead): all of it or nothing.

        Args: as of ``prune``.
        """
        chances = []
        for place, (sequence, draft) in enumerate(zip(sequences, drafts, strict=True)):
            if draft is not None:
                gain = sum(each.survival for each in self._chances(place, sequence, draft))
                chances.append(Chance(gain, place, 1, 1, len(draft)))
        kept = self._best(sequences, chances, beside, drafted=False)
        return [draft if nodes else None for draft, nodes in zip(drafts, kept, strict=True)]

    def note(self, news: Sequence[News], target: float, draft: float = 0.0, beside: int = 0) -> None:
        """A pass is over.

        Args:
            news: of every sequence that decoded in it.
            target: seconds of the pass, verification included.
            draft: seconds of drafting.
            beside: tokens of prompts in the pass.
        """
        if not news:
            return
        batch, drafts = len(news), [each.draft for each in news if each.draft is not None]
        tokens = batch + beside + sum(len(each) for each in drafts)
        plain = self.cost.plain(batch)
        if plain > 0 and (drafts or draft > 0):
            brought = sum(len(each.path) + 1 for each in news) / batch
            passes = self.cost.passes(batch, tokens, target, beside) if drafts else 1.0
            asking = min(draft / plain, self.purse.spare / 2)  # the machine may have stood still
            self.purse.note(passes + asking, brought)
        elif plain > 0:
            self.purse.note(1.0, 1.0)
        self._since_plain = self._since_plain + 1 if drafts else 0
        self.cost.note_target(batch, tokens, target)
        if drafts and draft > 0:
            self.cost.note_draft(len(drafts), max(len(each.counts) for each in drafts), draft)
        for each in news:
            self._learn(each)

    def rest(self, batch: int, asking: float) -> int:
        """Passes to come that should be as without speculation: nothing asked, learnt or measured.

        Args:
            batch: sequences of the last pass.
            asking: seconds that were spent for no draft in it; 0: nobody was asked, or there were drafts.
        """
        if not self.open:
            return self.purse.rest
        if self._held:
            return 0
        plain = self.cost.plain(batch)
        return self.purse.pause(asking / plain) if plain > 0 else 0

    def fork(self, sequence: int, child: int) -> None:
        """``child`` begins with what is believed of ``sequence``."""
        self.acceptance.fork(sequence, child)
        if sequence in self._watches:
            self._watches[child] = replace(self._watches[sequence])

    def forget(self, sequence: int) -> None:
        """A sequence ended."""
        self.acceptance.forget(sequence)
        self._watches.pop(sequence, None)

    def _chances(self, place: int, sequence: int, draft: Draft) -> list[Chance]:
        """Every node of a draft that may be worth a look; first ones always, for probes."""
        rates = partial(self.acceptance.rates, sequence)
        return [each for each in survivals(draft, place, rates) if each.survival >= LEAST or each.depth == 1]

    def _best(
        self, sequences: Sequence[int], chances: list[Chance], beside: int, drafted: bool
    ) -> list[list[int]]:
        """The nodes of each sequence that are run."""
        kept: list[list[int]] = [[] for _ in sequences]
        self._held = False
        if not (chances and self.cost.known and self.cost.settled):
            return kept
        plan = Pass(self.cost, len(sequences), beside, drafted, sum(each.size for each in chances))
        chances.sort(key=lambda each: (-each.survival, each.depth, each.place, each.node))
        count = self._front(plan, chances)
        self._held = self._since_plain >= (LOOK if self._doubtful else RARELY)
        if self._held:
            return kept
        for chance in chances[:count]:
            kept[chance.place].append(chance.node)
        plan.reset(chances[:count])
        self._probe(sequences, chances, kept, plan)
        return kept

    def _front(self, plan: Pass, chances: Sequence[Chance]) -> int:
        """How many of the sorted chances are taken."""
        best, count = plan.speed * (1 + MARGIN), 0
        for index, chance in enumerate(chances, 1):
            if chance.survival < LEAST:
                break
            plan.add(chance)
            if not self.purse.affords(plan.loss):
                break
            if plan.speed > best:
                best, count = plan.speed, index
        self._doubtful = best < DOUBTFUL * plan.batch / plan.plain
        return count

    def _probe(
        self, sequences: Sequence[int], chances: Sequence[Chance], kept: list[list[int]], plan: Pass
    ) -> None:
        """Gives a draft to sequences that have had none for long."""
        firsts: dict[int, Chance] = {}
        for chance in chances:
            if chance.depth == 1:
                firsts.setdefault(chance.place, chance)
        for place, chance in sorted(firsts.items()):
            watch = self._watch(sequences[place])
            watch.probe = False
            if kept[place]:
                watch.gap, watch.idle = 1, 0
                continue
            watch.idle += 1
            before = plan.loss
            if watch.idle < watch.gap or not self.purse.affords(plan.add(chance)):
                plan.drop(chance)
                continue
            watch.probe, watch.idle = True, 0
            watch.last = max(1, math.ceil(plan.batch * (plan.loss - before) / PROBE))
            watch.hope = any(
                plan.perfect(count) > (1 + MARGIN) * plan.batch / plan.plain for count in (1, self.most)
            )
            kept[place].append(chance.node)

    def _watch(self, sequence: int) -> Watch:
        return self._watches.setdefault(sequence, Watch(self._gap))

    def _learn(self, news: News) -> None:
        """Every draft whose parent was accepted teaches."""
        if news.draft is None:
            return
        on = {0, *news.path}
        for node, (parent, kind) in enumerate(zip(news.draft.parents, kinds_of(news.draft), strict=True), 1):
            if parent in on:
                self.acceptance.note(news.sequence, kind, node in on)
        watch = self._watch(news.sequence)
        if watch.probe:
            longest = watch.last if watch.hope else HOPELESS * watch.last
            again = news.path and watch.hope
            self._gap = watch.gap = max(watch.gap // 4, 1) if again else min(2 * watch.gap, longest)
            watch.probe = False
