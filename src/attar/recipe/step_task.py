"""One stage of a run on a worker: the recipe as text, the folder and the stage's name, all of them JSON.

The worker plans the recipe again: what is done by now is done. A step whose key differs there from the
driver's would be another checkpoint, and is refused.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from attar.checkpoint.open import open_checkpoint
from attar.errors import OutputError
from attar.progress import SILENT, Progress, Terminal
from attar.recipe.plan import RecipePlan, make_plan
from attar.recipe.run import RecipeRun, Tools
from attar.recipe.runfolder import RECIPE, SIGNAL
from attar.recipe.schema import ORIGINAL, parse_recipe
from attar.recipe.stages import load
from attar.tracking.track import TrackedProgress, untracked
from attar.tracking.track import track as follow

TOOLS = Tools()
FUNCTION = "attar.recipe.step_task:make_step"


def arguments(plan: RecipePlan, stage: str, progress: Progress, group: str = "") -> dict[str, Any]:
    """The arguments of :func:`make_step` for a stage of a plan, or for "original".

    Args:
        group: of a sweep's runs where they are tracked.
    """
    key = plan.original_key if stage == ORIGINAL else plan.step(stage).key
    return {
        "recipe": plan.recipe.to_yaml(),
        "name": str(plan.out / RECIPE),
        "out": str(plan.out.absolute()),
        "stage": stage,
        "key": key,
        "folder": str(Path.cwd()),
        "quiet": untracked(progress) is SILENT,
        "track": progress.names if isinstance(progress, TrackedProgress) else [],
        "group": group,
    }


def make_step(
    *,
    recipe: str,
    name: str,
    out: str,
    stage: str,
    key: str,
    folder: str,
    quiet: bool,
    track: Sequence[str] = (),
    group: str = "",
) -> None:
    """Make and measure the checkpoint of a stage, unless that is done.

    Args:
        recipe: as YAML with all defaults; ``name`` is its file in errors.
        folder: of the driver; relative paths of the recipe start there.
        track: names of trackers.

    Raises:
        OutputError: this machine does not see the run's folder, or would make another checkpoint.
        AttarError: of the stage.
    """
    if not Path(out).is_dir() or not Path(folder).is_dir():
        missing = folder if Path(out).is_dir() else out
        hint = "a run on several machines needs a folder that all of them see"
        raise OutputError(f"{missing}: {os.uname().nodename} does not see this folder", hint=hint)
    os.chdir(folder)
    checked = parse_recipe(recipe, name)
    plan = make_plan(checked, Path(out), open_checkpoint(checked.model))
    actual = plan.original_key if stage == ORIGINAL else plan.step(stage).key
    if actual != key:
        hint = "the same version of attar, the same text and the same model on all machines"
        raise OutputError(f"{stage}: {os.uname().nodename} would make another checkpoint", hint=hint)
    tools = replace(TOOLS, make_reference=f"{__name__}:reference_of")
    progress: Progress = SILENT if quiet else Terminal()
    if track:
        progress = follow(*track, progress=progress, group=group)
    run = RecipeRun(plan, progress, tools, signal=f"{SIGNAL}/{stage}")
    run.make_and_measure(stage)
    if run.reference is not None and not run.reference.kept:
        _kept.cache_clear()


def reference_of(model: str, settings: Any, *, progress: Progress) -> Any:
    """The reference of an evaluation, kept for the next one with the same settings."""
    del progress
    return _kept(model, settings)


@lru_cache(maxsize=1)
def _kept(model: str, settings: Any) -> Any:
    return load(TOOLS.make_reference)(model, settings, progress=SILENT)
