"""The interface between the engine and every proposer of drafts.

    propose(requests) → a draft or None for each      before the pass, for all sequences that decode in it
    observe(feedback)                                 after the pass: accepted drafts, new tokens
    forget(sequence)                                  a sequence ended

A proposer cannot change the output: verification is exact, and a bad draft only costs time. It keeps its own
state per sequence, and updates it from the tokens: a request has all of them, also those decoded without a
proposal or before a preemption.

A proposer that ``is_free_of_compute`` (suffix trees, lookahead) proposes all it has, the policy keeps
the nodes that pay (``DraftPolicy.select``). A ``TimedProposer`` runs a model: the policy first chooses how
deep its drafts are (``DraftPolicy.choose``), from its times and from what was accepted at each depth:

    a chain            has as many drafts as were chosen
    a confident one    ends before a token whose chance is below ``min_chance``, before it is drawn
    a tree             has as many levels, and the policy keeps the nodes that pay (``DraftPolicy.trim``)

Whether drafts may be dropped after they are made depends on the draft alone: those without q may.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from attar.runtime.speculate.draft import Draft

if TYPE_CHECKING:
    from attar.runtime.sampling.warp import SamplingRow


class SamplingRules(Protocol):
    """How the next tokens of a completion are sampled; implemented by ``completion.Completion``."""

    def row(self, drafted: Sequence[int] = ()) -> SamplingRow:
        """The warps of the token after ``drafted``."""
        ...

    def key(self, ahead: int = 0) -> int:
        """The noise key of the token ``ahead`` positions after the next."""
        ...


@dataclass(slots=True)
class DraftRequest:
    """A sequence to draft for.

    Args:
        sequence: its id.
        tokens: all so far, not to be kept or changed; the target has not run the last one yet.
        most: drafts at most, all branches counted; 0: none.
        salt: the tenant; what is learnt from a sequence is used for its salt only.
        rules: warps and noise of its next tokens; None where drafts are not drawn.
        siblings: whether a draft model adds siblings to its chain.
        blocks: block table of the target; the hidden states of all tokens but the last are in its slots, for
            proposers that read them (``heads/context.py``).
        depth: levels of a tree at most.
        min_chance: chance of being accepted below which a draft does not pay. It was chosen before the round,
            so a drawn draft may end at it if that is decided before the next token is drawn.
    """

    sequence: int
    tokens: Sequence[int]
    most: int
    salt: str = ""
    rules: SamplingRules | None = None
    siblings: bool = False
    blocks: Sequence[int] = ()
    depth: int = 1 << 30
    min_chance: float = 0.0


@dataclass(slots=True)
class DraftFeedback:
    """The result of a pass for one sequence.

    Args:
        draft: what was verified; None where the token was decoded without drafts.
        path: indices of the accepted drafts, 1..n, in order.
        tokens: the new tokens: the accepted drafts and the one after them.
        choices: the target's likeliest token after the last decided token (0) and after each draft (1..n);
            empty where the proposer does not need them.
        stopped_by_confidence: drafts of a confident proposer after which it ended its chain; None: it had as
            many as it may.
    """

    sequence: int
    draft: Draft | None
    path: tuple[int, ...]
    tokens: Sequence[int]
    choices: Sequence[int] = ()
    stopped_by_confidence: int | None = None


@dataclass(frozen=True)
class DraftTimes:
    """Seconds of a proposer that runs a model, by the number of sequences, measured when it is loaded.

        t(K) = begin + K step        a round of drafts, K deep
        reading                      a token that the proposer has not seen, of the last ``window``

    A draft model and EAGLE take a step for each depth; a block drafter has all depths when it has begun.
    """

    step: Mapping[int, float]
    begin: Mapping[int, float] = field(default_factory=dict)
    reading: float = 0.0
    window: float = math.inf


class Proposer(Protocol):
    """Proposes draft tokens."""

    @property
    def name(self) -> str:
        """For logs and metrics: "suffix", "lookahead", "self", or the draft model's name."""
        ...

    @property
    def is_free_of_compute(self) -> bool:
        """Whether drafting takes almost no time."""
        ...

    @property
    def samples_from_q(self) -> bool:
        """Whether drafts are drawn from a q that comes with them; else they are fixed."""
        ...

    @property
    def needs_full_tree(self) -> bool:
        """Whether it learns from its whole tree: ``observe`` needs the choices of every row."""
        ...

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        """A draft for each request, in order; None where there is none."""
        ...

    def observe(self, feedback: Sequence[DraftFeedback]) -> None:
        """After a pass, for every sequence that had a row in it."""
        ...

    def forget(self, sequence: int) -> None:
        """A sequence ended; unknown ids are ignored."""
        ...


class LookupProposer(Proposer, Protocol):
    """A proposer that says whether it has a draft in a third of the time of a proposal."""

    def has_draft(self, sequence: int, tokens: Sequence[int], most: int) -> bool:
        """Whether something would be proposed for a sequence; True for one that was not asked for yet."""
        ...


class TimedProposer(Proposer, Protocol):
    """A proposer that is not free."""

    @property
    def most(self) -> int:
        """Drafts of a sequence in a pass at most, where the settings do not say."""
        ...

    @property
    def branches(self) -> int:
        """Drafts after one token at most, for a chain with siblings; else 1."""
        ...

    @property
    def confident(self) -> bool:
        """Whether its chains end by themselves, at ``least``."""
        ...

    @property
    def trees(self) -> bool:
        """Whether its drafts are trees: the policy chooses their levels before, and nodes of them after.
        Kinds of group 0 (``draft.py``) are those of the chain of best nodes, by depth."""
        ...

    def times(self) -> DraftTimes:
        """Measured now, on an empty pool."""
        ...
