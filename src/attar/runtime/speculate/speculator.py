"""Speculation in the engine's loop: connects a proposer, the policy and verification.

    plan        decode tokens and prompt chunks (``scheduler.py``)
    add_drafts  for the sequences that decode, in the remaining step tokens and free blocks: drafts delay no
                prompt and preempt no sequence
    build, run, commit
    sample      verify(): the accepted drafts of a sequence, and the token after them
    note        the proposer and the policy learn from the pass
    append      the accepted path's slots are moved together, the others are truncated

Sequences that ended or were preempted are forgotten before the next proposal. A failure ends no request: from
then on every pass is plain, and ``failure`` has the error. Only ``verify`` raises, for its sequence.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum
from typing import cast

from torch import Tensor

from attar.runtime.completion import Completion
from attar.runtime.sampling.sampled_tokens import SampledTokens
from attar.runtime.scheduler import Planned, Scheduler, StepOutput
from attar.runtime.sequence import Sequence as Running
from attar.runtime.speculate.combined import combined, drafts_alone, lookup_part, proposers_of
from attar.runtime.speculate.draft import Draft
from attar.runtime.speculate.policy import DraftPolicy
from attar.runtime.speculate.proposer import (
    DraftFeedback,
    DraftRequest,
    LookupProposer,
    Proposer,
    TimedProposer,
)
from attar.runtime.speculate.settings import LOSSY
from attar.runtime.speculate.siblings import count_siblings
from attar.runtime.speculate.speculative_pass import (
    CompletionOf,
    SpeculationCounts,
    SpeculativePass,
    add_choices,
    decodes_one,
    mode_of,
    noise_of,
    prompts_read,
)
from attar.runtime.speculate.target import CompletionLogits
from attar.runtime.speculate.verify import VerificationMode, verify

MAX_UNTIMED = 15  # lookups until a pass is measured again
CATCH_UP = 16  # tokens without drafts, after which a draft model prefills a sequence again
logger = logging.getLogger(__name__)


class PassState(Enum):
    """What the next pass does."""

    PLAIN = "nothing is drafted, the pass is measured; for good after a failure"
    SKIPPING = "nothing is drafted or measured: a proposal was empty, or the loss budget is"
    LOOKUP = "the proposer is only asked whether it has a draft; nothing is measured"
    DRAFTING = "drafts are proposed, the pass is measured"


class Speculator:
    """Drafts for the sequences of one engine.

    Args:
        most: drafts of one sequence in a pass at most, all branches counted.
        verification: coupled, exact, None: coupled where the request has a seed, else exact; or typical,
            which is lossy.
        clock: seconds.
        prefilling: called with the sequences whose prompts a pass reads.
        chains: of a tree of drafts the best chain is run: layers carry states, which follow one chain.

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
        chains: bool = False,
    ) -> None:
        self.proposer, self.policy, self.most = proposer, policy, most
        self.verification, self.clock, self.prefilling = verification, clock, prefilling
        self.chains = chains
        self.counts = SpeculationCounts()
        self.failure: Exception | None = None
        self.state = self._measured_state()
        self._running: list[int] = []  # that the proposer and the policy know of
        self._prefilled: dict[int, int] = {}  # tokens of each sequence that a draft model has run
        self._pass: SpeculativePass | None = None
        self._skip = self._lookups = 0  # passes and lookups that remain
        self._overhead = 0.0  # seconds of the speculator that are not charged yet

    def add_drafts(
        self, planned: Planned, scheduler: Scheduler, completion: CompletionOf, inside: bool = False
    ) -> Planned:
        """Add drafts to the sequences of a planned step. Returns the same with drafts, for which slots are
        reserved too; without drafts where the speculator fails.

        Args:
            planned: sequences, each with its tokens of the step, for which slots are reserved.
            inside: drafts stay before the last slot of a block: where full blocks are quantized, all later
                tokens must be run after that, as without drafts.
        """
        self._pass = None
        if self.failure is not None or not planned:
            return planned
        try:
            if self._passed_by(planned):
                return planned
            began = self.clock()
            self.drop_finished(scheduler.running)
            this = self._pass = SpeculativePass.of(planned, scheduler.limits.step_tokens)
            if self.state is PassState.DRAFTING:
                if self.prefilling is not None:
                    self.prefilling(prompts_read(planned, completion))
                if any(limits := this.limits(self.most, scheduler, completion, inside)):
                    this.called = True
                    drafts = self._propose(this, limits, completion, scheduler)
                    complete = self.proposer.needs_full_tree
                    this.assign(drafts, scheduler, complete, self.chains)
            this.began = self.clock()
            this.drafting, self._overhead = self._overhead + this.began - began, 0.0
            return [(sequence, share + len(this.drafts.get(sequence.id, ()))) for sequence, share in planned]
        except Exception as failure:
            self._stop(failure)
            for sequence, _ in planned:
                sequence.drafts, sequence.parents = [], None
            return planned

    @property
    def lossy(self) -> bool:
        """Whether drafts may be accepted that plain decoding would not give."""
        return self.verification == LOSSY

    def has(self, output: StepOutput) -> bool:
        """Whether a sequence has drafts in the pass."""
        return self._pass is not None and output.sequence.id in self._pass.drafts

    def verify(self, output: StepOutput, logits: Tensor, completion: Completion) -> SampledTokens:
        """The accepted tokens of a sequence's draft, and the one after them.

        Raises:
            NumericsError: a row that decides is NaN or infinite.
        """
        assert self._pass is not None, "no drafts were added"
        sequence, draft = output.sequence, self._pass.drafts[output.sequence.id]
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
        """After a pass: the policy and the proposer learn from it, and the state of the next is decided."""
        if self._pass is None or self.failure is not None:
            return
        now = self.clock()
        try:
            feedback = self._pass.feedback(outputs, drawn)
            if self._pass.drafts and self.proposer.needs_full_tree:
                add_choices(feedback, outputs, logits)
            self._learn(self._pass, feedback, now - self._pass.began)
        except Exception as failure:
            self._stop(failure)
        self._overhead = self.clock() - now

    def drop_finished(self, running: Sequence[Running]) -> None:
        """Forget the sequences that are not running any more."""
        ids = [sequence.id for sequence in running]
        if ids == self._running or self.failure is not None:
            return
        try:
            now = dict.fromkeys(ids)
            for gone in [sequence for sequence in self._running if sequence not in now]:
                self.policy.forget(gone)
                self.proposer.forget(gone)
                self._prefilled.pop(gone, None)
            self._running = ids
        except Exception as failure:
            self._stop(failure)

    def _passed_by(self, planned: Planned) -> bool:
        """Whether the pass runs as without speculation, and is not measured: it is skipped, or no sequence
        has a draft."""
        if self.state is PassState.SKIPPING:
            self._decide(self._skip - 1, self._lookups)
            return True
        if self.state is not PassState.LOOKUP:
            return False
        began, has_draft = self.clock(), cast(LookupProposer, self.proposer).has_draft
        empty = len(planned) == len(self._running) and all(
            decodes_one(sequence) and not has_draft(sequence.id, sequence.tokens, self.most)
            for sequence, _ in planned
        )
        seconds = self.clock() - began
        if empty:
            self._decide(self.policy.note_lookup(len(planned), seconds), self._lookups - 1)
        else:
            self._overhead += seconds
            self._decide(0, 0)
        return empty

    def _decide(self, skip: int, lookups: int) -> None:
        """The state of the next pass."""
        self._skip, self._lookups = skip, lookups
        looks_up = PassState.LOOKUP if lookups else self._measured_state()
        self.state = PassState.SKIPPING if skip else looks_up

    def _measured_state(self) -> PassState:
        return PassState.DRAFTING if self.policy.open and self.failure is None else PassState.PLAIN

    def _learn(self, this: SpeculativePass, feedback: Sequence[DraftFeedback], seconds: float) -> None:
        policy, proposer = self.policy, self.proposer
        policy.note(feedback, seconds, this.drafting, this.prompt_tokens, this.steps, this.prefills)
        count_siblings(policy.acceptance, feedback, this.uncut)
        proposer.observe(feedback)
        empty = this.called and not (this.drafts or this.stopped_by_confidence)
        is_lookup = lookup_part(proposer) is not None
        skip = policy.passes_to_skip(len(feedback), this.drafting if empty else 0.0, is_lookup=is_lookup)
        looks_up = empty and policy.open and hasattr(proposer, "has_draft")
        self._decide(skip, MAX_UNTIMED if looks_up else 0)

    def _propose(
        self, this: SpeculativePass, limits: Sequence[int], completion: CompletionOf, scheduler: Scheduler
    ) -> Sequence[Draft | None]:
        """The drafts that pay: of a lookup, of a proposer that runs a model, or of both."""
        policy, lookup, ids = self.policy, lookup_part(self.proposer), list(this.decoding)
        lookups = drafts = list[Draft | None]([None] * len(ids))
        if lookup is not None:
            lookups = self._call_proposer(this, lookup, this.lookup_requests(limits, completion))
        if self.proposer.is_free_of_compute:
            if not any(lookups):
                return lookups
            return policy.select(ids, lookups, this.prompt_tokens, self.proposer.needs_full_tree)
        proposer = cast(TimedProposer, self.proposer)
        limits = [
            0
            if drafts_alone(policy, sequence.id, most, draft, len(ids))
            else self._prefilled_limit(sequence, most)
            for sequence, most, draft in zip(this.decoding.values(), limits, lookups, strict=True)
        ]
        kinds = policy.choose(ids, limits, this.prompt_tokens, proposer.branches)
        if any(kinds):
            blocks, mode = scheduler.manager.readable, self.verification
            requests = this.model_requests(kinds, limits, completion, blocks, mode, proposer, policy)
            drafting = [(request.sequence, request.tokens) for request in requests if request.depth]
            this.prefills = any(self._new_tokens(*pair) > CATCH_UP for pair in drafting)
            self._prefilled |= {sequence: len(tokens) for sequence, tokens in drafting}
            drafts = this.runnable(self._call_proposer(this, proposer, requests), kinds, requests, proposer)
        if lookup is not None:
            return combined(policy, ids, limits, drafts, lookups, this.prompt_tokens)
        return policy.trim(ids, drafts, this.prompt_tokens) if proposer.trees else drafts

    def _prefilled_limit(self, sequence: Running, most: int) -> int:
        """``most`` where the draft model has prefilled the sequence or should, else 0."""
        new, remaining = self._new_tokens(sequence.id, sequence.tokens), sequence.limit - len(sequence.tokens)
        pays = not most or new <= CATCH_UP or self.policy.prefill_pays(sequence.id, most, new, remaining)
        return most if pays else 0

    def _new_tokens(self, sequence: int, tokens: Sequence[int]) -> int:
        """Tokens that a draft model has not run."""
        return len(tokens) - self._prefilled.get(sequence, 0)

    def _call_proposer(
        self, this: SpeculativePass, proposer: Proposer, requests: Sequence[DraftRequest]
    ) -> list[Draft | None]:
        """The proposer's drafts; none where the rules of a completion fail: its token is sampled later."""
        try:
            return proposer.propose(requests)
        except Exception:
            if not any(rules.failed for rules in this.rules):
                raise
            return [None] * len(requests)

    def _stop(self, failure: Exception) -> None:
        """Nothing is drafted from now on, and the proposer's memory of all sequences is released."""
        self.failure, self.state, self._pass = failure, PassState.PLAIN, None
        for sequence in self._running:
            with suppress(Exception):
                self.proposer.forget(sequence)
        logger.error("speculation is off: %s failed: %s", self.proposer.name, failure, exc_info=failure)
