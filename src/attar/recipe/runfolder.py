"""The folder of a run: its lock, its receipts, and the files that belong to it.

A run replaces and removes only its own files: the stage folders listed in its ``run.json``, its receipts, and
the files named below. One run at a time holds a record lock on ``.lock``, which the system releases when the
process ends; the file shows the process id.

A receipt describes a finished stage in a small JSON file. It is valid while the checkpoint exists with every
file at its recorded size.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from attar.checkpoint.atomic import explain_os_errors, hidden, open_own, try_lock, write_json
from attar.checkpoint.card import FILE as CARD
from attar.checkpoint.jsonfile import read_json
from attar.checkpoint.names import is_file_name, is_relative_name
from attar.checkpoint.readme import FILE as README
from attar.errors import CheckpointError, OutputError

RUN, RECIPE, REPORT = "run.json", "recipe.yaml", "report.html"
"""Files of a run besides its stages."""

LOCK = ".lock"
RECEIPTS = "receipts"
ORIGINAL_RECEIPT = "00-original"
"""Name of the receipt of the recipe's model: measurements without a folder."""

SIGNAL = ".signal"
"""Folder of teachers' stored predictions, which the stages of a run share until it ends."""


def default_folder(recipe: str | Path) -> Path:
    """The default folder of a run: ``runs/<name of the recipe's file>``."""
    return Path("runs") / Path(recipe).stem


def read_run(run: Path) -> dict[str, Any] | None:
    """The content of ``run.json``, or None if it is missing or damaged."""
    try:
        content = read_json(run / RUN)
    except CheckpointError:
        return None
    return content if "attar" in content else None


def own_folders(run: Path) -> list[str]:
    """Names of the stage folders of this run, planned ones included."""
    announced = (read_run(run) or {}).get("folders")
    announced = announced if isinstance(announced, list) else []
    receipts = sorted(path.stem for path in (run / RECEIPTS).glob("*.json"))
    names = dict.fromkeys([*(str(name) for name in announced), *receipts])
    # a run.json edited by hand must not reach outside the folder
    return [
        name for name in names if is_file_name(name) and not name.startswith(".") and name != ORIGINAL_RECEIPT
    ]


def check_folder(run: Path, model: str, *, fresh: bool) -> None:
    """Refuse a folder that is not a run, or is a run of another model. Raises OutputError."""
    if not run.exists():
        return
    if not run.is_dir():
        raise OutputError(f"{run}: exists and is not a folder", hint="choose another folder with -o")
    earlier = read_run(run)
    if earlier is None:
        others = [
            path.name
            for path in sorted(run.iterdir())
            if path.name != RECEIPTS and not path.name.startswith(".")
        ]
        if others:
            hint = "choose an empty or a new folder with -o"
            raise OutputError(f"{run}: is not the folder of a run (it holds {others[0]})", hint=hint)
        return
    recipe = earlier.get("recipe")
    before = recipe.get("model") if isinstance(recipe, dict) else None
    if before != model and not fresh:
        hint = "choose another folder with -o, or start over with --fresh"
        raise OutputError(f"{run}: holds a run of another model ({before})", hint=hint)


def remove_own(run: Path) -> None:
    """Remove the files of this run, and no others."""
    names = own_folders(run)
    for name in names:
        for path in (run / name, *(hidden(run / name, suffix) for suffix in ("work", "partial", "old"))):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
    for name in (*names, ORIGINAL_RECEIPT):
        (run / RECEIPTS / f"{name}.json").unlink(missing_ok=True)
        hidden(run / name, "track").unlink(missing_ok=True)
    for name in (RUN, RECIPE, REPORT):
        (run / name).unlink(missing_ok=True)
    shutil.rmtree(run / SIGNAL, ignore_errors=True)
    if (run / RECEIPTS).is_dir() and not any((run / RECEIPTS).iterdir()):
        (run / RECEIPTS).rmdir()


def missing_folders(run: Path) -> list[Path]:
    """The folder and its parents that do not exist, the deepest first."""
    return [path for path in (run, *run.parents) if not path.exists()]


