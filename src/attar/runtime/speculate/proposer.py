"""What every proposer of drafts is to the engine.

    propose(wishes) → a draft or None for each        before the pass, all sequences that decode at once
    observe(news)                                     after the pass: what was accepted, and what was seen
    fork(sequence, child), forget(sequence)           as with a runner

A proposer guesses; it never decides. Whatever it returns, the verifier makes the text exact: a bad guess
costs time only. It holds what it needs per sequence and follows a sequence's tokens by itself: a wish
always brings all of them, also those that came while nothing was proposed, or after a preemption.

Two kinds are told apart by ``free``. A free proposer (n-grams, a window) costs next to nothing to ask: it is
asked for as much as it has, and the chooser then keeps the nodes that pay (``Chooser.prune``). The others run
a model for every token: the chooser says how many before they are asked (``Chooser.choose``), in ``most``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from attar.runtime.speculate.draft import Draft

if TYPE_CHECKING:
    from attar.runtime.sampling.warp import SamplingRow


class SamplingRules(Protocol):
    """What decides a text's next tokens; ``attar.runtime.completion.Completion`` is one."""

    def row(self, drafted: Sequence[int] = ()) -> SamplingRow:
        """The warps of the token after ``drafted``."""
        ...

    def key(self, ahead: int = 0) -> int:
        """Its noise, ``ahead`` places behind the next."""
        ...


@dataclass(frozen=True)
class DraftRequest:
    """A sequence that would like drafts.

    Args:
        sequence: its id. tokens: all of them so far, the last one certain, but not yet run by the target.
        Not kept, not changed. most: drafts at most, all branches counted; 0 asks for none. salt: the
        tenant; what is learnt from a text is used only inside its salt. rules: warps and noise of its next
        tokens; None where the proposer has no q. wide: siblings are welcome beside the drafts of a model.
    """

    sequence: int
    tokens: Sequence[int]
    most: int
    salt: str = ""
    rules: SamplingRules | None = None
    wide: bool = False


@dataclass(frozen=True)
class DraftFeedback:
    """What a pass has shown of a sequence.

    Args:
        sequence: its id.
        draft: what was verified; None where the token was decoded plainly.
        path: indices of the accepted drafts, 1..n, in order.
        tokens: the new tokens: the accepted drafts and the one behind.
        choices: the target's likeliest token after the last certain token (0) and after each draft (1..n);
            empty where the proposer does not look at them.
    """

    sequence: int
    draft: Draft | None
    path: tuple[int, ...]
    tokens: Sequence[int]
    choices: Sequence[int] = ()


class Proposer(Protocol):
    """Proposes tokens, with no say in which are taken."""

    @property
    def name(self) -> str:
        """For people and metrics: "ngram", "lookahead", "self", or the draft model's name."""
        ...

    @property
    def free(self) -> bool:
        """Whether drafts cost no time worth counting."""
        ...

    @property
    def draws(self) -> bool:
        """Whether drafts are drawn from a q that comes with them; else they are fixed."""
        ...

    @property
    def looks(self) -> bool:
        """Whether ``observe`` needs the choices of every row of the tree."""
        ...

    def propose(self, wishes: Sequence[DraftRequest]) -> list[Draft | None]:
        """A draft for each wish, in order; None where there is nothing to say."""
        ...

    def observe(self, news: Sequence[DraftFeedback]) -> None:
        """A pass is over; once per sequence that had a row in it."""
        ...

    def fork(self, sequence: int, child: int) -> None:
        """``child`` begins with the tokens of ``sequence``. Unknown is fine."""
        ...

    def forget(self, sequence: int) -> None:
        """A sequence ended. Unknown is fine."""
        ...
