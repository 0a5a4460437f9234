"""The folder of a run: what may be written there, what belongs to the run, what a fresh start removes.

A run touches only what it made itself: the stage folders that its ``run.json`` announces, its receipts, and
its own files.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from attar.checkpoint.atomic import hidden
from attar.checkpoint.jsonfile import read_json
from attar.errors import CheckpointError, OutputError
from attar.recipe.lock import FILE as LOCK
from attar.recipe.receipts import ORIGINAL_RECEIPT, RECEIPTS, read_receipt

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
