"""Worker processes of this machine, each with a pipe: a task as a JSON line in, its outcome as one out.

A worker lives for many tasks, so that libraries are imported once. One that dies loses its task alone, and
all end with the driver: a pool of ``concurrent.futures`` loses every task with one worker, and its processes
outlive a driver that is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import IO

from attar.cluster.settings import ClusterSettings
from attar.cluster.tasks import LOST, ClusterTask, TaskOutcome, Workers, perform

GRACE_S = 30.0
"""Seconds that a process at work gets to end its step."""


def workers_of(settings: ClusterSettings) -> Workers:
    """The workers of ``--on``, or of this machine.

    Raises:
        MissingExtraError: Ray is not installed.
        EndpointError: the cluster does not answer, or no machine of the cluster has these resources.
    """
    if not settings.on:
        return WorkerProcesses(settings.jobs, threads=max(1, processors() // settings.jobs))
    from attar.cluster.ray_workers import RayWorkers

    return RayWorkers(settings.on, settings.resources)


def actors_of(settings: ClusterSettings) -> Workers:
    """``--jobs`` workers that keep what they loaded from task to task. Raises as :func:`workers_of`."""
    if not settings.on:
        return workers_of(settings)
    from attar.cluster.ray_workers import RayActors

    return RayActors(settings.on, settings.resources, settings.jobs)


def processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    task: str | None = None


class WorkerProcesses:
    """Up to ``jobs`` processes; they end with this one.

    Args:
        threads: of each worker; 0: as the environment says.
    """

    def __init__(self, jobs: int, threads: int = 0) -> None:
        self._jobs, self._threads = jobs, threads
        self._workers: list[_Worker] = []

    def free(self) -> bool:
        """Whether a process has no task."""
        return sum(worker.task is not None for worker in self._workers) < self._jobs

    def submit(self, task: ClusterTask) -> None:
        """Give a task to a process without one, starting it where there is none."""
        worker = next((worker for worker in self._workers if worker.task is None), None) or self._start()
        worker.task = task.id
        record = {"id": task.id, "function": task.function, "arguments": dict(task.arguments)}
        assert worker.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # wait() sees that it died
            worker.process.stdin.write(json.dumps(record).encode() + b"\n")
            worker.process.stdin.flush()

    def wait(self) -> TaskOutcome:
        """Wait for a line, or for the end of a process."""
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                if worker.task is not None and worker.process.stdout is not None:
                    selector.register(worker.process.stdout, selectors.EVENT_READ, worker)
            ready: _Worker = selector.select()[0][0].data
        assert ready.process.stdout is not None and ready.task is not None
        line = ready.process.stdout.readline()
        task, ready.task = ready.task, None
        if line.endswith(b"\n"):
            return TaskOutcome(**json.loads(line))
        self._workers.remove(ready)
        code = ready.process.wait()
        return TaskOutcome(task, LOST, message=f"its process {ready.process.pid} {_ended(code)}")

    def close(self) -> None:
        """End the processes; those at work have ``GRACE_S`` to write the state of a training."""
        for worker in self._workers:
            worker.process.terminate() if worker.task is not None else worker.process.stdin.close()  # type: ignore[union-attr]
        deadline = time.monotonic() + GRACE_S
        for worker in self._workers:
            try:
                worker.process.wait(max(deadline - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
        self._workers.clear()

    def _start(self) -> _Worker:
        threads = {"OMP_NUM_THREADS": str(self._threads)} if self._threads else {}
        process = subprocess.Popen(
            [sys.executable, "-c", "from attar.cluster.workers import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=threads | dict(os.environ),
        )
        worker = _Worker(process)
        self._workers.append(worker)
        return worker


def _ended(code: int) -> str:
    try:
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    except ValueError:
        return f"ended with code {code}"


def serve() -> None:
    """The loop of a worker: ends when its driver does, since the pipe then closes."""
    answers: IO[bytes] = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not mix with the answers
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver gets Ctrl-C, and sends SIGTERM
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        for line in sys.stdin.buffer:
            record = json.loads(line)
            outcome = perform(record["id"], record["function"], record["arguments"])
            answers.write(json.dumps(asdict(outcome)).encode() + b"\n")
            answers.flush()
