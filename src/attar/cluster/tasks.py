"""Tasks with dependencies on workers: a task starts when what it needs is done and a worker is free.

A task whose worker died is started again, up to ``ATTEMPTS`` times; one that raised an error is not. Tasks
that need a failed one are skipped, all others go on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol

from attar.cluster.journal import TaskJournal
from attar.errors import AttarError
from attar.progress import SILENT, Progress

ATTEMPTS = 3
DONE, FAILED, LOST, SKIPPED = "done", "failed", "lost", "skipped"


@dataclass(frozen=True)
class Resources:
    """What a task is given.

    Args:
        cpus: processors; 0 counts none.
        gpus: devices, or a part of one.
        memory_bytes: 0: not asked for.
    """

    cpus: int = 1
    gpus: float = 0.0
    memory_bytes: int = 0


@dataclass(frozen=True)
class ClusterTask:
    """A call of a function.

    Args:
        id: unique among the tasks.
        function: ``module:function``; called with ``arguments``, which are JSON, as is what it returns.
        needs: the ids of the tasks that must be done before.
    """

    id: str
    function: str
    arguments: Mapping[str, Any]
    needs: tuple[str, ...] = ()
    resources: Resources = field(default_factory=Resources)


@dataclass(frozen=True)
class TaskOutcome:
    """The end of a task: ``done`` with a result; ``failed`` with a message; ``lost`` with its worker."""

    task: str
    state: str
    result: Any = None
    message: str = ""
    hint: str = ""
    worker: str = ""


class Workers(Protocol):
    """Where tasks run."""

    def free(self) -> bool:
        """Whether another task may be submitted."""

    def submit(self, task: ClusterTask) -> None:
        """Start a task."""

    def wait(self) -> TaskOutcome:
        """Wait until one of the submitted tasks has ended."""

    def close(self) -> None:
        """Let go of the workers; tasks that still run are ended."""


def run_tasks(
    tasks: Iterable[ClusterTask],
    workers: Workers,
    journal: TaskJournal | None,
    *,
    before: Callable[[ClusterTask], None] = lambda task: None,
    after: Callable[[TaskOutcome], None] = lambda outcome: None,
    attempts: int = ATTEMPTS,
    progress: Progress = SILENT,
) -> dict[str, TaskOutcome]:
    """Run tasks, in their order where several could start.

    Args:
        journal: None: no events are kept.
        before: called by the driver before a task starts.
        after: called by the driver with the end of a task, before others start.
        attempts: how often a task is started whose worker dies.

    Returns:
        the outcome of each task, by its id.

    Raises:
        ValueError: a task needs one that is not there, or that needs it in turn.
        AttarError: of ``before``.
    """
    waiting = {task.id: task for task in tasks}
    _check(waiting)
    running: dict[str, ClusterTask] = {}
    starts: dict[str, int] = {}
    outcomes: dict[str, TaskOutcome] = {}
    with progress.task("tasks", total=len(waiting)) as shown:
        while waiting or running:
            _skip(waiting, outcomes, journal, shown)
            ready = [task for task in waiting.values() if all(need in outcomes for need in task.needs)]
            while ready and workers.free():
                task = ready.pop(0)
                before(task)
                starts[task.id] = starts.get(task.id, 0) + 1
                _event(journal, task.id, "started", attempt=starts[task.id])
                workers.submit(waiting.pop(task.id))
                running[task.id] = task
            if not running:
                continue  # all that waited was skipped
            outcome = workers.wait()
            task = running.pop(outcome.task)
            _event(journal, task.id, outcome.state, message=outcome.message, worker=outcome.worker)
            if outcome.state == LOST and starts[task.id] < attempts:
                progress.log(f"{task.id}: {outcome.message}; starts again")
                waiting = {task.id: task} | waiting
                continue
            if outcome.state != DONE:
                progress.log(f"{task.id}: {outcome.message}")
            after(outcome)
            outcomes[task.id] = outcome
            shown.advance()
    return outcomes


def _event(journal: TaskJournal | None, task: str, state: str, **details: Any) -> None:
    if journal is not None:
        journal.event(task, state, **details)


def _check(tasks: Mapping[str, ClusterTask]) -> None:
    """Refuse needs that cannot be met."""
    met: set[str] = set()
    while len(met) < len(tasks):
        more = [task.id for task in tasks.values() if task.id not in met and set(task.needs) <= met]
        if not more:
            raise ValueError(f"tasks that can never start: {[name for name in tasks if name not in met]}")
        met.update(more)


def _skip(
    waiting: dict[str, ClusterTask], outcomes: dict[str, TaskOutcome], journal: TaskJournal | None, shown: Any
) -> None:
    """Give up the tasks that need one without a result."""
    missed = True
    while missed:
        missed = False
        for task in list(waiting.values()):
            reasons = [need for need in task.needs if need in outcomes and outcomes[need].state != DONE]
            if reasons:
                message = f"needs {reasons[0]}, which has no result"
                outcomes[task.id] = TaskOutcome(waiting.pop(task.id).id, SKIPPED, message=message)
                _event(journal, task.id, SKIPPED, message=message)
                shown.advance()
                missed = True


def perform(task: str, function: str, arguments: Mapping[str, Any]) -> TaskOutcome:
    """Call the function of a task; what it raises becomes an outcome."""
    worker = f"{os.uname().nodename}:{os.getpid()}"
    try:
        module, _, name = function.partition(":")
        result = getattr(import_module(module), name)(**arguments)
    except AttarError as error:
        return TaskOutcome(task, FAILED, message=error.message, hint=error.hint or "", worker=worker)
    except MemoryError as error:
        return TaskOutcome(task, FAILED, message=f"out of memory: {error}", worker=worker)
    except Exception as error:
        message = f"this is a bug of attar: {type(error).__name__}: {error}"
        return TaskOutcome(task, FAILED, message=" ".join(message.split()), worker=worker)
    return TaskOutcome(task, DONE, result=result, worker=worker)
