"""A plan as a table and as JSON."""

from __future__ import annotations

import shutil
import textwrap
from typing import Any

from attar.checkpoint.atomic import free_bytes
from attar.checkpoint.units import bytes_text, range_text, table
from attar.memory import free_memory
from attar.recipe.estimate import EstimatedTime
from attar.recipe.machine import free_share, load, threads
from attar.recipe.plan import DONE, RecipePlan, RecipeStep
from attar.recipe.schema import ORIGINAL
from attar.settings import plain, title

_PLAN = ("#", "stage", "what", "from", "state", "about: time", "memory", "disk")
_WIDTH = 120  # columns of the table without a terminal
_LEAST = 12  # columns of a shortened cell


def plan_text(plan: RecipePlan) -> str:
    """The plan as a table, and the total of its estimates."""
    rows = [_row("0", ORIGINAL, plan.recipe.model, "", "", plan.original_time, plan.original_memory, 0.0)]
    for step in plan.steps:
        entry = step.entry
        source = ", ".join(entry.parents[:1] if entry.teacher else entry.parents)
        source += f", taught by {entry.teacher}" if entry.teacher else ""
        disk = 0.0 if step.state == DONE else step.estimate.disk_bytes
        what = f"{entry.stage} {title(entry.settings)}"
        needs = (step.time, step.memory_bytes, disk)
        rows.append(_row(str(entry.number), entry.name, what, source, step.state, *needs))
    return table(_PLAN, _fitting(rows), left=5) + "\n" + _summary(plan)


def _fitting(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The rows with settings and parents shortened so that the table fits the terminal."""
    available = shutil.get_terminal_size((_WIDTH, 24)).columns
    for column in (_PLAN.index("what"), _PLAN.index("from")):
        widths = [max(map(len, cells)) for cells in zip(_PLAN, *rows, strict=True)]
        excess = sum(widths) + 2 * (len(widths) - 1) - available
        width = max(widths[column] - max(excess, 0), _LEAST)
        rows = [(*row[:column], _shorter(row[column], width), *row[column + 1 :]) for row in rows]
    return rows


def _shorter(text: str, width: int) -> str:
    return text if len(text) <= width else textwrap.shorten(text, width, placeholder=" ...")


def plan_dict(plan: RecipePlan) -> dict[str, Any]:
    """The plan as JSON values."""
    stages = [_step_dict(step) for step in plan.steps]
    return {
        "model": plan.recipe.model,
        "out": str(plan.out),
        "seconds": round(plan.time.seconds, 1),
        "seconds_range": _ends(plan.time),
        "stages": stages,
    }


def _summary(plan: RecipePlan) -> str:
    todo = [step for step in plan.steps if step.state != DONE]
    if not todo and plan.time.seconds == 0:
        return f"Everything is done in {plan.out}."
    disk = sum(step.estimate.disk_bytes for step in todo)
    scratch = max((step.estimate.scratch_bytes for step in todo), default=0.0)
    about = f"{range_text(plan.time.least, plan.time.most)} and {bytes_text(disk + scratch)} of disk"
    text = f"About {about} in {plan.out}."
    free = free_bytes(plan.out)
    if free is not None and free < disk + scratch:
        text += f"\nWarning: only {bytes_text(free)} are free there."
    return text + _memory_warning(plan) + _load_note()


def _load_note() -> str:
    """That other work is on the machine, where it makes the times longer."""
    if free_share(threads()) >= 0.8:
        return ""
    return f"\nOther work is running here (load {load():.1f}), which the times count."


def _memory_warning(plan: RecipePlan) -> str:
    """The stage that needs most memory, where the machine has less."""
    needs = {ORIGINAL: plan.original_memory} | {step.entry.name: step.memory_bytes for step in plan.steps}
    name = max(needs, key=needs.__getitem__)
    free = free_memory()
    if needs[name] <= free:
        return ""
    amounts = f"about {bytes_text(needs[name])} of memory, and {bytes_text(free)} are free"
    return f"\nWarning: {name} needs {amounts}."


def _row(
    count: str, name: str, what: str, source: str, state: str, time: EstimatedTime, memory: float, disk: float
) -> tuple[str, ...]:
    needs = [range_text(time.least, time.most) if time.seconds else "-"]
    needs += [bytes_text(size) if size else "-" for size in (memory, disk)]
    return (count, name, what, source, state, *needs)


def _ends(time: EstimatedTime) -> list[float]:
    return [round(time.least, 1), round(time.most, 1)]


def _step_dict(step: RecipeStep) -> dict[str, Any]:
    entry = step.entry
    return {
        "number": entry.number,
        "name": entry.name,
        "stage": entry.stage,
        "title": title(entry.settings),
        "parents": list(entry.parents),
        "settings": plain(entry.settings),
        "path": str(step.folder),
        "key": step.key,
        "state": step.state,
        "evaluated": step.evaluated,
        "seconds": round(step.time.seconds, 1),
        "seconds_range": _ends(step.time),
        "memory_bytes": round(step.memory_bytes),
        "disk_bytes": round(step.estimate.disk_bytes),
        "scratch_bytes": round(step.estimate.scratch_bytes),
    }
