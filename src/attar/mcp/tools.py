"""The tools that answer at once: from headers, plans and journals."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attar.checkpoint.atomic import free_bytes
from attar.mcp.folders import Folders
from attar.mcp.results import EstimateResult, InspectResult, PlanResult, StatusResult
from attar.memory import free_memory
from attar.recipe.plan import make_plan
from attar.recipe.runfolder import default_folder
from attar.recipe.schema import load_recipe, parse_recipe
from attar.recipe.show import plan_dict
from attar.recipe.status import read_status


def inspect(folders: Folders, model: str) -> InspectResult:
    """Describe a checkpoint. Raises AttarError."""
    from attar.checkpoint.inspect import inspect

    return InspectResult.model_validate(inspect(folders.model(model)).to_dict())


def plan(folders: Folders, recipe: str, out: str | None) -> PlanResult:
    """Plan a recipe. Raises AttarError."""
    from attar.checkpoint.open import open_checkpoint

    path = folders.recipe(recipe)
    checked = load_recipe(path)
    folder = folders.inside(out or str(default_folder(path)))
    return PlanResult.model_validate(
        plan_dict(make_plan(checked, folder, open_checkpoint(folders.model(checked.model))))
    )


def estimate(folders: Folders, model: str, stage: str, settings: Mapping[str, Any]) -> EstimateResult:
    """Estimate one stage, as the plan of a recipe of that stage. Raises AttarError."""
    from attar.checkpoint.open import open_checkpoint

    folders.check(settings)
    source = folders.model(model)
    content = {"model": source, "evaluate": False, "stages": [{**settings, "stage": stage}]}
    recipe = parse_recipe(json.dumps(content), "settings")
    out = folders.roots[0] / ".estimate"
    (step,) = make_plan(recipe, out, open_checkpoint(source), fresh=True).steps
    return EstimateResult(
        seconds_range=(step.time.least, step.time.most),
        memory_bytes=round(step.memory_bytes),
        disk_bytes=round(step.estimate.disk_bytes),
        scratch_bytes=round(step.estimate.scratch_bytes),
        free_memory_bytes=free_memory(),
        free_disk_bytes=free_bytes(Path(folders.roots[0])),
    )


def status(folders: Folders, run: str) -> StatusResult:
    """What is done of a run or a sweep. Raises AttarError."""
    return StatusResult.model_validate(read_status(folders.inside(run)).to_dict())
