"""recipes/families: each says for whom it is and what was measured, is planned and run on a tiny model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import attar
from attar.checkpoint.open import open_checkpoint
from attar.recipe.plan import make_plan
from attar.recipe.schema import load_recipe
from attar.recipe.show import plan_text
from tests import tiny_models

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes/families").glob("*.yaml"))
WIDE = {"hidden_size": 128, "intermediate_size": 256}  # groups of 128
TINY = {
    "dense": ("smollm", WIDE),
    "mixture": ("qwen3_moe", {"hidden_size": 128, "moe_intermediate_size": 128}),
    "encoder": ("bert", {**WIDE, "vocab_size": tiny_models.VOCABULARY + 2}),
    "hybrid": ("granitemoehybrid", {}),
}


def comment(path: Path) -> str:
    """The block of comment at the head, on one line."""
    lines = path.read_text().split("\nmodel:")[0].splitlines()
    assert all(line.startswith("#") for line in lines), path
    return " ".join(line.lstrip("# ") for line in lines)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    for kind, (family, changes) in TINY.items():
        save = tiny_models.save_encoder if kind == "encoder" else tiny_models.save
        save(tiny_models.build(family, **changes), folder / kind)
    return folder


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_says_for_whom_it_is_and_what_was_measured(path: Path) -> None:
    text = comment(path)
    assert text.startswith("For whom: ") and " What it does: " in text
    assert re.search(r" (Measured|Not measured): ", text) and "not measured" in text.lower(), path
    assert f"attar run recipes/families/{path.name} -o runs/" in text
    for name in re.findall(r"(?:docs|benchmarks|recipes)/[\w/-]+\.(?:md|py|yaml)", text):
        assert (ROOT / name).is_file(), name
    if " Measured: " in text:
        assert "docs/" in text or "CHANGELOG" in text
    assert f"](../recipes/families/{path.name})" in (ROOT / "docs/which-recipe.md").read_text()


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_page_lists_the_other_recipes(path: Path) -> None:
    assert f"](../recipes/{path.name})" in (ROOT / "docs/which-recipe.md").read_text()


def test_each_is_planned_on_its_family(models: Path, tmp_path: Path) -> None:
    for path in RECIPES:
        model = models / path.stem.partition("-")[0]
        plan = make_plan(load_recipe(path, [f"model={model}"]), tmp_path / "run", open_checkpoint(model))
        assert len(plan.steps) == len(plan.recipe.stages)
        for stage in plan.recipe.stages:
            assert stage.name in plan_text(plan)


@pytest.mark.slow
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_each_runs_on_its_family(path: Path, models: Path, tmp_path: Path) -> None:
    model = models / path.stem.partition("-")[0]
    text = ROOT / "LICENSE"  # which stays: on another a random model may repeat itself
    few = [f"model={model}", f"data={text}", "evaluate.tokens=256", "evaluate.sequence_length=64"]
    for number, stage in enumerate(load_recipe(path).stages):
        few.append(f"stages.{number}.sequence_length=64")
        if hasattr(stage.settings, "check_tokens"):
            few.append(f"stages.{number}.check_tokens=64")
        few.append(f"stages.{number}.samples=8")
    result = attar.run(path, tmp_path / "run", overrides=few)
    assert (tmp_path / "run/report.html").is_file() and "quality kept" in result.table()
