"""One pass of speculation: the requests to the proposer, its drafts, what became of them, and counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from attar.runtime.completion import Completion
from attar.runtime.sampling.sampled_tokens import SampledTokens
from attar.runtime.sampling.warp import SamplingRow
from attar.runtime.scheduler import Planned, Scheduler, StepOutput
from attar.runtime.sequence import Sequence as Running
from attar.runtime.speculate.draft import LEVELS, Draft
from attar.runtime.speculate.noise import DraftRules, Noise
from attar.runtime.speculate.policy import DraftPolicy
from attar.runtime.speculate.proposer import DraftFeedback, DraftRequest, SamplingRules, TimedProposer
from attar.runtime.speculate.siblings import cut_siblings
from attar.runtime.speculate.verify import VerificationMode

SIBLINGS_EVERY = 4  # passes between two with siblings, where none pay: their rates are learnt from them
CompletionOf = Callable[[Running], Completion]


@dataclass(eq=False, slots=True)
class SpeculativePass:
    """A pass of the target that is measured, from its plan on.

    Attributes:
        decoding: the sequences that decode, by id.
        prompt_tokens: of the pass.
        left: tokens that it has room for.
        called: whether the proposer was called.
        drafts: by sequence.
        uncut: by sequence, the drafts of a model with all their siblings.
        stopped_by_confidence: by sequence, as :class:`DraftFeedback` has it.
        rules: of the completions that a model drafts for.
        prefills: whether a draft model prefilled a sequence.
        steps: levels of the deepest draft of a model; 0: none was run.
        drafting: seconds of the speculator since the last measured pass.
        began: start of the pass on the speculator's clock.
    """

    decoding: Mapping[int, Running]
    prompt_tokens: int
    left: int
    called: bool = False
    drafts: dict[int, Draft] = field(default_factory=dict)
    uncut: dict[int, Draft | None] = field(default_factory=dict)
    stopped_by_confidence: dict[int, int] = field(default_factory=dict)
    rules: list[GuardedRules] = field(default_factory=list)
    prefills: bool = False
    steps: int = 0
    drafting: float = 0.0
    began: float = 0.0

    @classmethod
    def of(cls, planned: Planned, step_tokens: int) -> SpeculativePass:
        """Of a plan, in a step of at most ``step_tokens``."""
        decoding = {sequence.id: sequence for sequence, _ in planned if decodes_one(sequence)}
        total = sum([share for _, share in planned])
        return cls(decoding, total - len(decoding), step_tokens - total)

    def limits(
        self, most: int, scheduler: Scheduler, completion: CompletionOf, inside: bool = False
    ) -> list[int]:
        """Drafts that each sequence may have, at most ``most``; ``inside``: see ``Speculator.add_drafts``."""
        step, manager = scheduler.limits, scheduler.manager
        most = min(most, self.left, (step.chunk or step.step_tokens) - 1)
        limits = []
        for sequence in self.decoding.values():
            longest = min(most, sequence.limit - len(sequence.tokens) - 1)
            if inside:
                used = manager.table(sequence.id).length % manager.block_size
                longest = min(longest, manager.block_size - 2 - used)
            limits.append(max(longest, 0) if completion(sequence).drafts else 0)
        return limits

    def lookup_requests(self, limits: Sequence[int], completion: CompletionOf) -> list[DraftRequest]:
        """Requests to a proposer that looks at the text."""
        pairs = zip(self.decoding.values(), limits, strict=True)
        return [
            DraftRequest(sequence.id, sequence.tokens, most, sequence.request.salt, completion(sequence))
            for sequence, most in pairs
        ]

    def model_requests(
        self,
        kinds: Sequence[set[int]],
        limits: Sequence[int],
        completion: CompletionOf,
        blocks: Callable[[int], Sequence[int]],
        verification: VerificationMode | None,
        proposer: TimedProposer,
        policy: DraftPolicy,
    ) -> list[DraftRequest]:
        """Requests to a proposer that runs a model, for drafts of these kinds. Trees and confident chains may
        have as many drafts as the limit."""
        pay = any(max(chosen, default=0) >= LEVELS for chosen in kinds)
        siblings = pay or policy.passes % SIBLINGS_EVERY == 0
        ends_itself = proposer.trees or (proposer.confident and policy.min_chance > 0)
        requests = []
        for sequence, chosen, limit in zip(self.decoding.values(), kinds, limits, strict=True):
            depth, rules = sum(kind < LEVELS for kind in chosen), GuardedRules(completion(sequence))
            self.rules.append(rules)
            mode = mode_of(rules.completion, verification)
            requests.append(
                DraftRequest(
                    sequence.id,
                    sequence.tokens,
                    limit if depth and ends_itself else depth,
                    sequence.request.salt,
                    drawing_rules(sequence, rules, mode) if proposer.samples_from_q else None,
                    siblings,
                    blocks(sequence.id),
                    depth,
                    policy.min_chance,
                )
            )
        return requests

    def runnable(
        self,
        drafts: Sequence[Draft | None],
        kinds: Sequence[set[int]],
        requests: Sequence[DraftRequest],
        proposer: TimedProposer,
    ) -> list[Draft | None]:
        """The drafts of a model as they may be run: whole trees, chains with the chosen siblings."""
        depths = [0 if draft is None else max(draft.depths) for draft in drafts]
        self.steps = max(depths)
        if proposer.trees:
            return list(drafts)
        if proposer.confident and requests[0].min_chance > 0:
            rows = zip(requests, depths, strict=True)
            self.stopped_by_confidence = {
                request.sequence: depth for request, depth in rows if depth < request.most
            }
        self.uncut = {request.sequence: draft for request, draft in zip(requests, drafts, strict=True)}
        return [draft and cut_siblings(draft, chosen) for draft, chosen in zip(drafts, kinds, strict=True)]

    def assign(
        self, drafts: Sequence[Draft | None], scheduler: Scheduler, complete: bool, chains: bool = False
    ) -> None:
        """Give the sequences their drafts, as far as the step has room for them; ``complete``: whole drafts
        or none, for a proposer that learns from its tree; ``chains``: of a tree the best chain."""
        for sequence, draft in zip(self.decoding.values(), drafts, strict=True):
            if chains and draft is not None:
                draft = draft.first_chain()
            if draft is not None and len(draft) > self.left:
                draft = None if complete else draft.cut(self.left)
            if draft is not None and _reserved(sequence, scheduler, 1 + len(draft)):
                self.drafts[sequence.id] = draft
                self.left -= len(draft)
                sequence.drafts = list(draft.tokens)
                sequence.parents = None if draft.is_chain else list(draft.parents)

    def feedback(
        self, outputs: Sequence[StepOutput], drawn: Sequence[SampledTokens | Exception]
    ) -> list[DraftFeedback]:
        """The results of the sequences that decoded."""
        pairs = zip([output.sequence for output in outputs], drawn, strict=True)
        return [
            DraftFeedback(
                sequence.id,
                self.drafts.get(sequence.id),
                sampled.path,
                sampled.tokens,
                stopped_by_confidence=self.stopped_by_confidence.get(sequence.id),
            )
            for sequence, sampled in pairs
            if sequence.id in self.decoding and isinstance(sampled, SampledTokens)
        ]


def _reserved(sequence: Running, scheduler: Scheduler, count: int) -> bool:
    """Whether slots are reserved. An error is raised again when the scheduler reserves the slots of the
    sequence, and ends its request there."""
    try:
        return scheduler.manager.reserve(sequence.id, count)
    except Exception:
        return False


def decodes_one(sequence: Running) -> bool:
    """Whether it decodes its next token: it is not prefilling, and will not fork."""
    return (
        len(sequence.request.prompt) <= sequence.computed == len(sequence.tokens) - 1 and sequence.width == 1
    )


def prompts_read(planned: Planned, completion: Callable[[Running], Completion]) -> list[DraftRequest]:
    """The sequences whose prompts the pass reads, and for which drafts are wanted once it is read."""
    return [
        DraftRequest(sequence.id, sequence.tokens, 0, sequence.request.salt, completion(sequence))
        for sequence, _ in planned
        if sequence.computed < len(sequence.request.prompt)
        and sequence.width == 1
        and sequence.limit - len(sequence.tokens) > 2
    ]


def add_choices(feedback: Sequence[DraftFeedback], outputs: Sequence[StepOutput], logits: Tensor) -> None:
    """Add the target's likeliest token in every row of a draft, for a proposer that learns from them."""
    rows = {output.sequence.id: output.rows[-output.draws :] for output in outputs}
    for result in feedback:
        if result.draft is not None:
            span = rows[result.sequence]
            result.choices = logits[span.start : span.stop].argmax(-1).tolist()


