"""``attar.track`` and ``--track``: a progress that tells trackers what the work reports to it anyway.

    attar.distill("attar:tiny", "out/student", progress=attar.track("mlflow"))
    attar.run("recipe.yaml", progress=attar.track(print))

A run is a stage. Its id and the last reported step of each task are kept in ``.OUT.track`` next to the output
until the stage ends, so that the same command goes on in the same run after an interruption, and tells no
step twice.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from attar.checkpoint.atomic import hidden, target
from attar.checkpoint.hashing import canonical_json, sha256_text
from attar.checkpoint.jsonfile import read_json
from attar.errors import AttarError, CheckpointError, MissingExtraError, UsageError, did_you_mean
from attar.progress import Progress, ProgressTask, shown
from attar.tracking.background import BackgroundTracker, failure_line
from attar.tracking.events import Tracker, TrackEvent, numbers_of

TRACKERS = {
    "trackio": "attar.tracking.trackio:TrackioTracker",
    "mlflow": "attar.tracking.mlflow:MLflowTracker",
    "wandb": "attar.tracking.wandb:WandbTracker",
    "tensorboard": "attar.tracking.tensorboard:TensorBoardTracker",
}
"""Tracker, which is also the package that it needs, to its class."""

Finish = Callable[[Mapping[str, Any]], None]


def track(
    *trackers: Tracker | str, progress: Progress | bool | None = None, group: str = ""
) -> TrackedProgress:
    """The ``progress`` of a verb that trackers follow: settings, steps, final measurements.

    A tracker that fails ends no work: a line says so, and it is not called again.

    Args:
        trackers: ``trackio``, ``mlflow``, ``wandb`` or ``tensorboard``, whose packages must be installed; or
            functions of a :class:`TrackEvent`, which are called in the thread of the work.
        progress: what else shows it, as in every verb.
        group: of all runs; "": of a recipe's stages the name of its folder.

    Raises:
        UsageError: there is no such tracker.
        MissingExtraError: its package is not installed.
    """
    for tracker in trackers:
        if not callable(tracker):
            check_tracker(tracker)
    return TrackedProgress(trackers, shown(progress), group)


def check_tracker(name: str) -> None:
    """Refuse a tracker that is none, or whose package is missing, which is not imported. Raises as
    :func:`track`."""
    if not isinstance(name, str) or name not in TRACKERS:
        raise UsageError(f"--track {name}: is no tracker{did_you_mean(str(name), list(TRACKERS))}")
    spec = find_spec(name)
    if spec is None or spec.origin is None:  # a folder of that name, where trackers keep their files, is none
        raise MissingExtraError(name, None)


class TrackedProgress:
    """Shows work, and tells trackers of it."""

    def __init__(self, trackers: Sequence[Any], shown: Progress, group: str) -> None:
        self.shown, self.group = shown, group
        self.names = list(dict.fromkeys(name for name in trackers if isinstance(name, str)))
        self.callbacks: list[Tracker] = [tracker for tracker in trackers if callable(tracker)]
        self._trackers: list[Tracker] = [_background(name, shown.log) for name in self.names]
        self._run: TrackedRun | None = None

    @contextmanager
    def task(self, what: str, total: int, done: int = 0) -> Iterator[ProgressTask]:
        """Open a task that is shown, and reported where a run is tracked."""
        with self.shown.task(what, total, done) as task:
            yield _TrackedTask(task, self._run, what, done)

    def log(self, line: str) -> None:
        """Print a line."""
        self.shown.log(line)

    def check_names_only(self) -> None:
        """Refuse functions, where the work is in other processes. Raises UsageError."""
        if self.callbacks:
            hint = f"the name of a tracker: {', '.join(TRACKERS)}"
            raise UsageError("a function cannot follow work in other processes", hint=hint)

    @contextmanager
    def follow(self, run: TrackedRun) -> Iterator[Finish]:
        """Within it the tasks are a run's."""
        self._run = run
        try:
            yield run.measure
        except BaseException as error:
            run.end("failed" if isinstance(error, Exception) else "stopped", error)
            raise
        else:
            run.end("finished")
        finally:
            self._run = None

    def tell(self, event: TrackEvent) -> None:
        """Call all trackers."""
        for tracker in self._trackers:
            tracker(event)
        for callback in list(self.callbacks):
            try:
                callback(event)
            except Exception as error:
                self.callbacks.remove(callback)
                name = getattr(callback, "__name__", type(callback).__name__)
                self.log(failure_line(name, f"{type(error).__name__}: {error}"))


