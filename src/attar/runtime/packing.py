"""Which sequences eviction packs after a step, and in which order things happen.

due?  the method says how many places stay  →  the scheduler finds blocks (preempting, if need be)
→  the runner chooses the places and moves them, before anything else is scheduled
"""

from __future__ import annotations

from typing import Protocol

from attar.runtime.kv.evict import Eviction, Reread, SnapKV
from attar.runtime.kv.table import Packing
from attar.runtime.scheduler import Scheduler
from attar.runtime.sequence import Sequence, State


class Packer(Protocol):
    """A runner that can move the places of a sequence together."""

    def pack(self, packing: Packing) -> None: ...


def pack_due(scheduler: Scheduler, eviction: Eviction, runner: Packer) -> list[tuple[Sequence, Exception]]:
    """Pack every running sequence that holds more places than it may; some methods once, after a prompt.

    One for which there is no room stays as it is, and is asked again after the next step.

    Returns:
        the sequences whose packing failed: what is left of their keys and values is of no use.
    """
    failed = []
    for sequence in list(scheduler.running):
        if sequence.state is not State.RUNNING:  # preempted to pack another
            continue
        try:
            _pack(sequence, scheduler, eviction, runner)
        except Exception as failure:
            failed.append((sequence, failure))
    return failed


def _pack(sequence: Sequence, scheduler: Scheduler, eviction: Eviction, runner: Packer) -> None:
    table = scheduler.manager.table(sequence.id)
    once = isinstance(eviction, SnapKV | Reread)
    if once and (table.packed or sequence.prompt <= eviction.budget):
        return
    kept = eviction.due(table.length, sequence.computed >= sequence.prompt)
    packing = None if kept is None else scheduler.pack(sequence, kept)
    if packing is not None:
        runner.pack(packing)
