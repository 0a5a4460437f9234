"""Speculation inside the engine: joins a proposer, the chooser and the verifier with the loop.

    schedule    certain tokens and prompts are planned → plan(): drafts for the sequences that decode, in what
                they leave of the step's tokens and of the free blocks; so drafts hold up no prompt and
                preempt nobody
    run, commit
    draw        judge(): which drafts of a sequence are taken, and the token behind
    note        proposer and chooser learn from the pass
    append      the accepted path's places are moved together, the rest is taken back

Sequences are followed by looking at who runs: one that ended, or lost its blocks, is forgotten before the
next drafts are made. Texts fork with their first token, before anything is drafted for them.

A proposer that breaks costs no text: from then on nothing is drafted, and ``failure`` says why.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from attar.errors import NumericsError
from attar.runtime.batch import Output, Planned
from attar.runtime.drawing import Drawn
from attar.runtime.scheduler import Scheduler
from attar.runtime.sequence import Sequence as Running
from attar.runtime.speculate.choose import Chooser
from attar.runtime.speculate.counts import Counts
from attar.runtime.speculate.draft import Draft
from attar.runtime.speculate.nodes import Nodes
from attar.runtime.speculate.noise import Drafting, Noise
from attar.runtime.speculate.proposer import News, Proposer, Wish
from attar.runtime.speculate.verify import Mode, verify
from attar.runtime.text import Text

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class _Round:
    """One pass: the drafts in it by sequence, who decodes, tokens of prompts, and seconds of drafting."""

    drafts: dict[int, Draft] = field(default_factory=dict)
    decoding: tuple[int, ...] = ()
    beside: int = 0
    drafting: float = 0.0
    began: float = 0.0


class Speculator:
    """Drafts for the sequences of one engine.

    Args:
        proposer: of tokens.
        chooser: of how many.
        most: drafts of one sequence in a pass at most, all branches counted.
        verification: coupled, exact, or None: coupled where the request has a seed, else exact.
        inside: drafts stay before the last place of a block: where full blocks are rounded, all that comes
            behind must be run after that, as without drafts.
        clock: seconds.

    Attributes:
        counts: for metrics.
        failure: what broke the proposer; None where nothing did.
    """

    def __init__(
        self,
        proposer: Proposer,
        chooser: Chooser,
        *,
        most: int,
        verification: Mode | None = None,
        inside: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.proposer, self.chooser, self.most = proposer, chooser, most
        self.verification, self.inside, self.clock = verification, inside, clock
        self.counts = Counts()
        self.failure: Exception | None = None
        self._known: dict[int, None] = {}
        self._round = _Round()
        self._asking = False  # whether the proposer was asked for this pass
        self._observing = 0.0  # seconds of the last pass that no pass has answered for

    def plan(self, planned: Planned, scheduler: Scheduler, text: Callable[[Running], Text]) -> Planned:
        """Gives drafts to sequences of a planned step.

        Args:
            planned: sequences, each with its certain tokens of the step, for which places are reserved.
            text: of a sequence.

        Returns:
            the same with drafts, for which places are reserved too.
        """
        began, self._observing, self._asking = self.clock() - self._observing, 0.0, False
        self.follow(scheduler.running)
        decoding = [each for each, _ in planned if _writes(each)]
        total = sum(share for _, share in planned)
        left = scheduler.limits.step_tokens - total
        beside = total - len(decoding)
        rooms = [self._room(each, scheduler, left) for each in decoding]
        drafts: dict[int, Draft] = {}
        if self.failure is None and any(rooms):
            for each, draft in zip(decoding, self._asked(decoding, rooms, beside, text), strict=True):
                draft = draft and self._fitted(draft, left)
                if draft is not None and scheduler.manager.reserve(each.id, 1 + len(draft)):
                    drafts[each.id], left = draft, left - len(draft)
                    each.drafts = list(draft.tokens)
                    each.parents = None if draft.is_chain else list(draft.parents)
        now = self.clock()
        drafting = now - began if self._asking else 0.0
        self._round = _Round(drafts, tuple(each.id for each in decoding), beside, drafting, now)
        return [(each, share + len(each.drafts)) for each, share in planned]

    def has(self, output: Output) -> bool:
        """Whether a sequence has drafts in the pass."""
        return output.sequence.id in self._round.drafts

    def judge(self, output: Output, logits: Tensor, text: Text) -> Drawn:
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
        verdict = verify(draft, nodes, _noise(sequence, text), self._mode(text))
        self.counts.note(len(draft), len(verdict.path))
        return Drawn(
            verdict.tokens(draft), tuple(rows[row] for row in verdict.rows), verdict.path, len(draft)
        )

    def note(self, outputs: Sequence[Output], drawn: Sequence[Drawn | NumericsError], logits: Tensor) -> None:
        """A pass is over, and its tokens are decided."""
        took = self.clock() - self._round.began
        news = [
            self._news(output, each, logits)
            for output, each in zip(outputs, drawn, strict=True)
            if isinstance(each, Drawn)
        ]
        decoded = [each for each in news if each.sequence in self._round.decoding]
        self.chooser.note(decoded, took, self._round.drafting, self._round.beside)
        began = self.clock()
        if self.failure is None:
            try:
                self.proposer.observe(news)
            except Exception as failure:
                self._broken(failure)
        self._observing = self.clock() - began

    def follow(self, running: Sequence[Running]) -> None:
        """Forgets sequences that run no longer."""
        now = {each.id: None for each in running}
        for gone in [each for each in self._known if each not in now]:
            self.chooser.forget(gone)
            self.proposer.forget(gone)
        self._known = now

    def _room(self, sequence: Running, scheduler: Scheduler, left: int) -> int:
        """Drafts that a sequence may have."""
        limits, manager = scheduler.limits, scheduler.manager
        longest = min(self.most, left, (limits.chunk or limits.step_tokens) - 1)
        if self.inside:
            longest = min(
                longest, manager.block_size - 2 - manager.table(sequence.id).length % manager.block_size
            )
        return max(min(longest, sequence.limit - len(sequence.tokens) - 1), 0)

    def _asked(
        self, decoding: Sequence[Running], rooms: list[int], beside: int, text: Callable[[Running], Text]
    ) -> list[Draft | None]:
        """What is proposed and pays, for each."""
        ids, nothing = [each.id for each in decoding], [None] * len(decoding)
        free = self.proposer.free
        if free and not self.chooser.open:
            return [*nothing]
        if not free:
            rooms = self.chooser.choose(ids, rooms, beside)
            if not any(rooms):
                return [*nothing]
        self._asking = True
        wishes = [self._wish(each, most, text) for each, most in zip(decoding, rooms, strict=True)]
        try:
            drafts = self.proposer.propose(wishes)
        except Exception as failure:
            self._broken(failure)
            return [*nothing]
        if not free:
            return drafts
        pick = self.chooser.whole if self.proposer.looks else self.chooser.prune
        return pick(ids, drafts, beside)

    def _wish(self, sequence: Running, most: int, text: Callable[[Running], Text]) -> Wish:
        if not self.proposer.draws:
            return Wish(sequence.id, sequence.tokens, most, sequence.request.salt)
        rules = text(sequence)
        exact = self._mode(rules) == "exact" and not rules.params.greedy
        shown = Drafting(rules, _noise(sequence, rules)) if exact else rules
        return Wish(sequence.id, sequence.tokens, most, sequence.request.salt, shown)

    def _fitted(self, draft: Draft, left: int) -> Draft | None:
        """What the step has room for; where the proposer learns from its whole tree, all or nothing."""
        return draft if len(draft) <= left else None if self.proposer.looks else draft.cut(left)

    def _mode(self, text: Text) -> Mode:
        return self.verification or ("exact" if text.params.seed is None else "coupled")

    def _news(self, output: Output, drawn: Drawn, logits: Tensor) -> News:
        sequence = output.sequence.id
        draft = self._round.drafts.get(sequence)
        choices: list[int] = []
        if draft is not None and self.proposer.looks:
            rows = output.rows[-output.draws :]
            choices = logits[rows.start : rows.stop].argmax(-1).tolist()
        return News(sequence, draft, drawn.path, drawn.tokens, choices)

    def _broken(self, failure: Exception) -> None:
        self.failure = failure
        logger.error("speculation is off: %s failed: %s", self.proposer.name, failure, exc_info=failure)


def _writes(sequence: Running) -> bool:
    """Whether its next token alone is to come: not a prompt, nor a text that will fork."""
    return sequence.decodes and sequence.width == 1 and len(sequence.tokens) > sequence.prompt


def _noise(sequence: Running, text: Text) -> Noise:
    return Noise(text.seed, text.sample, len(sequence.tokens))
