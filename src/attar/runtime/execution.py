"""What the engine runs on a runner: a step, again in parts where it fails, and the packing after it.

A runner declares with ``repeats`` that a failed step may be run again: it writes the same slots with the same
values, and keeps no other state of a sequence. Then each sequence is run alone, and only sequences that fail
alone are lost. Without it all sequences of the step are lost.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from attar.runtime.kv.blocks import Packing
from attar.runtime.kv.evict import Eviction, Reread, SnapKV
from attar.runtime.scheduler import Scheduler
from attar.runtime.sequence import Sequence, State
from attar.runtime.step import Runner, StepInput

Failures = dict[int, Exception]
"""The exception of each sequence that failed, by id."""


def run(runner: Runner, step: StepInput) -> tuple[StepInput, Tensor, Failures]:
    """Run a step. Returns the part of the step that was run, its logits (W, V), and the sequences that
    failed."""
    try:
        return step, runner.run(step), {}
    except Exception as failure:
        again = getattr(runner, "repeats", False) and step.repeatable(runner.block_size)
        if not again or len(step.spans) == 1:
            lost = {span.sequence: failure for span in step.spans}
            return step.part([]), torch.empty(0, runner.vocabulary), lost
    return _run_spans(runner, step)


def _run_spans(runner: Runner, step: StepInput) -> tuple[StepInput, Tensor, Failures]:
    """Every span alone. The block copies are made with each span until the first succeeds."""
    done: list[int] = []
    logits = [torch.empty(0, runner.vocabulary)]
    failures: Failures = {}
    for index, span in enumerate(step.spans):
        part = step.part([index])
        try:
            logits.append(runner.run(replace(part, copies=()) if done else part).cpu())
        except Exception as failure:
            failures[span.sequence] = failure
        else:
            done.append(index)
    return step.part(done), torch.cat(logits), failures


class Packer(Protocol):
    """A runner that can move the cache entries of a sequence together."""

    def pack(self, packing: Packing) -> None: ...


def pack_due(scheduler: Scheduler, eviction: Eviction, runner: Packer) -> list[tuple[Sequence, Exception]]:
    """Pack every running sequence that holds more cache entries than the eviction method allows. Returns the
    sequences whose packing failed: their remaining keys and values are useless.

    The method says how many entries are kept, the scheduler allocates blocks (preempting, if need be), and
    the runner chooses the entries and moves them. A sequence without room is tried again after the next step.
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
