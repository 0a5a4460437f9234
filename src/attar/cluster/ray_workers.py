"""Tasks on a Ray cluster: each asks for its processors, devices and memory, and Ray finds the machine.

Retries are the driver's (``tasks.py``), so that its journal has them: Ray's own are off. The folder of a run
must be one that all machines see, and attar is installed on each of them.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from attar.cluster.tasks import FAILED, LOST, ClusterTask, Resources, TaskOutcome, perform
from attar.errors import EndpointError, MissingExtraError

AHEAD = 64
"""Tasks that are submitted before the first has ended: Ray starts the tasks that fit."""


def connect(on: str) -> Any:
    """The module ``ray``, connected: ``local`` starts it here, ``auto`` joins this machine's cluster.

    Raises:
        MissingExtraError: Ray is not installed.
        EndpointError: the cluster does not answer.
    """
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError:
        raise MissingExtraError("ray", "cluster") from None
    if ray.is_initialized():
        return ray
    local: dict[str, Any] = {"include_dashboard": False}
    try:
        ray.init(
            **(local if on == "local" else {"address": on}),
            log_to_driver=True,
            logging_level=logging.ERROR,
            configure_logging=False,
        )
    except (ConnectionError, TimeoutError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise EndpointError(
            f"--on {on}: no Ray cluster answers: {reason}", hint="ray start --head"
        ) from error
    return ray


def check_resources(ray: Any, resources: Resources, count: int = 1) -> None:
    """Refuse what the cluster does not have: Ray would wait for it without end.

    Args:
        count: how many at the same time.

    Raises:
        EndpointError: names what the machines have.
    """
    wanted = {"CPU": resources.cpus, "GPU": resources.gpus, "memory": resources.memory_bytes}
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    fits = sum(
        min((int(node.get(name, 0) / amount) for name, amount in wanted.items() if amount), default=count)
        for node in nodes
    )
    if fits < count:
        has = "; ".join(", ".join(f"{name} {node.get(name, 0):g}" for name in wanted) for node in nodes)
        needs = ", ".join(f"{name} {amount:g}" for name, amount in wanted.items() if amount)
        hint = "ask for less with --jobs, --cpus, --gpus and --memory-gb"
        times = f"{count} times " if count > 1 else ""
        raise EndpointError(f"no machine of the cluster has {times}{needs} (they have {has})", hint=hint)


def options_of(task: ClusterTask) -> dict[str, Any]:
    """The options of Ray for the resources of a task."""
    resources = task.resources
    options: dict[str, Any] = {"num_cpus": resources.cpus, "num_gpus": resources.gpus, "max_retries": 0}
    return options | ({"memory": resources.memory_bytes} if resources.memory_bytes else {})


class RayWorkers:
    """The workers of a cluster. Raises as :func:`connect` and :func:`check_resources`."""

    def __init__(self, on: str, resources: Resources) -> None:
        self._ray = connect(on)
        check_resources(self._ray, resources)
        self._remote = self._ray.remote(_perform)
        self._tasks: dict[Any, str] = {}

    def free(self) -> bool:
        """Whether fewer than ``AHEAD`` tasks are submitted."""
        return len(self._tasks) < AHEAD

    def submit(self, task: ClusterTask) -> None:
        """Hand a task to Ray."""
        remote = self._remote.options(**options_of(task))
        self._tasks[remote.remote(task.id, task.function, dict(task.arguments))] = task.id

    def wait(self) -> TaskOutcome:
        """Wait for one of them; a dead worker or node is a lost task."""
        ended, _ = self._ray.wait(list(self._tasks), num_returns=1)
        task = self._tasks.pop(ended[0])
        try:
            return TaskOutcome(**self._ray.get(ended[0]))
        except self._ray.exceptions.OutOfMemoryError as error:
            return TaskOutcome(task, FAILED, message=f"its machine ran out of memory: {_line(error)}")
        except self._ray.exceptions.RayTaskError as error:  # such as an attar that is not installed there
            return TaskOutcome(task, FAILED, message=_line(error.cause))
        except self._ray.exceptions.RayError as error:
            return TaskOutcome(task, LOST, message=f"its worker died ({type(error).__name__})")

    def close(self) -> None:
        """Cancel what still runs."""
        for reference in self._tasks:
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.cancel(reference, force=True)
        self._tasks.clear()


class RayActors:
    """``count`` actors, each with one task; one that dies is replaced. Raises as :class:`RayWorkers`."""

    def __init__(self, on: str, resources: Resources, count: int) -> None:
        self._ray = connect(on)
        check_resources(self._ray, resources, count)
        options = {"num_cpus": resources.cpus, "num_gpus": resources.gpus, "max_restarts": 0}
        options |= {"memory": resources.memory_bytes} if resources.memory_bytes else {}
        self._class = self._ray.remote(**options)(_Actor)
        self._idle = [self._class.remote() for _ in range(count)]
        self._tasks: dict[Any, tuple[str, Any]] = {}

    def free(self) -> bool:
        """Whether an actor has no task."""
        return bool(self._idle)

    def submit(self, task: ClusterTask) -> None:
        """Give a task to an actor."""
        actor = self._idle.pop()
        self._tasks[actor.perform.remote(task.id, task.function, dict(task.arguments))] = task.id, actor

    def wait(self) -> TaskOutcome:
        """Wait for one of them; a dead actor is a lost task."""
        ended, _ = self._ray.wait(list(self._tasks), num_returns=1)
        task, actor = self._tasks.pop(ended[0])
        try:
            outcome = TaskOutcome(**self._ray.get(ended[0]))
        except self._ray.exceptions.RayError as error:
            self._idle.append(self._class.remote())
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.kill(actor)
            return TaskOutcome(task, LOST, message=f"its actor died ({type(error).__name__})")
        self._idle.append(actor)
        return outcome

    def close(self) -> None:
        """End the actors."""
        for actor in [*self._idle, *(actor for _, actor in self._tasks.values())]:
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.kill(actor)
        self._idle.clear()
        self._tasks.clear()


class _Actor:
    """A process that keeps what its functions have loaded."""

    def perform(self, task: str, function: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return _perform(task, function, arguments)


def _perform(task: str, function: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Runs on a worker."""
    return asdict(perform(task, function, arguments))


def _line(error: Any) -> str:
    return " ".join(str(error).split())[:300]
