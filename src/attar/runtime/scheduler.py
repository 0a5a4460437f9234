"""Continuous batching with one rule.

    Each step every sequence gets min(tokens it needs, budget left): decoding sequences first, then those in
    prefill, both in the order of priority and arrival; then the waiting ones.

Out of blocks, the last running sequence (lowest priority, latest arrival) is preempted: it loses its blocks,
which stay reusable where they were published, and waits at the front of its priority.

    plan → build → runner.run(step) → commit → the engine samples tokens → append, or finish

Between plan and build draft tokens may be added to sequences of the plan (``speculate/speculator.py``).

A sequence waits (``waiting``) or runs on blocks (``running``). An error in the cache memory of one sequence
ends its request and no other.

Source: vLLM V1 (``v1/core/sched/scheduler.py``). Differs: decoding sequences go before prefill, which then
delays no token of a running completion; n completions share their prompt's blocks up to the last token.
"""

from __future__ import annotations

import heapq
import logging
from bisect import insort
from collections.abc import Iterable
from collections.abc import Sequence as Tokens
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

from attar.runtime.admission import Limits, WaitingQueue, most_tokens, refuse_if_busy
from attar.runtime.kv.block_manager import BlockManager
from attar.runtime.kv.blocks import Packing
from attar.runtime.sequence import Request, Sequence, State
from attar.runtime.step import StepInput, TokenSpan

logger = logging.getLogger(__name__)

Planned = list[tuple[Sequence, int]]
"""Sequences of a step, each with its number of tokens, for which slots are reserved."""


@dataclass(frozen=True)
class StepOutput:
    """A sequence's logits in a step.

    Args:
        rows: of the logits that the runner returned.
        position: of the token of the first row; row i predicts the token at position + i + 1.
        draws: the last rows that new tokens are sampled from: 1, or 1 + drafts; 0 during prefill.
    """

    sequence: Sequence
    rows: range
    position: int
    draws: int


class SequenceMemory(Protocol):
    """What a runner keeps for each sequence; every Runner has it."""

    def fork(self, sequence: int, child: int) -> None: ...
    def forget(self, sequence: int) -> None: ...