@contextmanager
def stage_run(
    progress: Progress,
    verb: str,
    settings: Mapping[str, Any],
    out: Path,
    *,
    group: str = "",
    key: str = "",
) -> Iterator[Finish]:
    """Track a stage, where ``progress`` does; yields a function that takes its final measurements.

    Args:
        settings: with what else identifies the work: the model, the teacher.
        out: the output, whose name the run has.
        group: of the stages of a recipe.
        key: identity of the work, where something else knows what is done; "": the settings are, and the run
            goes on where ``.OUT.work`` next to the output is left.
    """
    if not isinstance(progress, TrackedProgress):
        yield lambda measurements: None
        return
    name = f"{out.parent.name}/{out.name}" if group and progress.group else out.name
    names = {"name": name, "verb": verb, "group": progress.group or group}
    with progress.follow(TrackedRun(progress.tell, target(out), key, names, settings)) as finish:
        yield finish


def untracked(progress: Progress) -> Progress:
    """What shows work that no tracker follows."""
    return progress.shown if isinstance(progress, TrackedProgress) else progress


class _TrackedTask:
    def __init__(self, task: ProgressTask, run: TrackedRun | None, what: str, done: int) -> None:
        self._task, self._run, self._what, self._done = task, run, what, done

    def advance(self, n: int = 1, **numbers: float) -> None:
        self._done += n
        self._task.advance(n, **numbers)
        if self._run is not None and numbers:
            self._run.step(self._what, self._done, numbers)


class TrackedRun:
    """One run; it starts with the first thing that there is to tell.

    Args:
        out, key: see :func:`stage_run`.
        names: the fields of every event.
    """

    def __init__(
        self,
        tell: Tracker,
        out: Path,
        key: str,
        names: dict[str, Any],
        settings: Mapping[str, Any],
    ) -> None:
        self._tell, self._names, self._settings = tell, names, settings
        self._key = key or sha256_text(canonical_json([names["verb"], dict(settings)]))
        self._keyed, self._work, self._file = bool(key), hidden(out, "work"), hidden(out, "track")
        self._started = False
        self._id, self._steps = secrets.token_hex(4), dict[str, int]()
        self._measurements: Mapping[str, Any] = {}

    def step(self, task: str, done: int, numbers: Mapping[str, float]) -> None:
        """A task has done ``done`` steps."""
        self._start()
        if done <= self._steps.get(task, 0):
            return
        self._steps[task] = done
        self._write()  # before it is reported: after a kill no step is reported twice
        self._event("step", step=done, numbers=numbers_of(numbers, f"{task}/"))

    def measure(self, measurements: Mapping[str, Any]) -> None:
        """What the end will tell."""
        self._measurements = measurements

    def end(
        self, state: Literal["finished", "failed", "stopped"], error: BaseException | None = None
    ) -> None:
        """The work has ended, with an error perhaps: bad input leaves nothing that a run could go on with."""
        if self._measurements:
            self._start()
        if self._started:
            last = max(self._steps.values(), default=0)
            self._event("end", step=last, numbers=numbers_of(self._measurements), state=state)
        if state == "finished" or (isinstance(error, AttarError) and not self._keyed):
            with suppress(OSError):
                self._file.unlink(missing_ok=True)

    def _start(self) -> None:
        if not self._started:
            self._started = True
            self._read()
            self._event("start", settings=self._settings)

    def _event(self, kind: Literal["start", "step", "end"], **fields: Any) -> None:
        self._tell(TrackEvent(kind=kind, run=self._id, **self._names, **fields))

    def _read(self) -> None:
        """Take over the run of an earlier attempt."""
        if not self._keyed and not self._work.is_dir():
            return
        with suppress(CheckpointError, KeyError, TypeError, ValueError, AttributeError):
            record = read_json(self._file)
            if record["key"] == self._key:
                steps = {str(task): int(done) for task, done in record["steps"].items()}
                self._id, self._steps = f"{int(record['run'], 16):08x}", steps

    def _write(self) -> None:
        """Without fsync, which takes longer than a small model's step; where it fails, the run does not go
        on after an interruption, and another begins."""
        partial = self._file.with_name(f"{self._file.name}.partial")
        record = {"run": self._id, "key": self._key, "steps": self._steps}
        with suppress(OSError):
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644)
            with os.fdopen(descriptor, "w") as file:
                json.dump(record, file)
            partial.replace(self._file)


def _background(name: str, log: Callable[[str], None]) -> BackgroundTracker:
    def make() -> Tracker:
        module, _, cls = TRACKERS[name].partition(":")
        tracker: Tracker = getattr(import_module(module), cls)()
        return tracker

    return BackgroundTracker(name, make, log)
