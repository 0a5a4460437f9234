"""Every sequence that is alive, in the one place where it may be: it waits, or it runs on blocks.

    enter → waiting → start → running → end          send_back: running → waiting; fork: running → two running

What a sequence holds (blocks, what the runner keeps of it, drafts) is given back in one place, ``_leave``; a
runner that fails to forget one is written to the log, and holds up nobody.
"""

from __future__ import annotations

import logging
from bisect import insort
from contextlib import ExitStack
from typing import Protocol

from attar.runtime.admission import Limits
from attar.runtime.kv.block_manager import BlockManager
from attar.runtime.queue import WaitingQueue
from attar.runtime.sequence import Request, Sequence, State

logger = logging.getLogger(__name__)


class Memory(Protocol):
    """What a runner keeps per sequence; a Runner is one."""

    def fork(self, sequence: int, child: int) -> None: ...
    def forget(self, sequence: int) -> None: ...


class Roster:
    """Waiting and running sequences.

    Args:
        manager: has the tables of those that run.
        limits: of the queue.
        memory: is told of forks, and of sequences that ended or lost their blocks; None: nobody.

    Attributes:
        running: in the order of ``Sequence.order``.
        live: all of them by id, in the order they came.
    """

    def __init__(self, manager: BlockManager, limits: Limits, memory: Memory | None) -> None:
        self.manager, self.memory = manager, memory
        self.running: list[Sequence] = []
        self.waiting = WaitingQueue(manager, limits)
        self.live: dict[int, Sequence] = {}
        self._next = 0

    def enter(self, request: Request, limit: int) -> Sequence:
        """A new sequence that waits."""
        sequence = Sequence(self._id(), request, limit, list(request.prompt), width=request.n)
        self.live[sequence.id] = sequence
        self.waiting.add(sequence)
        return sequence

    def start(self, sequence: Sequence, found: int) -> None:
        """A waiting sequence runs; its first ``found`` tokens are computed, and it has a table."""
        self.waiting.remove(sequence)
        sequence.state, sequence.computed = State.RUNNING, found
        insort(self.running, sequence, key=_order)

    def send_back(self, sequence: Sequence) -> None:
        """A running sequence loses its blocks, and waits at the front of its priority."""
        self._leave(sequence)
        sequence.state, sequence.preempted = State.WAITING, True
        self.waiting.add(sequence)

    def end(self, sequence: Sequence, reason: str) -> None:
        """A sequence is finished."""
        self._leave(sequence)
        del self.live[sequence.id]
        sequence.state, sequence.reason = State.FINISHED, reason

    def fork(self, sequence: Sequence, index: int) -> Sequence:
        """A second running sequence with the same tokens and blocks; none where ``memory`` fails."""
        child = Sequence(
            self._id(),
            sequence.request,
            sequence.limit,
            list(sequence.tokens),
            index,
            computed=sequence.computed,
            state=State.RUNNING,
            scored=sequence.scored,
        )
        with ExitStack() as undo:
            self.manager.fork(sequence.id, child.id)
            undo.callback(self.manager.release, child.id)
            if self.memory is not None:
                undo.callback(self._forget, child.id)
                self.memory.fork(sequence.id, child.id)
            undo.pop_all()
        self.live[child.id] = child
        insort(self.running, child, key=_order)
        return child

    def check(self) -> None:
        """Raises AssertionError naming what is wrong; where nothing runs, no sequence holds a block."""
        self.manager.check()
        assert self.running == sorted(self.running, key=_order), "running sequences are out of order"
        self.waiting.check()
        known = sorted(sequence.id for sequence in (*self.running, *self.waiting))
        assert known == sorted(self.live), f"sequences {known} run or wait, {sorted(self.live)} live"
        for sequence in self.live.values():
            sequence.check()
        tables, ids = self.manager.sequences, [sequence.id for sequence in self.running]
        assert sorted(tables) == sorted(ids), f"sequences {tables} have tables, {ids} run"
        for sequence in self.running:
            table = self.manager.table(sequence.id)
            fits = table.packed or table.length == sequence.computed
            assert fits, f"table of {sequence.id}: {table.length} places"
        leaked = self.manager.capacity - self.manager.free - self.manager.cached
        assert self.running or not leaked, f"{leaked} blocks leaked"

    def _leave(self, sequence: Sequence) -> None:
        """The one place where a sequence gives back what it holds."""
        if sequence.state is State.RUNNING:
            self.running.remove(sequence)
            self.manager.release(sequence.id)
            self._forget(sequence.id)
        else:
            self.waiting.remove(sequence)
        sequence.computed, sequence.drafts, sequence.parents = 0, [], None

    def _forget(self, sequence: int) -> None:
        try:
            if self.memory is not None:
                self.memory.forget(sequence)
        except Exception as failure:
            logger.error("the runner cannot forget sequence %d: %s", sequence, failure, exc_info=failure)

    def _id(self) -> int:
        self._next += 1
        return self._next - 1


def _order(sequence: Sequence) -> tuple[int, float, int]:
    return sequence.order
