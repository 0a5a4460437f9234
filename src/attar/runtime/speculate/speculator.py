"""Speculation in the engine's loop: connects a proposer, the policy and verification.

    plan        decode tokens and prompt chunks (``scheduler.py``)
    add_drafts  for the sequences that decode, in the remaining step tokens and free blocks: drafts delay no
                prompt and preempt no sequence
    build, run, commit
    sample      verify(): the accepted drafts of a sequence, and the token after them
    note        the proposer and the policy learn from the pass
    append      the accepted path's slots are moved together, the others are truncated

Where no draft pays, the proposer's own time does not pay either: some passes then run without speculation,
and the last of them is measured, which keeps the time of plain passes current (``_resting_pass``). Where a
free proposer has no draft, the next passes only look whether it has one (``silent_passes.py``).

The state of a sequence that ended or was preempted is dropped before the next proposal. Sequences fork with
their first token, before anything is drafted for them.

A failure ends no request: from then on nothing is drafted, and ``failure`` has the error. Only ``verify``
raises, for its sequence.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import cast

from torch import Tensor

from attar.runtime.completion import Completion
from attar.runtime.sampling.sampled_tokens import SampledTokens
from attar.runtime.scheduler import Planned, Scheduler, StepOutput
from attar.runtime.sequence import Sequence as Running
from attar.runtime.speculate.combined import combined, drafts_alone, free_part, proposers_of
from attar.runtime.speculate.draft import LEVELS, Draft
from attar.runtime.speculate.draft_prefill import DraftPrefill
from attar.runtime.speculate.policy import DraftPolicy
from attar.runtime.speculate.proposer import DraftFeedback, DraftRequest, Proposer, TimedProposer
from attar.runtime.speculate.settings import LOSSY
from attar.runtime.speculate.siblings import SiblingRounds
from attar.runtime.speculate.silent_passes import HasNoDraft, SilentPasses
from attar.runtime.speculate.speculative_pass import (
    RESTING,
    GuardedRules,
    SpeculationCounts,
    SpeculativePass,
    add_choices,
    decodes_one,
    draft_limits,
    drawing_rules,
    mode_of,
    noise_of,
    prompts_read,
)
from attar.runtime.speculate.target import CompletionLogits
from attar.runtime.speculate.verify import VerificationMode, verify

logger = logging.getLogger(__name__)


class Speculator:
    """Drafts for the sequences of one engine.

    Args:
        most: drafts of one sequence in a pass at most, all branches counted.
        verification: coupled, exact, None: coupled where the request has a seed, else exact; or typical,
            which is lossy.
        clock: seconds.
        prefilling: is told the sequences whose prompts are read.

    Attributes:
        failure: the error that ended speculation; None where there was none.
    """

    def __init__(
        self,
        proposer: Proposer,
        policy: DraftPolicy,
        *,
        most: int,
        verification: VerificationMode | None = None,
        clock: Callable[[], float] = time.perf_counter,
        prefilling: Callable[[Sequence[DraftRequest]], None] | None = None,
    ) -> None:
        self.proposer, self.policy, self.most = proposer, policy, most
        self.verification, self.clock, self.prefilling = verification, clock, prefilling
        self.counts, self.prefill = SpeculationCounts(), DraftPrefill()
        self.failure: Exception | None = None
        self.stopped = False
        self._running: list[int] = []  # that the proposer and the policy know of
        self._round = RESTING
        self._siblings = SiblingRounds()
        self._spent = 0.0  # own seconds, charged with the next proposal
        self._pause = self._resting = 0  # passes without speculation, and those that remain
        self._silent = SilentPasses()

    def add_drafts(
        self,
        planned: Planned,
        scheduler: Scheduler,
        completion: Callable[[Running], Completion],
        inside: bool = False,
    ) -> Planned:
        """Add drafts to the sequences of a planned step. Returns the same with drafts, for which slots are
        reserved too; without drafts where the speculator fails.

        Args:
            planned: sequences, each with its tokens of the step, for which slots are reserved.
            text: of a sequence.
            inside: drafts stay before the last slot of a block: where full blocks are quantized, all later
                tokens must be run after that, as without drafts.
        """
        if self.stopped or not planned:
            return planned
        try:
            return self._with_drafts(planned, scheduler, completion, inside)
        except Exception as failure:
            self._stop(failure)
            for sequence, _ in planned:
                sequence.drafts, sequence.parents = [], None
            return planned

    def _with_drafts(
        self,
        planned: Planned,
        scheduler: Scheduler,
        completion: Callable[[Running], Completion],
        inside: bool,
    ) -> Planned:
        if self._silent.active and self._silent_pass(planned):
            return planned
        rests = self._resting > 0
        if rests and self._resting_pass():
            return planned
        began = self.clock()
        self._forget_finished(scheduler.running)
        decoding = {one.id: one for one, _ in planned if decodes_one(one)}
        total = sum([share for _, share in planned])
        this = self._round = SpeculativePass(
            decoding, total - len(decoding), scheduler.limits.step_tokens - total
        )
        drafting = not rests and self.failure is None and self.policy.open
        if drafting and self.prefilling is not None:
            self._tell(self.prefilling, prompts_read(planned, completion))
        if decoding and drafting:
            limits = draft_limits(decoding.values(), scheduler, min(self.most, this.left), inside)
            limits = [
                most if completion(one).drafts else 0
                for one, most in zip(decoding.values(), limits, strict=True)
            ]
            if any(limits):
                this.asked = True
                drafts = self._proposed(this, limits, completion, scheduler.manager.readable)
                if any(drafts):
                    self._assign(this, drafts, scheduler)
                    planned = [(one, share + len(one.drafts)) for one, share in planned]
        this.began = now = self.clock()
        self._spent += now - began
        if this.asked:
            this.drafting, self._spent = self._spent, 0.0
        return planned

    @property
    def lossy(self) -> bool:
        """Whether drafts may be accepted that plain decoding would not give."""
        return self.verification == LOSSY

    def has(self, output: StepOutput) -> bool:
        """Whether a sequence has drafts in the pass."""
        return output.sequence.id in self._round.drafts

    def verify(self, output: StepOutput, logits: Tensor, completion: Completion) -> SampledTokens:
        """The accepted tokens of a sequence's draft, and the one after them.

        Raises:
            NumericsError: a row that decides is NaN or infinite.
        """
        sequence, draft = output.sequence, self._round.drafts[output.sequence.id]
        rows = output.rows[-output.draws :]
        assert sequence.drafts == list(draft.tokens), f"sequence {sequence.id} ran other drafts"
        target = CompletionLogits(logits[rows.start : rows.stop], completion, draft, completion)
        verdict = verify(
            draft, target, noise_of(sequence, completion), mode_of(completion, self.verification)
        )
        lossy = self.lossy and not target.greedy
        self.counts.note(len(draft), len(verdict.path), lossy)
        return SampledTokens(
            verdict.tokens(draft),
            tuple(rows[row] for row in verdict.rows),
            verdict.path,
            len(draft),
            lossy,
            proposers_of(self.proposer, draft, verdict.path) if completion.params.proposers else (),
        )

    def note(
        self, outputs: Sequence[StepOutput], drawn: Sequence[SampledTokens | Exception], logits: Tensor
    ) -> None:
        """After a pass: the policy and the proposer learn from it."""
        if self.stopped or self._round is RESTING:
            return
        try:
            self._learn(outputs, drawn, logits)
        except Exception as failure:
            self._stop(failure)

    def drop_finished(self, running: Sequence[Running]) -> None:
        """Forget the sequences that are not running any more."""
        try:
            self._forget_finished(running)
        except Exception as failure:
            self._stop(failure)

    def _learn(
        self, outputs: Sequence[StepOutput], drawn: Sequence[SampledTokens | Exception], logits: Tensor
    ) -> None:
        now, this = self.clock(), self._round
        drafts, drafting = this.drafts, this.drafting
        feedback = [
            DraftFeedback(output.sequence.id, drafts.get(output.sequence.id), sampled.path, sampled.tokens)
            for output, sampled in zip(outputs, drawn, strict=True)
            if output.sequence.id in this.decoding and isinstance(sampled, SampledTokens)
        ]
        if drafts and self.proposer.learns_tree:
            add_choices(feedback, outputs, logits)
        for one in feedback if this.doubted else ():
            one.doubted = this.doubted.get(one.sequence)
        if this.prefills:
            self.prefill.charge(self.policy, len(this.decoding), drafting)
        charged = 0.0 if this.prefills else drafting
        self.policy.note(
            feedback, now - this.began, charged, this.prompt_tokens, this.steps, prefilled=this.prefills
        )
        self._siblings.learn(self.policy.acceptance, feedback)
        if self.failure is None:
            try:
                self.proposer.observe(feedback)
            except Exception as failure:
                self._fail(failure)
        in_vain = this.asked and not (drafts or this.doubted)
        proposing, looks = drafting if in_vain else 0.0, free_part(self.proposer) is not None
        self._pause = self.policy.passes_to_skip(len(feedback), proposing, free=looks)
        if in_vain and self.policy.open and self.prefilling is None and hasattr(self.proposer, "silent"):
            self._silent.begin(self.policy, len(feedback), self._pause)
        self._resting = 0 if self._silent.active else self._pause
        self._spent += self.clock() - now

    def _stop(self, failure: Exception) -> None:
        """Nothing is drafted from now on."""
        self.stopped, self._round = True, RESTING
        self._fail(failure)

    def _forget_finished(self, running: Sequence[Running]) -> None:
        if self.stopped:
            return
        ids = [one.id for one in running]
        if ids == self._running:
            return
        now = dict.fromkeys(ids)
        for gone in [one for one in self._running if one not in now]:
            self.policy.forget(gone)
            self.proposer.forget(gone)
            self.prefill.forget(gone)
        self._running = ids

    def _silent_pass(self, planned: Planned) -> bool:
        """Whether the pass runs without a plan."""
        self._round, silent = RESTING, self._silent
        if silent.rests():
            return True
        began, vain = self.clock(), False
        try:
            look: HasNoDraft = self.proposer.silent  # type: ignore[attr-defined]
            vain = silent.look(planned, len(self._running), look, self.most)
        except Exception as failure:
            self._fail(failure)
        seconds = self.clock() - began
        if vain:
            silent.note(seconds)
        else:
            self._spent += seconds
            silent.end(self.policy)
        return vain

    def _resting_pass(self) -> bool:
        """Whether the next pass runs without proposals and measurement."""
        self._resting -= 1
        if self._resting:
            self._round = RESTING
        else:
            self.policy.budget.note(self._pause - 1, self._pause - 1)  # the last one is measured
        return self._resting > 0

    def _tell(self, tell: Callable[[Sequence[DraftRequest]], None], prompts: list[DraftRequest]) -> None:
        try:
            tell(prompts)
        except Exception as failure:
            self._fail(failure)

    def _assign(self, this: SpeculativePass, drafts: Sequence[Draft | None], scheduler: Scheduler) -> None:
        """Give the sequences their drafts, as far as the step has room for them."""
        for one, proposed in zip(this.decoding.values(), drafts, strict=True):
            draft = proposed and self._fitting(proposed, this.left)
            if draft is not None and _reserved(one, scheduler, 1 + len(draft)):
                this.drafts[one.id] = draft
                this.left -= len(draft)
                one.drafts = list(draft.tokens)
                one.parents = None if draft.is_chain else list(draft.parents)

    def _proposed(
        self,
        this: SpeculativePass,
        limits: Sequence[int],
        completion: Callable[[Running], Completion],
        blocks: Callable[[int], Sequence[int]],
    ) -> Sequence[Draft | None]:
        """The drafts that pay, for each sequence."""
        free, policy, prompt_tokens = free_part(self.proposer), self.policy, this.prompt_tokens
        ids = list(this.decoding)
        lookups: Sequence[Draft | None] = [None] * len(limits)
        if free is not None:
            requests = [
                DraftRequest(one.id, one.tokens, most, one.request.salt, completion(one))
                for one, most in zip(this.decoding.values(), limits, strict=True)
            ]
            lookups = self._asked(free, requests)
        if self.proposer.free:
            if not any(lookups):
                return lookups
            return policy.select(ids, lookups, prompt_tokens, whole=self.proposer.learns_tree)
        asked = [
            0 if drafts_alone(policy, one, most, draft, len(ids)) else most
            for one, most, draft in zip(ids, limits, lookups, strict=True)
        ]
        drafts = self._timed(this, asked, completion, blocks)
        if free is not None:
            this.steps = this.steps or -1
            return combined(policy, ids, limits, drafts, lookups, prompt_tokens)
        trees = cast(TimedProposer, self.proposer).trees
        return policy.trim(ids, drafts, prompt_tokens) if trees else drafts

    def _timed(
        self,
        this: SpeculativePass,
        limits: Sequence[int],
        completion: Callable[[Running], Completion],
        blocks: Callable[[int], Sequence[int]],
    ) -> list[Draft | None]:
        """The drafts of a proposer that runs a model, trees with all their nodes."""
        decoding, proposer = this.decoding.values(), cast(TimedProposer, self.proposer)
        ids = list(this.decoding)
        limits = [self._prefilled_limit(one, most) for one, most in zip(decoding, limits, strict=True)]
        kinds = self.policy.choose(ids, limits, this.prompt_tokens, proposer.branches, this.left)
        depths = [sum(kind < LEVELS for kind in one) for one in kinds]
        if not any(depths):
            return [None] * len(decoding)
        siblings = self._siblings.due(kinds)
        this.prefills = self.prefill.begin(ids, depths, [len(one.tokens) for one in decoding])
        least = self.policy.least
        whole = proposer.trees or (proposer.confident and least > 0)
        limits = [most if whole and depth else depth for most, depth in zip(limits, depths, strict=True)]
        rules = [GuardedRules(completion(one)) for one in decoding]
        drawing = [
            drawing_rules(one, its, mode_of(its.completion, self.verification)) if proposer.draws else None
            for one, its in zip(decoding, rules, strict=True)
        ]
        requests = [
            DraftRequest(
                one.id, one.tokens, most, one.request.salt, its, siblings, blocks(one.id), depth, least
            )
            for one, most, depth, its in zip(decoding, limits, depths, drawing, strict=True)
        ]
        drafts = self._asked(proposer, requests, rules)
        this.steps = max((max(draft.depths) for draft in drafts if draft is not None), default=0)
        if proposer.trees:
            return list(drafts)
        if whole:
            sizes = [0 if draft is None else len(draft.counts) for draft in drafts]
            this.doubted = {
                one: size for one, size, most in zip(ids, sizes, limits, strict=True) if size < most
            }
        return self._siblings.cut(dict(zip(ids, drafts, strict=True)), kinds)

    def _asked(
        self, proposer: Proposer, requests: Sequence[DraftRequest], rules: Sequence[GuardedRules] = ()
    ) -> Sequence[Draft | None]:
        """The proposer's drafts; none where it fails, or the rules of a completion."""
        try:
            return proposer.propose(requests)
        except Exception as failure:
            if not any(its.failed for its in rules):
                self._fail(failure)
            return [None] * len(requests)

    def _prefilled_limit(self, sequence: Running, most: int) -> int:
        """``most`` where the draft model has prefilled the sequence or should, else 0."""
        count = len(sequence.tokens)
        remaining = sequence.limit - count
        return most if self.prefill.pays(self.policy, sequence.id, most, count, remaining) else 0

    def _fitting(self, draft: Draft, left: int) -> Draft | None:
        """The part that fits in the step; all or nothing if the proposer learns from its whole tree."""
        return draft if len(draft) <= left else None if self.proposer.learns_tree else draft.cut(left)

    def _fail(self, failure: Exception) -> None:
        self.failure = failure
        logger.error("speculation is off: %s failed: %s", self.proposer.name, failure, exc_info=failure)


def _reserved(sequence: Running, scheduler: Scheduler, count: int) -> bool:
    """Whether slots are reserved. An error is raised again when the scheduler reserves the slots of the
    sequence, and ends its request there."""
    try:
        return scheduler.manager.reserve(sequence.id, count)
    except Exception:
        return False
