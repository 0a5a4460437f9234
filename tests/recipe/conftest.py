"""Recipes of stand-in stages over a checkpoint of a few hundred weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from attar.recipe import stages
from attar.recipe.machine import Rates
from attar.recipe.run import RunResult, run_recipe
from attar.recipe.schema import Recipe, parse_recipe
from tests.recipe import recipe_fakes


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The stand-ins in place of the real stages."""
    monkeypatch.setattr(stages, "STAGES", recipe_fakes.STAGES)
    for module in ("schema", "plan", "run"):
        monkeypatch.setattr(f"attar.recipe.{module}.STAGES", recipe_fakes.STAGES)
    monkeypatch.setattr("attar.recipe.schema.EVALUATE_SETTINGS", "tests.recipe.recipe_fakes:MeasureSettings")
    monkeypatch.setattr("attar.recipe.plan.EVALUATE_VERSION", "tests.recipe.recipe_fakes:VERSION")
    monkeypatch.setattr("attar.recipe.plan.measure_rates", lambda: Rates(1e9, 1e9, 1e6))
    monkeypatch.setattr("attar.recipe.show.free_share", lambda wanted: 1.0)  # as on an idle machine
    monkeypatch.setattr("os.fsync", lambda descriptor: None)  # no power cut during a test
    monkeypatch.setattr("gc.collect", lambda: 0)  # nothing here is large
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    recipe_fakes.CALLS.clear()
    recipe_fakes.FAULTS.clear()
    return recipe_fakes


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The model that recipes start from."""
    return recipe_fakes.make_model(tmp_path / "base")


TEXT = """
model: {model}
data: {data}
stages:
  - {{stage: prune, amount: 1}}
  - {{stage: prune, amount: 2}}
  - {{stage: recover, amount: 3}}
  - {{stage: prune, name: side, amount: 4, from: prune}}
"""


@pytest.fixture
def recipe(fakes: Any, model: Path, tmp_path: Path) -> Callable[..., Recipe]:
    """Four stages, the last one a branch."""
    (tmp_path / "text.txt").write_text("some text")

    def make(*overrides: str) -> Recipe:
        return parse_recipe(TEXT.format(model=model, data=tmp_path / "text.txt"), "recipe.yaml", overrides)

    return make


@pytest.fixture
def run(recipe: Callable[..., Recipe], tmp_path: Path) -> Callable[..., RunResult]:
    """Run the recipe in ``tmp_path / "run"``."""

    def call(*overrides: str, fresh: bool = False) -> RunResult:
        return run_recipe(recipe(*overrides), tmp_path / "run", fresh=fresh, tools=recipe_fakes.TOOLS)

    return call


def calls_of(kinds: Iterable[str]) -> list[str]:
    """The noted calls of these kinds."""
    return [call for call in recipe_fakes.CALLS if call.split()[0] in kinds]
