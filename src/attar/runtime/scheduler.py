"""Continuous batching with one rule.

    Each step every sequence gets min(tokens it wants, budget left): those that decode first, then those whose
    prompt is being computed, both in the order of priority and arrival; then the waiting ones.

Out of blocks, the last running sequence (worst priority, latest arrival) is preempted: it loses its blocks,
which stay reusable where they were published, and waits at the front of its priority.

    schedule → runner.run(step) → commit → the engine draws tokens → append, or finish

An error in the memory of one sequence ends its request (``fail``) and no other.

Source: vLLM V1 (``v1/core/sched/scheduler.py``). Differs: decoding sequences go before prompts, which then
hold up no text that is being read; n texts share their prompt's blocks up to the last token.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Tokens
from contextlib import ExitStack

from attar.runtime.admission import Limits, most_tokens, refuse_if_busy
from attar.runtime.batch import PlanDrafts, Planned, StepOutput, divide, make_step
from attar.runtime.kv.block_manager import BlockManager
from attar.runtime.kv.table import Packing
from attar.runtime.roster import Memory, Roster
from attar.runtime.sequence import Request, Sequence, State
from attar.runtime.step import StepInput, TokenSpan


class Scheduler:
    """Waiting and running sequences.

    Args:
        manager: the memory they share.
        limits: how much runs, and how much may wait.
        context: positions of the model; None: no limit.
        memory: is told of forks, and of sequences that ended or lost their blocks; usually the runner.
    """

    def __init__(
        self,
        manager: BlockManager,
        limits: Limits | None = None,
        *,
        context: int | None = None,
        memory: Memory | None = None,
    ) -> None:
        self.manager, self.limits, self.context = manager, limits or Limits(), context
        self._roster = Roster(manager, self.limits, memory)
        self.running, self.waiting = self._roster.running, self._roster.waiting
        self.preemptions = 0
        self._live = self._roster.live
        self._deadlines: list[float] = []  # a heap; those of finished requests stay until their time
        self._ended: list[Sequence] = []

    @property
    def idle(self) -> bool:
        """Whether nothing runs and nothing waits."""
        return not self._live

    def add(self, request: Request) -> Sequence:
        """Puts a request among the waiting ones.

        Raises:
            DataError: the prompt is empty.
            SettingsError: it can never run, even alone.
            BusyError: too much is waiting already.
        """
        limit = most_tokens(request, self.manager, self.limits, self.context)
        refuse_if_busy(request, self.limits, len(self.waiting), self.waiting.prompts)
        if request.deadline is not None:
            heapq.heappush(self._deadlines, request.deadline)
        return self._roster.enter(request, limit)

    def cancel(
        self, request: str, reason: str = "cancelled", failure: Exception | None = None
    ) -> list[Sequence]:
        """Finishes what is left of a request; the sequences it was. An unknown request is none.

        Args:
            failure: what went wrong where the reason is "error".
        """
        found = [sequence for sequence in self._live.values() if sequence.request.id == request]
        for sequence in found:
            sequence.failure = failure
            self.finish(sequence, reason)
        return found

    def finish(self, sequence: Sequence, reason: str) -> None:
        """Ends a sequence and gives back what it holds; a finished one stays as it is."""
        if not sequence.finished:
            self._roster.end(sequence, reason)

    def ended(self) -> list[Sequence]:
        """Sequences that ``schedule`` and ``commit`` finished by themselves since the last call: "deadline",
        "capacity" or "error".
        """
        ended, self._ended = self._ended, []
        return ended

    def schedule(self, now: float = 0.0, drafting: PlanDrafts | None = None) -> StepInput | None:
        """The next step; None where nothing can run.

        Args:
            now: seconds on the clock of the requests' arrivals and deadlines.
            drafting: adds drafts at the end; None: only those that the sequences have.
        """
        self._expire(now)
        for sequence in self.running:
            sequence.cut_drafts(sequence.limit - len(sequence.tokens) - 1)
        before, left = self.preemptions, self.limits.step_tokens
        shares = divide(self.running, left, self.limits.chunk)
        planned: Planned = []
        for sequence in list(self.running):
            share = shares[sequence.id]
            if share and sequence.state is State.RUNNING and self._reserve(sequence, share):
                planned.append((sequence, share))
                left -= share
        if self.preemptions == before or not self.running:
            planned += self._admit(left, now)
        planned = [each for each in planned if not each[0].finished]  # with another text of its request
        if drafting is not None and planned:
            planned = drafting(planned)
        return make_step(planned, self.manager) if planned else None

    def commit(self, step: StepInput) -> list[StepOutput]:
        """Notes that a step was run: full blocks are published, finished prompts fork into their n texts. A
        request whose memory fails is among ``ended`` and has no output.
        """
        outputs: list[StepOutput] = []
        row = 0
        for span in step.spans:
            rows, row = range(row, row + span.wants), row + span.wants
            sequence = self._live.get(span.sequence)
            if sequence is None:
                continue
            try:
                outputs += self._computed(sequence, span, rows)
            except Exception as failure:
                self._fail(sequence, failure)
        return [output for output in outputs if not output.sequence.finished]

    def append(self, sequence: Sequence, tokens: Tokens[int]) -> None:
        """New tokens of a running sequence: accepted drafts, and the token drawn behind them; places of
        rejected drafts are taken back.
        """
        assert sequence.state is State.RUNNING and tokens, f"sequence {sequence.id} cannot grow by {tokens}"
        assert len(sequence.tokens) + len(tokens) <= sequence.limit, f"sequence {sequence.id} is full"
        sequence.tokens += tokens
        rejected = max(sequence.computed - len(sequence.tokens) + 1, 0)
        if rejected:
            sequence.computed -= rejected
            self.manager.truncate(sequence.id, self.manager.table(sequence.id).length - rejected)
        sequence.drafts, sequence.parents = [], None

    def fork(self, sequence: Sequence, index: int | None = None) -> Sequence:
        """Another running sequence with the same tokens and blocks (n texts, beams); none where the runner's
        own memory cannot be forked, and that is raised.
        """
        assert sequence.state is State.RUNNING, f"sequence {sequence.id} does not run, and cannot fork"
        return self._roster.fork(sequence, sequence.index if index is None else index)

    def pack(self, sequence: Sequence, kept: int) -> Packing | None:
        """Eviction keeps ``kept`` places of a sequence; None where even preempting others makes no room."""
        while (packing := self.manager.pack(sequence.id, kept)) is None:
            if self.running[-1] is sequence:
                return None
            self._preempt(self.running[-1])
        return packing

    def abandon(self, step: StepInput) -> None:
        """A step failed: what it would have written is not there, so its sequences begin again."""
        for span in step.spans:
            if span.sequence in self._live:
                self._preempt(self._live[span.sequence])

    def check(self) -> None:
        """Raises AssertionError naming what is wrong; where nothing runs, no sequence holds a block."""
        self._roster.check()

    def _expire(self, now: float) -> None:
        due = False
        while self._deadlines and self._deadlines[0] <= now:
            heapq.heappop(self._deadlines)
            due = True
        for sequence in list(self._live.values()) if due else ():
            if sequence.request.deadline is not None and sequence.request.deadline <= now:
                self.finish(sequence, "deadline")
                self._ended.append(sequence)

    def _reserve(self, sequence: Sequence, count: int) -> bool:
        """Makes room for a running sequence's next tokens, if need be by preempting the last ones."""
        while not self._reserved(sequence, count):
            if sequence.finished:
                return False
            victim = self.running[-1]
            if len(self.running) == 1:
                self.finish(sequence, "capacity")
                self._ended.append(sequence)
                return False
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _reserved(self, sequence: Sequence, count: int) -> bool:
        """Whether the next places are writable; False too where its memory failed."""
        try:
            return self.manager.reserve(sequence.id, count)
        except Exception as failure:
            self._fail(sequence, failure)
            return False

    def _fail(self, sequence: Sequence, failure: Exception) -> None:
        """An error in what a sequence holds: its request ends."""
        self._ended += self.cancel(sequence.request.id, "error", failure)

    def _admit(self, left: int, now: float) -> Planned:
        """Waiting sequences that start now, each with its tokens of this step.

        The first one without room stops the rest: nobody overtakes it for being small.
        """
        planned: Planned = []
        width = sum(sequence.width for sequence in self.running)
        if not self.waiting or left < 1 or width >= self.limits.sequences:
            return planned
        for sequence in self.waiting.ordered(now):
            width += sequence.width
            if left < 1 or width > self.limits.sequences:
                break
            try:
                share = self._start(sequence, left, spare=width if self.running else 0)
            except Exception as failure:
                self._fail(sequence, failure)
                break
            if not share:
                break
            planned.append((sequence, share))
            left -= share
        return planned

    def _start(self, sequence: Sequence, left: int, spare: int) -> int:
        """Makes a waiting sequence run; its tokens of this step, 0 where there is no room.

        ``spare`` blocks, one for each text that runs, stay free, so that nobody is preempted at once.
        """
        request, manager = sequence.request, self.manager
        reuse = not request.prompt_logits
        found = manager.admit(sequence.id, sequence.tokens, request.salt, reuse=reuse, spare=spare)
        if found is None:
            return 0
        share = min(len(sequence.tokens) - found, left, self.limits.chunk or left)
        with ExitStack() as undo:
            undo.callback(manager.release, sequence.id)
            if not manager.reserve(sequence.id, share):
                return 0
            undo.pop_all()
        self._roster.start(sequence, found)
        return share

    def _computed(self, sequence: Sequence, span: TokenSpan, rows: range) -> list[StepOutput]:
        self.manager.commit(sequence.id, span.count, sequence.tokens)
        sequence.computed = span.stop
        if sequence.request.prompt_logits:
            sequence.scored = max(sequence.scored, min(span.stop, sequence.prompt))
        draws = 1 + len(sequence.drafts) if span.stop >= len(sequence.tokens) else 0
        outputs = [StepOutput(sequence, rows, span.stop - span.wants, draws)] if rows else []
        if sequence.width > 1 and sequence.computed >= sequence.prompt:
            outputs += [StepOutput(child, rows[-1:], span.stop - 1, 1) for child in self._texts(sequence)]
        return outputs

    def _texts(self, sequence: Sequence) -> list[Sequence]:
        """The request's other texts, forked: all of them, or none where one fails."""
        children = []
        with ExitStack() as undo:
            for index in range(1, sequence.width):
                children.append(self.fork(sequence, index))
                undo.callback(self.finish, children[-1], "error")
            undo.pop_all()
        sequence.width = 1
        return children

    def _preempt(self, sequence: Sequence) -> None:
        """Takes a running sequence's blocks; it begins again, at the front of its priority."""
        self._roster.send_back(sequence)
        self.preemptions += 1