def undo(run: Path, created: list[Path]) -> None:
    """Remove a new run after a failure, unless a stage is finished or can be resumed.

    Args:
        created: :func:`missing_folders` before the run; a run that existed (empty) stays.
    """
    if not created or not run.is_dir():
        return
    receipts = [read_receipt(run, path.stem) for path in (run / RECEIPTS).glob("*.json")]
    if any(receipt and (receipt.finished or receipt.measurements) for receipt in receipts) or any(
        run.glob(".*.work")
    ):
        return
    remove_own(run)
    (run / LOCK).unlink(missing_ok=True)
    for folder in created:
        if any(folder.iterdir()):
            return
        folder.rmdir()


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """Create and lock the run folder while the block runs.

    Raises:
        OutputError: another run holds the lock, or the folder cannot be written.
    """
    path = run / LOCK
    with explain_os_errors(path):
        try:
            run.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise OutputError(
                f"{error.filename}: a file is in the way", hint="choose another folder"
            ) from None
    with open_own(path) as lock:
        process = lock.read(32).decode(errors="replace").strip()
        if not try_lock(lock.fileno()):
            hint = "wait for it, stop it, or choose another folder with -o"
            message = f"{run}: another run is at work there (process {process or 'unknown'})"
            raise OutputError(message, hint=hint)
        if not (process + "0").isdecimal():
            raise OutputError(f"{path}: is no lock of attar's", hint="move it away, or choose another folder")
        os.ftruncate(lock.fileno(), 0)
        os.pwrite(lock.fileno(), f"{os.getpid()}\n".encode(), 0)
        yield


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """The record of one stage's work.

    Args:
        key: identity of the work (stage, code version, settings, inputs).
        finished: the checkpoint was written.
        seconds: time spent so far, over all attempts.
        peak_rss_bytes: peak memory of the process during the stage.
        estimated: estimated seconds, to correct later estimates; 0 if ``seconds`` is not of the full stage.
        kind: verb and method, whose later estimates are corrected.
        files: file name to size in bytes, without card and README.md.
        measurements_key: identity of the evaluation; empty without.
        evaluation_seconds, evaluation_estimated: its time and its estimate.
    """

    key: str
    finished: bool = False
    seconds: float = 0.0
    peak_rss_bytes: int | None = None
    estimated: float = 0.0
    files: dict[str, int] = field(default_factory=dict)
    measurements_key: str = ""
    measurements: dict[str, Any] = field(default_factory=dict)
    kind: str = ""
    evaluation_seconds: float = 0.0
    evaluation_estimated: float = 0.0

    def well_formed(self) -> bool:
        """Whether its fields have their types, and its files are below a folder."""
        if not isinstance(self.files, dict) or not isinstance(self.measurements, dict):
            return False
        texts = (self.key, self.measurements_key, self.kind)
        times = (self.seconds, self.estimated, self.evaluation_seconds, self.evaluation_estimated)
        numbers = (*times, self.peak_rss_bytes or 0, *self.files.values())
        return (
            all(isinstance(text, str) for text in texts)
            and all(isinstance(number, int | float) for number in numbers)
            and all(is_relative_name(name) for name in self.files)
        )

    def holds(self, folder: Path) -> bool:
        """Whether the finished checkpoint exists with every file at its size."""
        if not self.finished or not (folder / CARD).is_file():
            return False
        return all(
            (folder / name).is_file() and (folder / name).stat().st_size == n
            for name, n in self.files.items()
        )


def sizes(folder: Path) -> dict[str, int]:
    """Size of every file of a checkpoint, without card and README.md, which evaluation rewrites."""
    rewritten = (folder / CARD, folder / README)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path not in rewritten)
    return {str(path.relative_to(folder)): path.stat().st_size for path in files}


def read_receipt(run: Path, name: str) -> Receipt | None:
    """The receipt of a stage folder, or None if it is missing or damaged: the stage runs again."""
    try:
        content = read_json(run / RECEIPTS / f"{name}.json")
        known = {item.name: content[item.name] for item in fields(Receipt) if item.name in content}
        receipt = Receipt(**known)  # one of an earlier version may lack fields
    except (CheckpointError, TypeError):
        return None
    return receipt if receipt.well_formed() else None


def write_receipt(run: Path, name: str, receipt: Receipt) -> None:
    """Write a receipt. Raises OutputError."""
    folder = run / RECEIPTS
    with explain_os_errors(folder):
        folder.mkdir(exist_ok=True)
    write_json(folder / f"{name}.json", asdict(receipt))
