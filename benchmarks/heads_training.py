"""Drafters for ``benchmarks/heads.py``: each trained for the same time on the same rows, once.

Time is the process's own on all its cores, by their number: whatever else the machine does, each drafter has
the same. Seconds of a step are measured on the first steps of a training that is then thrown away; the run
has as many steps as fit into the minutes, so that its learning rate ends where it should. A killed run goes
on. The target runs in each step unless ``--state-cache`` says otherwise: kept states would be another share
of the time for each kind.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from attar.checkpoint.card import Card
from attar.checkpoint.hashing import identity
from attar.distillation.head_settings import HEAD_SETTINGS, TrainHeadSettings, train_head_settings
from attar.distillation.heads.train import train_head
from attar.distillation.settings import DistillSettings, distill_settings
from attar.distillation.stage import distill
from attar.errors import SettingsError
from attar.progress import ProgressTask, Terminal

DRAFT_MODEL = "draft model"
HEADS = ("medusa", "eagle", "eagle3", "dflash", "dspark")
PROBED = 12  # steps
TIMED = ("distill", "recover", "train-head")  # tasks of a progress
MUON = {"optimizer": "muon", "learning_rate": 2e-3}
RATES = {"medusa": MUON, "eagle": {"learning_rate": 2e-3}, "eagle3": {"learning_rate": 2e-3}}
RATES |= {"dflash": MUON, "dspark": MUON}
"""Tried in 120 to 400 steps: Muon for DSpark (AdamW at 0.001 and 0.003 learned less), AdamW for EAGLE-3 (Muon
learned less). The others were not tried: DFlash has what DSpark has, EAGLE what EAGLE-3 has."""


class ProbedError(Exception):
    """A probe has seen enough steps."""


class StepClock:
    """A ``Progress`` that times the steps of a training.

    Args:
        threads: by which the process's time is divided.
        most: steps after which it raises :class:`ProbedError`; None: never.
    """

    def __init__(self, threads: int = 1, most: int | None = None) -> None:
        self.threads, self.most, self.inner, self.seconds = threads, most, Terminal(), list[float]()

    @contextmanager
    def task(self, what: str, total: int, done: int = 0) -> Iterator[ProgressTask]:
        """Open a task; the training's is timed."""
        with self.inner.task(what, total, done) as shown:
            yield _TimedTask(shown, self) if what in TIMED else shown

    def log(self, line: str) -> None:
        """Print a line."""
        self.inner.log(line)

    @property
    def spent(self) -> float:
        """Seconds of all steps, the held-out loss behind the last one not counted; 0 without any."""
        if len(self.seconds) < 2:
            return sum(self.seconds)
        return sum(self.seconds[:-1]) + statistics.median(self.seconds)


class _TimedTask:
    def __init__(self, shown: ProgressTask, clock: StepClock) -> None:
        self.shown, self.clock, self.last = shown, clock, time.process_time()

    def advance(self, n: int = 1, **numbers: float) -> None:
        now = time.process_time()
        self.clock.seconds.append((now - self.last) / self.clock.threads)
        self.last = now
        self.shown.advance(n, **numbers)
        if self.clock.most is not None and len(self.clock.seconds) >= self.clock.most:
            raise ProbedError


def known_heads() -> tuple[str, ...]:
    """Kinds of heads that this attar trains, in the order of the table."""
    return tuple(name for name in HEADS if name in HEAD_SETTINGS)


def settings_of(name: str, steps: int, args: argparse.Namespace) -> DistillSettings | TrainHeadSettings:
    """What a drafter learns with; all rows are the target's own."""
    common: dict[str, Any] = {
        "steps": steps,
        "batch_size": args.batch_size,
        "sequence_length": args.length,
        "num_rollouts": args.samples,
        "teacher_generated": 1.0,
        "data": args.data,
        "seed": args.seed,
        "checkpoint_every": 20,
        "device": "cpu",
    }
    given = {"optimizer": args.optimizer, "learning_rate": args.learning_rate}
    common |= RATES.get(name, {}) | {key: value for key, value in given.items() if value}
    if name == DRAFT_MODEL:
        return distill_settings(for_drafting=True, keep_layers=args.draft_layers, **common)
    wanted = {"drafts": args.drafts, "state_cache": args.state_cache, **chosen_options(name, args)}
    return train_head_settings(head=name, **common, **wanted)


def train_drafter(
    teacher: str, folder: Path, settings: DistillSettings | TrainHeadSettings, **options: Any
) -> None:
    """Train a draft model, or a draft head."""
    if isinstance(settings, DistillSettings):
        distill(teacher, folder, settings, **options)
    else:
        train_head(teacher, folder, settings, **options)