class Scheduler:
    """Waiting and running sequences.

    Args:
        limits: how much runs, and how much may wait.
        context: positions of the model; None: no limit.
        memory: notified of forks, and of sequences that ended or lost their blocks; usually the runner.

    Attributes:
        running: in the order of ``Sequence.order``.
        preemptions: since the start.
    """

    def __init__(
        self,
        manager: BlockManager,
        limits: Limits | None = None,
        *,
        context: int | None = None,
        memory: SequenceMemory | None = None,
    ) -> None:
        self.manager, self.limits, self.context = manager, limits or Limits(), context
        self.running: list[Sequence] = []
        self.waiting = WaitingQueue(manager, self.limits)
        self.preemptions = 0
        self._memory = memory
        self._live: dict[int, Sequence] = {}  # running and waiting, in the order of their ids
        self._next_id = 0
        self._deadlines: list[float] = []  # a heap; those of finished requests stay until their time
        self._ended: list[Sequence] = []

    @property
    def idle(self) -> bool:
        """Whether nothing runs and nothing waits."""
        return not self._live

    def add(self, request: Request) -> Sequence:
        """Add a request to the waiting ones.

        Raises:
            DataError: the prompt is empty.
            SettingsError: it can never run, even alone.
            BusyError: the queue is full.
        """
        limit = most_tokens(request, self.manager, self.limits, self.context)
        refuse_if_busy(request, self.limits, len(self.waiting), self.waiting.prompt_tokens)
        if request.deadline is not None:
            heapq.heappush(self._deadlines, request.deadline)
        sequence = Sequence(
            self._new_id(),
            request,
            limit,
            list(request.prompt),
            width=request.n,
            scored=request.logits_from or 0,
        )
        self._live[sequence.id] = sequence
        self.waiting.add(sequence)
        return sequence

    def cancel(
        self, request: str, reason: str = "cancelled", failure: Exception | None = None
    ) -> list[Sequence]:
        """Finish what is left of a request; returns its sequences, none for an unknown request.

        Args:
            failure: the exception where the reason is "error".
        """
        sequences = [sequence for sequence in self._live.values() if sequence.request.id == request]
        for sequence in sequences:
            sequence.failure = failure
            self.finish(sequence, reason)
        return sequences

    def finish(self, sequence: Sequence, reason: str) -> None:
        """End a sequence and release what it holds; a finished one stays as it is."""
        if not sequence.finished:
            self._release(sequence)
            del self._live[sequence.id]
            sequence.state, sequence.reason = State.FINISHED, reason

    def ended(self) -> list[Sequence]:
        """Sequences that ``plan`` and ``commit`` finished by themselves since the last call: "deadline",
        "capacity" or "error"."""
        ended, self._ended = self._ended, []
        return ended

    def plan(self, now: float = 0.0) -> Planned:
        """The sequences of the next step with their tokens, for which slots are reserved; empty where nothing
        can run. Sequences run the drafts that they have.

        Args:
            now: seconds on the clock of the requests' arrivals and deadlines.
        """
        self._expire(now)
        for sequence in self.running:
            sequence.cut_drafts(sequence.limit - len(sequence.tokens) - 1)
        before, left = self.preemptions, self.limits.step_tokens
        ready = [sequence for sequence in self.running if not sequence.held]
        shares = divide(ready, left, self.limits.chunk)
        planned: Planned = []
        for sequence in ready:
            share = shares[sequence.id]
            if share and sequence.state is State.RUNNING and self._reserve(sequence, share):
                planned.append((sequence, share))
                left -= share
        if self.preemptions == before or not self.running:
            planned += self._admit(left, now)
        # an error of one sequence finishes the others of its request
        return [(sequence, share) for sequence, share in planned if not sequence.finished]

    def build(self, planned: Planned) -> StepInput | None:
        """The step that runs the planned tokens; None where there are none."""
        return make_step(planned, self.manager) if planned else None

    def commit(self, step: StepInput) -> list[StepOutput]:
        """Record that a step was run: full blocks are published, finished prompts fork into n completions. A
        request whose memory fails is among ``ended`` and has no output."""
        outputs: list[StepOutput] = []
        row = 0
        for span in step.spans:
            rows, row = range(row, row + span.wants), row + span.wants
            sequence = self._live.get(span.sequence)
            if sequence is None:
                continue
            try:
                outputs += self._commit_span(sequence, span, rows)
            except Exception as failure:
                self._fail(sequence, failure)
        return [output for output in outputs if not output.sequence.finished]

    def append(self, sequence: Sequence, tokens: Tokens[int]) -> None:
        """New tokens of a running sequence: accepted drafts and the token sampled after them. The entries of
        rejected drafts are removed from the cache."""
        assert sequence.state is State.RUNNING and tokens, f"sequence {sequence.id} cannot grow by {tokens}"
        assert len(sequence.tokens) + len(tokens) <= sequence.limit, f"sequence {sequence.id} is full"
        sequence.tokens += tokens
        rejected = max(sequence.computed - len(sequence.tokens) + 1, 0)
        if rejected:
            sequence.computed -= rejected
            self.manager.truncate(sequence.id, self.manager.table(sequence.id).length - rejected)
        sequence.drafts, sequence.parents = [], None

    def fork(self, sequence: Sequence, index: int | None = None) -> Sequence:
        """Another running sequence with the same tokens and blocks (n completions, beams). Where the runner's
        own memory cannot be forked, nothing changes and that error is raised."""
        assert sequence.state is State.RUNNING, f"sequence {sequence.id} does not run, and cannot fork"
        child = Sequence(
            self._new_id(),
            sequence.request,
            sequence.limit,
            list(sequence.tokens),
            sequence.index if index is None else index,
            computed=sequence.computed,
            state=State.RUNNING,
            scored=sequence.scored,
        )
        with ExitStack() as undo:
            self.manager.fork(sequence.id, child.id)
            undo.callback(self.manager.release, child.id)
            if self._memory is not None:
                undo.callback(self._forget, child.id)
                self._memory.fork(sequence.id, child.id)
            undo.pop_all()
        self._live[child.id] = child
        insort(self.running, child, key=_order)
        return child

    def pack(self, sequence: Sequence, kept: int) -> Packing | None:
        """Eviction keeps ``kept`` cache entries of a sequence; None where even preempting others does not
        free enough blocks."""
        while (packing := self.manager.pack(sequence.id, kept)) is None:
            if self.running[-1] is sequence:
                return None
            self._preempt(self.running[-1])
        return packing

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
            fits = table.packed or table.length == sequence.computed
            assert fits, f"table of {sequence.id}: {table.length} entries"
        leaked = self.manager.capacity - self.manager.free - self.manager.cached
        assert self.running or not leaked, f"{leaked} blocks leaked"

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

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
        """Reserve slots for a running sequence's next tokens, preempting the last sequences where needed."""
        while not self._try_reserve(sequence, count):
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

    def _try_reserve(self, sequence: Sequence, count: int) -> bool:
        """Whether the next slots are writable; False too where the sequence's memory failed."""
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

        The first one that does not fit stops the rest: a smaller request does not overtake it.
        """
        planned: Planned = []
        width = sum(sequence.width for sequence in self.running)
        if not self.waiting or left < 1 or width >= self.limits.sequences:
            return planned
        for sequence in self.waiting.ordered(now):
            if sequence.held:
                continue
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
        """Start a waiting sequence; its tokens of this step, 0 where there are too few blocks.

        ``spare`` blocks, one for each running completion, stay free, so that none is preempted at once.
        """
        request, manager = sequence.request, self.manager
        tokens, most = sequence.tokens, request.logits_from
        cached = manager.admit(sequence.id, tokens, request.salt, most_cached=most, spare=spare)
        if cached is None:
            return 0
        share = min(len(sequence.tokens) - cached, left, self.limits.chunk or left)
        with ExitStack() as undo:
            undo.callback(manager.release, sequence.id)
            if not manager.reserve(sequence.id, share):
                return 0
            undo.pop_all()
        self.waiting.remove(sequence)
        sequence.state, sequence.computed = State.RUNNING, cached
        insort(self.running, sequence, key=_order)
        return share

    def _commit_span(self, sequence: Sequence, span: TokenSpan, rows: range) -> list[StepOutput]:
        self.manager.commit(sequence.id, span.count, sequence.tokens)
        sequence.computed = span.stop
        if sequence.request.logits_from is not None:
            sequence.scored = max(sequence.scored, min(span.stop, sequence.prompt))
        draws = 1 + len(sequence.drafts) if span.stop >= len(sequence.tokens) else 0
        outputs = [StepOutput(sequence, rows, span.stop - span.wants, draws)] if rows else []
        if sequence.width > 1 and sequence.computed >= sequence.prompt:
            children = self._fork_completions(sequence)
            outputs += [StepOutput(child, rows[-1:], span.stop - 1, 1) for child in children]
        return outputs

    def _fork_completions(self, sequence: Sequence) -> list[Sequence]:
        """Sequences of the request's other completions: all of them, or none where one fails."""
        children = []
        with ExitStack() as undo:
            for index in range(1, sequence.width):
                children.append(self.fork(sequence, index))
                undo.callback(self.finish, children[-1], "error")
            undo.pop_all()
        sequence.width = 1
        return children

    def _preempt(self, sequence: Sequence) -> None:
        """A running sequence loses its blocks, and waits at the front of its priority."""
        self._release(sequence)
        sequence.state, sequence.preempted = State.WAITING, True
        self.waiting.add(sequence)
        self.preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        """Release what a sequence holds: blocks, the runner's memory of it, drafts. All exits go through
        here."""
        if sequence.state is State.RUNNING:
            self.running.remove(sequence)
            self.manager.release(sequence.id)
            self._forget(sequence.id)
        else:
            self.waiting.remove(sequence)
        sequence.computed, sequence.drafts, sequence.parents = 0, [], None

    def _forget(self, sequence: int) -> None:
        """A runner that fails to forget a sequence is logged, and delays no other."""
        try:
            if self._memory is not None:
                self._memory.forget(sequence)
        except Exception as failure:
            logger.error("the runner cannot forget sequence %d: %s", sequence, failure, exc_info=failure)