def mode_of(completion: Completion, verification: VerificationMode | None) -> VerificationMode:
    """As configured; else coupled for a request with a seed, and exact without one."""
    return verification or ("exact" if completion.params.seed is None else "coupled")


def noise_of(sequence: Running, completion: Completion) -> Noise:
    """The noise of the sequence in this round."""
    return Noise(completion.seed, completion.sample, len(sequence.tokens))


@dataclass(eq=False)
class GuardedRules:
    """The rules of a completion for a proposer; records whether an error came from them.

    Args:
        completion: its rules; their error is raised again when its token is sampled.
        failed: whether they raised an error.
    """

    completion: Completion
    failed: bool = False

    def row(self, drafted: Sequence[int] = ()) -> SamplingRow:
        """The warps of the token after ``drafted``."""
        try:
            return self.completion.row(drafted)
        except Exception:
            self.failed = True
            raise

    def key(self, ahead: int = 0) -> int:
        """The noise key ``ahead`` positions after the next."""
        return self.completion.key(ahead)


def drawing_rules(sequence: Running, rules: GuardedRules, mode: VerificationMode) -> SamplingRules:
    """The rules by which drafts of a sequence are drawn."""
    exact = mode == "exact" and not rules.completion.params.greedy
    return DraftRules(rules, noise_of(sequence, rules.completion)) if exact else rules


@dataclass
class SpeculationCounts:
    """Counts since the start.

    Attributes:
        accepted_at: accepted tokens at each position of a draft, from the first.
        lossy: accepted tokens that plain decoding might not give (typical acceptance).
    """

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)
    lossy: int = 0

    def copy(self) -> SpeculationCounts:
        """A snapshot for another thread."""
        return replace(self, accepted_at=list(self.accepted_at))

    def note(self, drafted: int, accepted: int, lossy: bool = False) -> None:
        """Count a verified draft."""
        self.lossy += accepted * lossy
        self.drafts += 1
        self.drafted += drafted
        self.accepted += accepted
        self.accepted_at += [0] * (accepted - len(self.accepted_at))
        for position in range(accepted):
            self.accepted_at[position] += 1
