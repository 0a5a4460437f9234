"""Continuous batching with one rule.

    Each step every sequence gets min(tokens it wants, budget left): those that decode first, then those whose
    prompt is being computed, both in the order of priority and arrival; then the waiting ones.

Out of blocks, the last running sequence (worst priority, latest arrival) is preempted by recompute: it
loses its blocks, which stay reusable where they were published, and goes to the front of the waiting ones
of its priority.

    schedule → runner.run(step) → commit → the engine draws tokens → append, or finish

Source: vLLM V1 (``v1/core/sched/scheduler.py``). Differs: decoding sequences go before prompts, so a long
    prompt does
not hold up texts that are being read; n texts share their prompt's blocks up to the last token
(copy-on-write).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence as Tokens
from typing import Protocol

from attar.runtime.admission import Limits, most_tokens, refuse_if_busy
from attar.runtime.batch import Output, divide, make_step
from attar.runtime.kv.manager import Manager
from attar.runtime.kv.table import Packing
from attar.runtime.queue import Queue
from attar.runtime.sequence import Request, Sequence, State
from attar.runtime.step import Span, Step


class Memory(Protocol):
    """What a runner keeps per sequence; a Runner is one."""

    def fork(self, sequence: int, child: int) -> None: ...
    def forget(self, sequence: int) -> None: ...


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
        manager: Manager,
        limits: Limits | None = None,
        *,
        context: int | None = None,
        memory: Memory | None = None,
    ) -> None:
        self.manager, self.limits, self.context = manager, limits or Limits(), context
        self.running: list[Sequence] = []  # in the order of Sequence.order
        self.waiting = Queue(manager, self.limits)
        self.preemptions = 0
        self._memory = memory
        self._live: dict[int, Sequence] = {}
        self._ended: list[Sequence] = []
        self._next = 0

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
        sequence = Sequence(self._id(), request, limit, list(request.prompt), width=request.n)
        self._live[sequence.id] = sequence
        self.waiting.add(sequence)
        return sequence

    def cancel(self, request: str, reason: str = "cancelled") -> list[Sequence]:
        """Finishes what is left of a request; the sequences it was. An unknown request is none."""
        found = [sequence for sequence in self._live.values() if sequence.request.id == request]
        for sequence in found:
            self.finish(sequence, reason)
        return found

    def finish(self, sequence: Sequence, reason: str) -> None:
        """Ends a sequence and gives back what it holds; a finished one stays as it is."""
        if sequence.finished:
            return
        self._leave(sequence)
        del self._live[sequence.id]
        sequence.state, sequence.reason = State.FINISHED, reason

    def ended(self) -> list[Sequence]:
        """Sequences that ``schedule`` finished by itself since the last call: "deadline" or "capacity"."""
        ended, self._ended = self._ended, []
        return ended

    def schedule(self, now: float = 0.0) -> Step | None:
        """The next step; None where nothing can run.

        Args:
            now: seconds on the clock of the requests' arrivals and deadlines.
        """
        self._expire(now)
        for sequence in self.running:
            del sequence.drafts[max(sequence.limit - len(sequence.tokens) - 1, 0) :]
        before, left = self.preemptions, self.limits.step_tokens
        shares = divide(self.running, left, self.limits.chunk)
        planned = []
        for sequence in list(self.running):
            share = shares[sequence.id]
            if share and sequence.state is State.RUNNING and self._reserve(sequence, share):
                planned.append((sequence, share))
                left -= share
        if self.preemptions == before or not self.running:
            planned += self._admit(left, now)
        return make_step(planned, self.manager) if planned else None

    def commit(self, step: Step) -> list[Output]:
        """Notes that a step was run: full blocks are published, finished prompts fork into their n texts."""
        outputs: list[Output] = []
        row = 0
        for span in step.spans:
            rows, row = range(row, row + span.wants), row + span.wants
            sequence = self._live.get(span.sequence)
            if sequence is not None:
                outputs += self._computed(sequence, span, rows)
        return outputs

    def append(self, sequence: Sequence, tokens: Tokens[int]) -> None:
        """New tokens of a running sequence: accepted drafts, if there were any, and the token drawn behind
        them.

        Places of rejected drafts are taken back.
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
        """Another running sequence with the same tokens and blocks (n texts, beams)."""
        assert sequence.state is State.RUNNING, f"sequence {sequence.id} does not run, and cannot fork"
        child = Sequence(
            self._id(),
            sequence.request,
            sequence.limit,
            list(sequence.tokens),
            sequence.index if index is None else index,
            computed=sequence.computed,
            state=State.RUNNING,
            scored=sequence.scored,
        )
        self.manager.fork(sequence.id, child.id)
        if self._memory is not None:
            self._memory.fork(sequence.id, child.id)
        self._live[child.id] = child
        insort(self.running, child, key=_order)
        return child

    def pack(self, sequence: Sequence, kept: int) -> Packing | None:
        """Eviction keeps ``kept`` places of a sequence; None where even preempting others makes no room."""
        while (packing := self.manager.pack(sequence.id, kept)) is None:
            if self.running[-1] is sequence:
                return None
            self._preempt(self.running[-1])
        return packing

    def abandon(self, step: Step) -> None:
        """A step failed: what it would have written is not there, so its sequences begin again."""
        for span in step.spans:
            if span.sequence in self._live:
                self._preempt(self._live[span.sequence])

    def check(self) -> None:
        """Raises AssertionError naming what is wrong; where nothing runs, no sequence holds a block."""
        self.manager.check()
        assert self.running == sorted(self.running, key=_order), "running sequences are out of order"
        self.waiting.check()
        known = sorted(sequence.id for sequence in (*self.running, *self.waiting))
        assert known == sorted(self._live), f"sequences {known} run or wait, {sorted(self._live)} live"
        for sequence in self._live.values():
            sequence.check()
        tables, ids = self.manager.sequences, [sequence.id for sequence in self.running]
        assert sorted(tables) == sorted(ids), f"sequences {tables} have tables, {ids} run"
        for sequence in self.running:
            table = self.manager.table(sequence.id)
            assert table.packed or table.length == sequence.computed, (
                f"table of {sequence.id}: {table.length} places"
            )
        assert self.running or self.manager.free + self.manager.cached == self.manager.capacity, (
            "a block leaked"
        )

    def _expire(self, now: float) -> None:
        late = [
            s for s in self._live.values() if s.request.deadline is not None and s.request.deadline <= now
        ]
        for sequence in late:
            self.finish(sequence, "deadline")
        self._ended += late

    def _reserve(self, sequence: Sequence, count: int) -> bool:
        """Makes room for a running sequence's next tokens, if need be by preempting the last ones."""
        while not self.manager.reserve(sequence.id, count):
            victim = self.running[-1]
            if len(self.running) == 1:
                self.finish(sequence, "capacity")
                self._ended.append(sequence)
                return False
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _admit(self, left: int, now: float) -> list[tuple[Sequence, int]]:
        """Waiting sequences that start now, each with its tokens of this step.

        The first one without room stops the rest: nobody overtakes it for being small.
        """
        planned = []
        width = sum(sequence.width for sequence in self.running)
        for sequence in self.waiting.ordered(now):
            width += sequence.width
            if left < 1 or width > self.limits.sequences:
                break
            share = self._start(sequence, left, spare=width if self.running else 0)
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
        if not manager.reserve(sequence.id, share):
            manager.release(sequence.id)
            return 0
        self.waiting.remove(sequence)
        sequence.state, sequence.computed = State.RUNNING, found
        insort(self.running, sequence, key=_order)
        return share

    def _computed(self, sequence: Sequence, span: Span, rows: range) -> list[Output]:
        self.manager.commit(sequence.id, span.count, sequence.tokens)
        sequence.computed = span.stop
        if sequence.request.prompt_logits:
            sequence.scored = max(sequence.scored, min(span.stop, sequence.prompt))
        draws = 1 + len(sequence.drafts) if span.stop >= len(sequence.tokens) else 0
        outputs = [Output(sequence, rows, span.stop - span.wants, draws)] if rows else []
        if sequence.width > 1 and sequence.computed >= sequence.prompt:
            for index in range(1, sequence.width):
                outputs.append(Output(self.fork(sequence, index), rows[-1:], span.stop - 1, 1))
            sequence.width = 1
        return outputs

    def _preempt(self, sequence: Sequence) -> None:
        """Takes a running sequence's blocks; it begins again, at the front of its priority."""
        self._leave(sequence)
        sequence.state, sequence.preempted = State.WAITING, True
        self.waiting.add(sequence)
        self.preemptions += 1

    def _leave(self, sequence: Sequence) -> None:
        """The one place where a sequence gives back what it holds."""
        if sequence.state is State.RUNNING:
            self.running.remove(sequence)
            self.manager.release(sequence.id)
            if self._memory is not None:
                self._memory.forget(sequence.id)
        else:
            self.waiting.remove(sequence)
        sequence.computed, sequence.drafts, sequence.parents = 0, [], None

    def _id(self) -> int:
        self._next += 1
        return self._next - 1


def _order(sequence: Sequence) -> tuple[int, float, int]:
    return sequence.order
