"""The interface between the engine and every proposer of drafts.

    propose(requests) → a draft or None for each      before the pass, for all sequences that decode in it
    observe(feedback)                                 after the pass: accepted drafts, new tokens
    forget(sequence)                                  a sequence ended

A proposer cannot change the output: verification is exact, and a bad draft only costs time. It keeps its own
state per sequence, and updates it from the tokens: a request has all of them, also those decoded without a
proposal or before a preemption.

A ``free`` proposer (n-grams, lookahead) takes almost no time: it proposes all it has, the policy keeps the
nodes that pay (``DraftPolicy.select``). Other proposers run a model for every draft: the policy first chooses
how many (``DraftPolicy.choose``), passed in ``most``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
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
    """

    sequence: int
    tokens: Sequence[int]
    most: int
    salt: str = ""
    rules: SamplingRules | None = None
    siblings: bool = False
    blocks: Sequence[int] = ()


@dataclass(frozen=True)
class DraftFeedback:
    """The result of a pass for one sequence.

    Args:
        draft: what was verified; None where the token was decoded without drafts.
        path: indices of the accepted drafts, 1..n, in order.
        tokens: the new tokens: the accepted drafts and the one after them.
        choices: the target's likeliest token after the last decided token (0) and after each draft (1..n);
            empty where the proposer does not need them.
    """

    sequence: int
    draft: Draft | None
    path: tuple[int, ...]
    tokens: Sequence[int]
    choices: Sequence[int] = ()


class Proposer(Protocol):
    """Proposes draft tokens."""

    @property
    def name(self) -> str:
        """For logs and metrics: "ngram", "lookahead", "self", or the draft model's name."""
        ...

    @property
    def free(self) -> bool:
        """Whether drafting takes almost no time."""
        ...

    @property
    def draws(self) -> bool:
        """Whether drafts are drawn from a q that comes with them; else they are fixed."""
        ...

    @property
    def learns_tree(self) -> bool:
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
