"""Speculation inside the engine: joins a proposer, the policy and the verifier with the loop.

    schedule    certain tokens and prompts are planned → plan(): drafts for the sequences that decode, in what
                they leave of the step's tokens and of the free blocks; so drafts hold up no prompt and
                preempt nobody
    run, commit
    draw        judge(): which drafts of a sequence are taken, and the token behind
    note        proposer and policy learn from the pass
    append      the accepted path's places are moved together, the rest is taken back

Where nothing pays, even asking does not: then some passes are as without speculation, and the
last of these is measured, so that what is compared with it stays true (``_rests``).

Sequences are followed by looking at who runs: one that ended, or lost its blocks, is forgotten before the
next drafts are made. Texts fork with their first token, before anything is drafted for them.

A proposer that breaks costs no text: from then on nothing is drafted, and ``failure`` says why. Nor does
anything else here but ``judge``, which raises for the sequence it is called for; what calls the rest says
``stop`` where it fails.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from attar.runtime.completion import Completion
from attar.runtime.sampling.sampled_tokens import SampledTokens
from attar.runtime.scheduler import Planned, Scheduler, StepOutput
from attar.runtime.sequence import Sequence as Running
from attar.runtime.speculate.counts import SpeculationCounts
from attar.runtime.speculate.draft import LEVELS, Draft
from attar.runtime.speculate.policy import DraftPolicy
from attar.runtime.speculate.proposer import DraftFeedback, Proposer
from attar.runtime.speculate.reading import DraftPrefill
from attar.runtime.speculate.round import (
    RESTING,
    GuardedRules,
    SpeculativePass,
    decodes_one,
    draft_limit,
    draft_request,
    mode_of,
    noise_of,
)
from attar.runtime.speculate.siblings import cut, learn
from attar.runtime.speculate.target import Nodes
from attar.runtime.speculate.verify import VerificationMode, verify

WIDE_EVERY = 4  # passes between two with siblings, where none pay

logger = logging.getLogger(__name__)


class Speculator:
    """Drafts for the sequences of one engine.

    Args:
        proposer: of tokens.
        policy: of how many.
        most: drafts of one sequence in a pass at most, all branches counted.
        verification: coupled, exact, or None: coupled where the request has a seed, else exact.
        clock: seconds.

    Attributes:
        counts: for metrics.
        failure: what broke the proposer, or anything here; None where nothing did.
        stopped: nothing is planned, noted or followed any more.
    """

    def __init__(
        self,
        proposer: Proposer,
        policy: DraftPolicy,
        *,
        most: int,
        verification: VerificationMode | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.proposer, self.policy, self.most = proposer, policy, most
        self.verification, self.clock = verification, clock
        self.counts, self.reading = SpeculationCounts(), DraftPrefill()
        self.failure: Exception | None = None
        self.stopped = False
        self._known: dict[int, None] = {}
        self._round = SpeculativePass()
        self._asking = self._reading = False  # of this pass
        self._whole: dict[int, Draft] = {}  # drafts of the pass with all siblings
        self._since_wide = WIDE_EVERY
        self._spent = 0.0  # seconds here that nothing has been charged for: the next asking is
        self._pause = self._resting = 0  # passes that are as without speculation, and those still to come

    def plan(
        self,
        planned: Planned,
        scheduler: Scheduler,
        text: Callable[[Running], Completion],
        inside: bool = False,
    ) -> Planned:
        """Gives drafts to sequences of a planned step.

        Args:
            planned: sequences, each with its certain tokens of the step, for which places are reserved.
            text: of a sequence.
            inside: drafts stay before the last place of a block: where full blocks are rounded, all that
                comes behind must be run after that, as without drafts.

        Returns:
            the same with drafts, for which places are reserved too.
        """
        rested = self._resting > 0
        if rested and self._rests():
            return planned
        began = self.clock()
        self._asking = self._reading = False
        self.follow(scheduler.running)
        decoding = [each for each, _ in planned if decodes_one(each)]
        total = sum(share for _, share in planned)
        left = scheduler.limits.step_tokens - total
        beside = total - len(decoding)
        rooms = [draft_limit(each, scheduler, min(self.most, left), inside) for each in decoding]
        drafts: dict[int, Draft] = {}
        if self.failure is None and not rested and any(rooms):
            for each, draft in zip(decoding, self._asked(decoding, rooms, left, beside, text), strict=True):
                draft = draft and self._fitted(draft, left)
                if draft is not None and _reserved(each, scheduler, 1 + len(draft)):
                    drafts[each.id], left = draft, left - len(draft)
                    each.drafts = list(draft.tokens)
                    each.parents = None if draft.is_chain else list(draft.parents)
        now = self.clock()
        spent = now - began + self._spent
        drafting, self._spent = (spent, 0.0) if self._asking else (0.0, spent)
        ids = tuple(each.id for each in decoding)
        self._round = SpeculativePass(drafts, ids, beside, drafting, self._reading, now)
        return [(each, share + len(each.drafts)) for each, share in planned]

    def has(self, output: StepOutput) -> bool:
        """Whether a sequence has drafts in the pass."""
        return output.sequence.id in self._round.drafts

    def judge(self, output: StepOutput, logits: Tensor, text: Completion) -> SampledTokens:
        """What is taken of a sequence's draft.

        Args:
            logits: all rows of the pass.

        Raises:
            NumericsError: a row that decides is NaN or infinite.
        """
        sequence, draft = output.sequence, self._round.drafts[output.sequence.id]
        rows = output.rows[-output.draws :]
        assert sequence.drafts == list(draft.tokens), f"sequence {sequence.id} ran other drafts"
        nodes = Nodes(logits[rows.start : rows.stop], text, draft, text)
        verdict = verify(draft, nodes, noise_of(sequence, text), mode_of(text, self.verification))
        self.counts.note(len(draft), len(verdict.path))
        return SampledTokens(
            verdict.tokens(draft), tuple(rows[row] for row in verdict.rows), verdict.path, len(draft)
        )

    def note(
        self, outputs: Sequence[StepOutput], drawn: Sequence[SampledTokens | Exception], logits: Tensor
    ) -> None:
        """A pass is over, and its tokens are decided."""
        if self._round is RESTING:
            return
        now = self.clock()
        took = now - self._round.began
        news = [
            self._news(output, each, logits)
            for output, each in zip(outputs, drawn, strict=True)
            if isinstance(each, SampledTokens)
        ]
        decoded = [each for each in news if each.sequence in self._round.decoding]
        drafting = self._round.drafting
        if self._round.reading:
            self.reading.charge(self.policy, len(self._round.decoding), drafting)
            drafting = 0.0
        self.policy.note(decoded, took, drafting, self._round.beside)
        learn(self.policy.acceptance, decoded, self._whole)
        self._whole = {}
        if self.failure is None:
            try:
                self.proposer.observe(news)
            except Exception as failure:
                self._broken(failure)
        asking = 0.0 if self._round.drafts else self._round.drafting
        self._pause = self._resting = self.policy.rest(len(decoded), asking)
        self._spent += self.clock() - now

    def stop(self, failure: Exception) -> None:
        """Nothing is drafted from now on, and nothing here is asked any more."""
        self.stopped, self._round = True, RESTING
        self._broken(failure)

    def follow(self, running: Sequence[Running]) -> None:
        """Forgets sequences that run no longer."""
        now = {each.id: None for each in running}
        for gone in [each for each in self._known if each not in now]:
            self.policy.forget(gone)
            self.proposer.forget(gone)
            self.reading.forget(gone)
        self._known = now

    def _rests(self) -> bool:
        """Whether the coming pass is one in which nothing is asked, learnt or measured."""
        self._resting -= 1
        if self._resting:
            self._round = RESTING
        else:
            self.policy.budget.note(self._pause - 1, self._pause - 1)  # the last one is noted as any other
        return self._resting > 0

    def _asked(
        self,
        decoding: Sequence[Running],
        rooms: list[int],
        left: int,
        beside: int,
        text: Callable[[Running], Completion],
    ) -> list[Draft | None]:
        """What is proposed and pays, for each."""
        ids, nothing = [each.id for each in decoding], [None] * len(decoding)
        if not self.policy.open:
            return [*nothing]
        self._asking, free, wide = True, self.proposer.free, False
        if not free:
            rooms = [self._worth(each, most) for each, most in zip(decoding, rooms, strict=True)]
            branches = getattr(self.proposer, "branches", 1)
            kinds = self.policy.choose(ids, rooms, beside, branches, left)
            rooms = [sum(kind < LEVELS for kind in each) for each in kinds]
            if not any(rooms):
                return [*nothing]
            wide = self._wide(kinds)
            self._reading = self.reading.meet(ids, rooms, [len(each.tokens) for each in decoding])
        rules = [GuardedRules(text(each)) for each in decoding]
        wishes = [
            draft_request(each, most, self.proposer, its, mode_of(its.text, self.verification), wide)
            for each, most, its in zip(decoding, rooms, rules, strict=True)
        ]
        try:
            drafts = self.proposer.propose(wishes)
        except Exception as failure:
            if not any(its.failed for its in rules):
                self._broken(failure)
            return [*nothing]
        if not free:
            self._whole = {each: draft for each, draft in zip(ids, drafts, strict=True) if draft is not None}
            return [draft and cut(draft, each) for draft, each in zip(drafts, kinds, strict=True)]
        return self.policy.select(ids, drafts, beside, whole=self.proposer.learns_tree)

    def _wide(self, kinds: Sequence[set[int]]) -> bool:
        """Whether siblings are drafted: where some are run, and now and then to learn of them."""
        self._since_wide += 1
        wide = self._since_wide >= WIDE_EVERY or any(kind >= LEVELS for each in kinds for kind in each)
        self._since_wide = 0 if wide else self._since_wide
        return wide

    def _worth(self, sequence: Running, most: int) -> int:
        """``most`` where a model may draft, or 0."""
        count = len(sequence.tokens)
        to_come = sequence.limit - count
        return most if self.reading.worth(self.policy, sequence.id, most, count, to_come) else 0

    def _fitted(self, draft: Draft, left: int) -> Draft | None:
        """What the step has room for; where the proposer learns from its whole tree, all or nothing."""
        return draft if len(draft) <= left else None if self.proposer.learns_tree else draft.cut(left)

    def _news(self, output: StepOutput, drawn: SampledTokens, logits: Tensor) -> DraftFeedback:
        sequence = output.sequence.id
        draft = self._round.drafts.get(sequence)
        choices: list[int] = []
        if draft is not None and self.proposer.learns_tree:
            rows = output.rows[-output.draws :]
            choices = logits[rows.start : rows.stop].argmax(-1).tolist()
        return DraftFeedback(sequence, draft, drawn.path, drawn.tokens, choices)

    def _broken(self, failure: Exception) -> None:
        self.failure = failure
        logger.error("speculation is off: %s failed: %s", self.proposer.name, failure, exc_info=failure)


def _reserved(sequence: Running, scheduler: Scheduler, count: int) -> bool:
    """Whether the next places are writable. An error is the sequence's own: it comes again where the
    scheduler reserves places, and ends the request."""
    try:
        return scheduler.manager.reserve(sequence.id, count)
    except Exception:
        return False