def divide(running: Iterable[Sequence], budget: int, chunk: int | None = None) -> dict[int, int]:
    """Tokens of a step for each running sequence, by id; decoding sequences come first.

    Args:
        running: in their order.
        chunk: most tokens of one prompt.
    """
    shares = {}
    for sequence in sorted(running, key=lambda sequence: not sequence.decodes):
        share = min(sequence.wanted, budget)
        shares[sequence.id] = share if sequence.decodes else min(share, chunk or share)
        budget -= shares[sequence.id]
    return shares


def make_step(planned: Planned, manager: BlockManager) -> StepInput:
    """The step that runs the planned tokens of each sequence; drafts beyond them are dropped.

    Args:
        manager: has the block tables and the copies that are due.
    """
    tokens: list[int] = []
    spans: list[TokenSpan] = []
    trees: list[tuple[int, ...] | None] = []
    for sequence, count in planned:
        start, stop = sequence.computed, sequence.computed + count
        sequence.cut_drafts(stop - len(sequence.tokens))
        table = manager.table(sequence.id)
        kept = table.length if table.packed else None
        wants, adapter = sequence.wants(stop), sequence.request.adapter
        drafts = len(sequence.drafts)
        states = manager.snapshot_positions(sequence.id, stop - drafts, sequence.prompt)
        spans.append(TokenSpan(sequence.id, start, stop, table.row, wants, kept, adapter, drafts, states))
        tokens += sequence.tokens[start:stop] + sequence.drafts
        tree = sequence.parents if sequence.drafts else None
        trees.append(None if tree is None else (-1, *tree))
    return StepInput(tokens, tuple(spans), manager.copies(), tuple(trees) if any(trees) else None)


def _order(sequence: Sequence) -> tuple[int, float, int]:
    return sequence.order
