"""One pass of speculation: what is in it, and what is asked for its sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from attar.runtime.completion import Completion
from attar.runtime.sampling.warp import SamplingRow
from attar.runtime.scheduler import Scheduler
from attar.runtime.sequence import Sequence as Running
from attar.runtime.speculate.draft import Draft
from attar.runtime.speculate.noise import DraftRules, Noise
from attar.runtime.speculate.proposer import DraftRequest, Proposer, SamplingRules
from attar.runtime.speculate.verify import VerificationMode


@dataclass(frozen=True, eq=False)
class SpeculativePass:
    """A pass.

    Args:
        drafts: in it, by sequence.
        decoding: the sequences that write.
        beside: tokens of prompts.
        drafting: seconds that asking took; 0 where nobody was asked.
        reading: whether a draft model met a text for the first time, and so read all of it.
        began: when it began, on the speculator's clock.
    """

    drafts: dict[int, Draft] = field(default_factory=dict)
    decoding: tuple[int, ...] = ()
    beside: int = 0
    drafting: float = 0.0
    reading: bool = False
    began: float = 0.0


RESTING = SpeculativePass()
"""A pass as without speculation."""


def decodes_one(sequence: Running) -> bool:
    """Whether its next token alone is to come: not a prompt, nor a text that will fork."""
    return sequence.decodes and sequence.width == 1 and len(sequence.tokens) > sequence.prompt


def draft_limit(sequence: Running, scheduler: Scheduler, most: int, inside: bool) -> int:
    """Drafts that a sequence may have, ``most`` at most; see ``Speculator.plan`` for ``inside``."""
    limits, manager = scheduler.limits, scheduler.manager
    longest = min(most, (limits.chunk or limits.step_tokens) - 1, sequence.limit - len(sequence.tokens) - 1)
    if inside:
        used = manager.table(sequence.id).length % manager.block_size
        longest = min(longest, manager.block_size - 2 - used)
    return max(longest, 0)


def mode_of(text: Completion, verification: VerificationMode | None) -> VerificationMode:
    """As asked for; else coupled where the request has a seed, and exact where it has none."""
    return verification or ("exact" if text.params.seed is None else "coupled")


def noise_of(sequence: Running, text: Completion) -> Noise:
    """The sequence's in this round."""
    return Noise(text.seed, text.sample, len(sequence.tokens))


@dataclass(eq=False)
class GuardedRules:
    """A text's rules as a proposer gets them: where they fail, that is the text's fault.

    Args:
        text: whose; what is wrong with it comes out when its token is drawn.
        failed: whether they did.
    """

    text: Completion
    failed: bool = False

    def row(self, drafted: Sequence[int] = ()) -> SamplingRow:
        """The warps of the token after ``drafted``."""
        try:
            return self.text.row(drafted)
        except Exception:
            self.failed = True
            raise

    def key(self, ahead: int = 0) -> int:
        """Its noise, ``ahead`` places behind the next."""
        return self.text.key(ahead)


def draft_request(
    sequence: Running, most: int, proposer: Proposer, rules: GuardedRules, mode: VerificationMode, wide: bool
) -> DraftRequest:
    """What a proposer is asked for a sequence; rules only where it draws."""
    shown: SamplingRules | None = None
    if proposer.draws:
        exact = mode == "exact" and not rules.text.params.greedy
        shown = DraftRules(rules, noise_of(sequence, rules.text)) if exact else rules
    return DraftRequest(sequence.id, sequence.tokens, most, sequence.request.salt, shown, wide)
