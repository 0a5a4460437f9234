"""The folder of a run: what may be written there, what belongs to the run, what a fresh start removes.

A run touches only what it made itself: the stage folders that its ``run.json`` announces, its receipts, and
its own files.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from attar.checkpoint.atomic import explain_os_errors, hidden, write_json
from attar.checkpoint.card import FILE as CARD
from attar.checkpoint.jsonfile import read_json
from attar.checkpoint.readme import FILE as README
from attar.errors import CheckpointError, OutputError

RUN, RECIPE, REPORT = "run.json", "recipe.yaml", "report.html"
"""What a run writes beside its stages."""

SIGNAL = ".signal"
"""Folder of what teachers predicted, which the stages of a run share until it ends."""


def default_folder(recipe: str | Path) -> Path:
    """Where a recipe runs unless told otherwise: ``runs/<name of the recipe's file>``."""
    return Path("runs") / Path(recipe).stem


def read_run(run: Path) -> dict[str, Any] | None:
    """The content of ``run.json``, or None where there is none that can be read."""
    try:
        content = read_json(run / RUN)
    except CheckpointError:
        return None
    return content if "attar" in content else None


def own_folders(run: Path) -> list[str]:
    """Names of the stage folders that this run made or announced."""
    announced = (read_run(run) or {}).get("folders", [])
    receipts = sorted(path.stem for path in (run / RECEIPTS).glob("*.json"))
    names = dict.fromkeys([*(str(name) for name in announced), *receipts])
    # a run.json edited by hand must not reach outside the folder
    return [
        name
        for name in names
        if Path(name).name == name and not name.startswith(".") and name != ORIGINAL_RECEIPT
    ]


def check_folder(run: Path, model: str, *, fresh: bool) -> None:
    """Refuse a folder that is not a run, or that is the run of another model.

    Raises:
        OutputError: says which.
    """
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
    before = earlier.get("recipe", {}).get("model")
    if before != model and not fresh:
        hint = "choose another folder with -o, or start over with --fresh"
        raise OutputError(f"{run}: holds a run of another model ({before})", hint=hint)


def remove_own(run: Path) -> None:
    """Remove what this run created, and nothing else: a file that attar did not put there stays."""
    names = own_folders(run)
    for name in names:
        for path in (run / name, *(hidden(run / name, suffix) for suffix in ("work", "partial", "old"))):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
    for name in (*names, ORIGINAL_RECEIPT):
        (run / RECEIPTS / f"{name}.json").unlink(missing_ok=True)
    for name in (RUN, RECIPE, REPORT):
        (run / name).unlink(missing_ok=True)
    shutil.rmtree(run / SIGNAL, ignore_errors=True)
    if (run / RECEIPTS).is_dir() and not any((run / RECEIPTS).iterdir()):
        (run / RECEIPTS).rmdir()


def missing_folders(run: Path) -> list[Path]:
    """The folder and those of its parents that do not exist yet, the deepest first."""
    return [path for path in (run, *run.parents) if not path.exists()]


def undo(run: Path, created: list[Path]) -> None:
    """After a failure in a new run: remove it again, unless something in it was finished or can be resumed.

    Args:
        run: the run's folder.
        created: what :func:`missing_folders` said before the run; empty for a run that existed: it stays.
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


LOCK = ".lock"


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """Hold the run folder (made if need be) while the block runs.

    Raises:
        OutputError: another run is at work there, or the folder cannot be written.
    """
    path = run / LOCK
    with explain_os_errors(path):
        try:
            run.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise OutputError(
                f"{error.filename}: a file is in the way", hint="choose another folder"
            ) from None
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _take(descriptor, run)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _take(descriptor: int, run: Path) -> None:
    try:
        # not flock: forked children would inherit that, and an orphaned worker would block the next run
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
        hint = "wait for it, stop it, or choose another folder with -o"
        raise OutputError(f"{run}: another run is at work there (process {holder})", hint=hint) from None


RECEIPTS = "receipts"
ORIGINAL_RECEIPT = "00-original"
"""Name of the receipt of the model that the recipe starts from: it has measurements and no folder."""


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """What is known of one stage's work.

    Args:
        key: identity of the work (stage, code version, settings, inputs).
        finished: the checkpoint was written.
        seconds: time spent on it so far, over all attempts.
        peak_rss_bytes: the most memory the process held while it worked.
        estimated: seconds it was estimated to take; with ``seconds`` it says by how much estimates of such
            work are wrong here; 0 where the time is not that of the whole work.
        files: file name to size in bytes, card and README.md excepted.
        measurements_key: identity of the evaluation, empty where there was none.
        measurements: what the evaluation found.
    """

    key: str
    finished: bool = False
    seconds: float = 0.0
    peak_rss_bytes: int | None = None
    estimated: float = 0.0
    files: dict[str, int] = field(default_factory=dict)
    measurements_key: str = ""
    measurements: dict[str, Any] = field(default_factory=dict)

    def holds(self, folder: Path) -> bool:
        """Whether the finished checkpoint still stands there, with every file at its size."""
        if not self.finished or not (folder / CARD).is_file():
            return False
        return all(
            (folder / name).is_file() and (folder / name).stat().st_size == n
            for name, n in self.files.items()
        )


def sizes(folder: Path) -> dict[str, int]:
    """Relative name to size of every file of a checkpoint; not the card and README.md, which get measurements
    later."""
    later = (folder / CARD, folder / README)
    found = sorted(path for path in folder.rglob("*") if path.is_file() and path not in later)
    return {str(path.relative_to(folder)): path.stat().st_size for path in found}


def read_receipt(run: Path, name: str) -> Receipt | None:
    """The receipt of a stage folder, or None where there is none that can be read: the work is done again."""
    try:
        content = read_json(run / RECEIPTS / f"{name}.json")
        known = {item.name: content[item.name] for item in fields(Receipt) if item.name in content}
        return Receipt(**known)  # an earlier version's may lack a field
    except (CheckpointError, TypeError):
        return None


def write_receipt(run: Path, name: str, receipt: Receipt) -> None:
    """Write a receipt, whole. Raises OutputError."""
    folder = run / RECEIPTS
    with explain_os_errors(folder):
        folder.mkdir(exist_ok=True)
    write_json(folder / f"{name}.json", asdict(receipt))
