"""``run.json``: the stages of a run and what was measured, for the report and for readers of a run."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from attar.checkpoint.atomic import write_json
from attar.checkpoint.card import plain as jsonable
from attar.checkpoint.open import open_checkpoint
from attar.recipe.machine import machine
from attar.recipe.plan import RecipePlan, RecipeStep
from attar.recipe.runfolder import ORIGINAL_RECEIPT, RECEIPTS, RUN, Receipt, own_folders, read_receipt
from attar.recipe.schema import ORIGINAL
from attar.settings import plain, title


def write_run(
    plan: RecipePlan, versions: dict[str, str], entries: list[dict[str, Any]], *, finished: bool
) -> dict[str, Any]:
    """Write ``run.json`` and return its content; ``folders`` are those that the run may replace or remove.

    Args:
        versions: of Python and packages.
        entries: the stages so far, the original first.
        finished: whether these are all.
    """
    announced = [step.folder.name for step in plan.steps]
    content = {
        "attar": versions["attar"],
        "date": _date(plan.out),
        "recipe": plan.recipe.to_dict(),
        "written": plan.recipe.written(),
        "machine": machine(),
        "versions": versions,
        "stages": entries,
        "finished": finished,
        "folders": list(dict.fromkeys([*own_folders(plan.out), *announced])),
    }
    written = jsonable(content)
    assert isinstance(written, dict)
    write_json(plan.out / RUN, written)
    return written


def _date(out: Path) -> str:
    """The day of the last stage or measurement, in UTC: ``2026-11-27``; "" before the first."""
    times = [path.stat().st_mtime for path in (out / RECEIPTS).glob("*.json")]
    return datetime.fromtimestamp(max(times), UTC).date().isoformat() if times else ""


def entries(plan: RecipePlan, count: int) -> list[dict[str, Any]]:
    """The entries of the original and of the first stages in ``run.json``."""
    return [original_entry(plan), *(stage_entry(plan, step) for step in plan.steps[:count])]


def original_entry(plan: RecipePlan) -> dict[str, Any]:
    """The entry of the recipe's model in ``run.json``."""
    receipt = read_receipt(plan.out, ORIGINAL_RECEIPT)
    return _entry(
        ORIGINAL, ORIGINAL, plan.recipe.model, plan.original.path, receipt, plan.original_evaluation_key
    ) | {
        "key": plan.original_key,
        "bytes": plan.original.nbytes,
    }


def stage_entry(plan: RecipePlan, step: RecipeStep) -> dict[str, Any]:
    """The entry of a finished stage."""
    entry = step.entry
    receipt = read_receipt(plan.out, entry.folder)
    checkpoint = open_checkpoint(step.folder)
    text = title(entry.settings)
    return _entry(entry.name, entry.stage, text, Path(entry.folder), receipt, step.evaluation_key) | {
        "settings": plain(entry.settings),
        "parents": list(entry.parents),
        "key": step.key,
        "bytes": checkpoint.nbytes,
        "details": checkpoint.card.details if checkpoint.card else {},
    }


def _entry(
    name: str, stage: str, title: str, path: Path, receipt: Receipt | None, evaluation_key: str
) -> dict[str, Any]:
    measured = receipt is not None and evaluation_key != "" and receipt.measurements_key == evaluation_key
    return {
        "name": name,
        "stage": stage,
        "title": title,
        "settings": {},
        "parents": [],
        "path": str(path),
        "key": "",
        "bytes": 0,
        "seconds": receipt.seconds if receipt and receipt.finished else None,
        "peak_rss_bytes": receipt.peak_rss_bytes if receipt else None,
        "measurements": receipt.measurements if receipt and measured else {},
        "details": {},
    }
