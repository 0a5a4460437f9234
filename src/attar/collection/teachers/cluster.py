"""A checkpoint as a teacher on a Ray cluster: several actors, each with an engine of its own.

A request goes to the actor with the fewest. When an actor dies, another one takes its part, and the requests
that it had are asked again one at a time, so that the one that kills actors is found: it is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from attar.checkpoint.open import Checkpoint
from attar.cluster.settings import ClusterSettings
from attar.collection.requests import TeacherRequest
from attar.collection.retry import TeacherFailure
from attar.collection.settings import CollectSettings
from attar.collection.teachers import TeacherAnswer
from attar.collection.teachers.local import LocalTeacher

DEATHS = 3
"""Actors that a request may lose before it is refused."""


class ClusterTeacher(LocalTeacher):
    """``cluster.jobs`` actors that answer as :class:`LocalTeacher` does."""

    def __init__(self, checkpoint: Checkpoint, settings: CollectSettings, cluster: ClusterSettings) -> None:
        super().__init__(checkpoint, settings)
        self._cluster = cluster
        self._actors: list[Any] = []
        self._load: list[int] = []
        self._alone = asyncio.Lock()

    def prepare(self) -> None:
        """Start the actors. Raises MissingExtraError, EndpointError."""
        from attar.cluster.ray_workers import check_resources, connect

        self._ray = connect(self._cluster.on)
        resources = self._cluster.resources
        check_resources(self._ray, resources, self._cluster.jobs)
        options: dict[str, Any] = {"num_cpus": resources.cpus, "num_gpus": resources.gpus}
        options |= {"memory": resources.memory_bytes} if resources.memory_bytes else {}
        options |= {"max_concurrency": self._settings.endpoint.concurrency}
        self._class = self._ray.remote(**options)(_TeacherActor)
        self._actors = [self._start() for _ in range(self._cluster.jobs)]
        self._load = [0] * self._cluster.jobs

    async def ask(self, request: TeacherRequest) -> TeacherAnswer | TeacherFailure:
        """See :class:`attar.collection.teachers.Teacher`."""
        answer = await self._ask_once(request)
        for _ in range(DEATHS - 1):
            if answer is not None:
                return answer
            async with self._alone:
                answer = await self._ask_once(request)
        return answer or TeacherFailure(f"{DEATHS} actors died with it", "refuse")

    async def close(self) -> None:
        """End the actors."""
        for actor in self._actors:
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.kill(actor)

    async def _ask_once(self, request: TeacherRequest) -> TeacherAnswer | TeacherFailure | None:
        """None: the actor died."""
        number = self._load.index(min(self._load))
        actor = self._actors[number]
        self._load[number] += 1
        try:
            answer: TeacherAnswer | TeacherFailure = await actor.ask.remote(request)
            return answer
        except self._ray.exceptions.RayActorError:
            if self._actors[number] is actor:
                self._actors[number] = self._start()
            return None
        except self._ray.exceptions.RayError as error:  # the model cannot be loaded there
            return TeacherFailure(" ".join(str(error).split())[-300:], "stop")
        finally:
            self._load[number] -= 1

    def _start(self) -> Any:
        return self._class.remote(self._checkpoint.spelling, self._fingerprint, self._settings)


class _TeacherActor:
    """One engine; refuses another model than the driver's."""

    def __init__(self, model: str, fingerprint: str, settings: CollectSettings) -> None:
        from attar.checkpoint.open import open_checkpoint
        from attar.errors import OutputError

        self._teacher = LocalTeacher(open_checkpoint(model), settings)
        if self._teacher.identity != fingerprint:
            raise OutputError(f"{model}: another model has this name on a machine of the cluster")
        self._teacher.prepare()

    async def ask(self, request: TeacherRequest) -> TeacherAnswer | TeacherFailure:
        return await self._teacher.ask(request)