def chosen_options(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Options of the command line that a kind of head has and that were given."""
    given = {"draft_vocabulary": args.draft_vocabulary, "anchors": args.anchors}
    known = {field.name for field in fields(HEAD_SETTINGS[name])} if name in HEAD_SETTINGS else set()
    if name == "eagle":  # it has its model's own output matrix
        known.discard("draft_vocabulary")
    return {option: value for option, value in given.items() if value and option in known}


def trained(name: str, minutes: float, args: argparse.Namespace) -> dict[str, Any] | None:
    """A drafter: its folder, steps, tokens, seconds and the report of its card; None with ``--cached`` where
    it is not there yet."""
    wanted = [name, minutes, args.steps, args.batch_size, args.length, args.samples, args.drafts, args.seed]
    wanted += [args.threads, args.learning_rate, args.optimizer]
    further = [chosen_options(name, args), args.state_cache]
    wanted += further if further != [{}, "0"] else []
    key = identity("heads-benchmark", 1, {"wanted": wanted, "data": args.data}, [args.teacher])
    folder = args.work / f"{name.replace(' ', '-')}-{key[:12]}"
    file = folder.with_suffix(".json")
    if file.exists():
        return dict(json.loads(file.read_text()))
    if args.cached:
        return None
    steps, clock = steps_of(name, minutes, folder, args), StepClock(args.threads)
    settings = settings_of(name, steps, args)
    if not (folder / "attar.json").exists():
        train_drafter(args.teacher, folder, settings, progress=clock, samples=rows_folder(args))
    card = Card.read(folder)
    details = {} if card is None else card.details
    cell = {
        "name": name,
        "folder": str(folder),
        "minutes": minutes,
        "steps": steps,
        "tokens": details.get("tokens", steps * args.batch_size * args.length),
        "seconds": clock.spent,
        "report": reported(details),
        "parameters": details.get("parameters", 0),
    }
    file.write_text(json.dumps(cell))
    return cell


def reported(details: Mapping[str, Any]) -> dict[str, Any]:
    """What a card says of drafting: of a head, or of a draft model."""
    for name in ("drafting", "held_out", "report"):
        if isinstance(details.get(name), dict):
            return dict(details[name])
    return {}


def steps_of(name: str, minutes: float, folder: Path, args: argparse.Namespace) -> int:
    """Steps that fit into the minutes; kept, so that a killed run has as many again."""
    if args.steps:
        return int(args.steps)
    enough = max(-(-args.samples // args.batch_size), 2 * PROBED)  # so that all rows are written
    settings = settings_of(name, enough, args)

    def train(out: Path, clock: StepClock) -> None:
        train_drafter(args.teacher, out, settings, progress=clock, samples=rows_folder(args))

    return steps_within(minutes, folder, args.threads, train)


def steps_within(
    minutes: float, folder: Path, threads: int, train: Callable[[Path, StepClock], object]
) -> int:
    """Steps that fit into the minutes; kept next to the folder.

    Args:
        train: a training of :data:`PROBED` steps or more, which writes to a folder and reports to a clock.
    """
    file = folder.with_suffix(".steps")
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(str(max(round(60 * minutes / seconds_of_a_step(folder, threads, train)), 1)))
    return int(file.read_text())


def seconds_of_a_step(folder: Path, threads: int, train: Callable[[Path, StepClock], object]) -> float:
    """The median of a few steps; the first is slower."""
    clock, probe = StepClock(threads, PROBED), folder.with_name(f"probe-{folder.name}")
    with suppress(ProbedError):
        train(probe, clock)
    for left in (probe, *(probe.with_name(f".{probe.name}.{suffix}") for suffix in ("work", "partial"))):
        shutil.rmtree(left, ignore_errors=True)
    return statistics.median(clock.seconds[1:])


def rows_folder(args: argparse.Namespace) -> Path:
    """The rows that the target writes, of all drafters that learn from the same."""
    wanted = [args.samples, args.length, args.data, args.seed]
    folder: Path = args.work / f"rows-{identity('heads-rows', 1, {'wanted': wanted}, [args.teacher])[:12]}"
    return folder


def all_trained(names: tuple[str, ...], minutes: float, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The drafters that can be trained; the others are named."""
    cells = []
    for name in names:
        if name != DRAFT_MODEL and name not in HEAD_SETTINGS:
            print(f"skipped: {name}, which this attar does not train", flush=True)
            continue
        try:
            cell = trained(name, minutes, args)
        except SettingsError as error:
            print(f"skipped: {name}: {error}", flush=True)
            continue
        if cell is not None:
            cells.append(cell)
    return cells
