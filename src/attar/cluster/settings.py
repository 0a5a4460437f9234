"""Where tasks run (``--on``, ``--jobs``), and what each of them asks of a machine."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from attar.errors import SettingsError

if TYPE_CHECKING:
    from attar.cluster.tasks import Workers

RAY = "ray://"


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


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """Where work runs, and what each task of it asks of a machine."""

    on: str = field(
        default="",
        metadata={
            "help": "a Ray cluster: local starts one on this machine, auto joins this machine's, "
            "ray://HOST:PORT is another; empty: processes of this machine"
        },
    )
    jobs: int = field(
        default=1, metadata={"help": "processes side by side on this machine; actors of a Ray cluster"}
    )
    cpus: int = field(default=1, metadata={"help": "processors of a task on a Ray cluster"})
    gpus: float = field(default=0.0, metadata={"help": "GPUs of a task on a Ray cluster, or a part of one"})
    memory_gb: float = field(
        default=0.0, metadata={"help": "memory of a task on a Ray cluster, in 10^9 bytes; 0: not asked for"}
    )

    def __post_init__(self) -> None:
        known = self.on in ("", "local", "auto") or (self.on.startswith(RAY) and len(self.on) > len(RAY))
        if not known:
            raise SettingsError("on", self.on, "local, auto or ray://HOST:PORT")
        for name in ("jobs", "cpus"):
            if getattr(self, name) < 1:
                raise SettingsError(name, getattr(self, name), "1 or more")
        for name in ("gpus", "memory_gb"):
            if not 0 <= getattr(self, name) < 1e9:
                raise SettingsError(name, getattr(self, name), "0 or more")

    @property
    def resources(self) -> Resources:
        """What each task asks."""
        return Resources(self.cpus, self.gpus, int(self.memory_gb * 1e9))

    def workers(self) -> Workers:
        """The workers of ``on``, or of this machine.

        Raises:
            MissingExtraError: Ray is not installed.
            EndpointError: the cluster does not answer, or no machine of it has these resources.
        """
        if not self.on:
            from attar.cluster.workers import WorkerProcesses

            return WorkerProcesses(self.jobs, threads=max(1, processors() // self.jobs))
        from attar.cluster.ray_workers import RayWorkers

        return RayWorkers(self.on, self.resources)

    def actors(self) -> Workers:
        """``jobs`` workers that keep what they loaded from task to task. Raises as :meth:`workers`."""
        if not self.on:
            return self.workers()
        from attar.cluster.ray_workers import RayActors

        return RayActors(self.on, self.resources, self.jobs)


def processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
