"""A step that failed is run again, one sequence at a time: only those that fail by themselves are lost.

A runner says with ``repeats`` that a step which it broke off may be run again: it writes the same slots with
the same values, and keeps nothing else of a sequence. Without it all sequences of the step are lost.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attar.runtime.step import Runner, StepInput

Failures = dict[int, Exception]
"""What went wrong, by sequence."""


def run(runner: Runner, step: StepInput) -> tuple[StepInput, Tensor, Failures]:
    """Run a step.

    Returns:
        what of the step was run, its logits (W, V), and the sequences that failed.
    """
    try:
        return step, runner.run(step), {}
    except Exception as failure:
        again = getattr(runner, "repeats", False) and step.repeatable(runner.block_size)
        if not again or len(step.spans) == 1:
            lost = {span.sequence: failure for span in step.spans}
            return step.part([]), torch.empty(0, runner.vocabulary), lost
    return _apart(runner, step)


def _apart(runner: Runner, step: StepInput) -> tuple[StepInput, Tensor, Failures]:
    """Every span by itself. The first that can be run brings the copies, which are made again until then."""
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
