"""One pass of speculation: its drafts, the requests to the proposer, and the counts for metrics."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from attar.runtime.completion import Completion
from attar.runtime.sampling.warp import SamplingRow
from attar.runtime.scheduler import Planned, Scheduler, StepOutput
from attar.runtime.sequence import Sequence as Running
from attar.runtime.speculate.draft import Draft
from attar.runtime.speculate.noise import DraftRules, Noise
from attar.runtime.speculate.proposer import DraftFeedback, DraftRequest, SamplingRules
from attar.runtime.speculate.verify import VerificationMode


@dataclass(eq=False, slots=True)
class SpeculativePass:
    """A pass of the target with speculation, from its plan on.

    Attributes:
        decoding: the sequences that decode, by id.
        prompt_tokens: of the pass.
        left: tokens that it has room for.
        drafts: by sequence.
        doubted: by sequence, as :class:`DraftFeedback` has it.
        asked: whether the proposer was.
        prefills: whether a draft model prefilled a sequence.
        steps: of the proposer: levels of the deepest draft that it made.
        drafting: seconds of the proposer; 0 if it was not asked.
        began: start of the pass on the speculator's clock.
    """

    decoding: Mapping[int, Running]
    prompt_tokens: int
    left: int
    drafts: dict[int, Draft] = field(default_factory=dict)
    doubted: dict[int, int] = field(default_factory=dict)
    asked: bool = False
    prefills: bool = False
    steps: int = 0
    drafting: float = 0.0
    began: float = 0.0


RESTING = SpeculativePass({}, 0, 0)
"""A pass without speculation."""


def decodes_one(sequence: Running) -> bool:
    """Whether it decodes its next token: it is not prefilling, and will not fork."""
    return (
        len(sequence.request.prompt) <= sequence.computed == len(sequence.tokens) - 1 and sequence.width == 1
    )


def prompts_read(planned: Planned, completion: Callable[[Running], Completion]) -> list[DraftRequest]:
    """The sequences whose prompts the pass reads, and for which drafts are wanted once it is read."""
    return [
        DraftRequest(one.id, one.tokens, 0, one.request.salt, completion(one))
        for one, _ in planned
        if one.computed < len(one.request.prompt) and one.width == 1 and one.limit - len(one.tokens) > 2
    ]


def draft_limits(
    sequences: Collection[Running], scheduler: Scheduler, most: int, inside: bool = False
) -> list[int]:
    """Drafts that each sequence may have, at most ``most``; see ``Speculator.add_drafts`` for ``inside``."""
    limits, manager = scheduler.limits, scheduler.manager
    most = min(most, (limits.chunk or limits.step_tokens) - 1)
    longest = [max(min(most, one.limit - len(one.tokens) - 1), 0) for one in sequences]
    if inside:
        used = [manager.table(one.id).length % manager.block_size for one in sequences]
        rooms = [max(manager.block_size - 2 - slots, 0) for slots in used]
        return [min(pair) for pair in zip(longest, rooms, strict=True)]
    return longest


def add_choices(feedback: Sequence[DraftFeedback], outputs: Sequence[StepOutput], logits: Tensor) -> None:
    """Add the target's likeliest token in every row of a draft, for a proposer that learns from them."""
    rows = {output.sequence.id: output.rows[-output.draws :] for output in outputs}
    for one in feedback:
        if one.draft is not None:
            own = rows[one.sequence]
            one.choices = logits[own.start : own.stop].argmax(-1).tolist()


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
