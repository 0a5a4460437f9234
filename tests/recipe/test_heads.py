"""A draft head as a stage: it is no model that later stages take, and has no quality of its own."""

import json
from pathlib import Path

import pytest

from attar.checkpoint.open import open_checkpoint
from attar.distillation.rollouts import teacher
from attar.errors import RecipeError
from attar.recipe.plan import make_plan
from attar.recipe.run import run_recipe
from attar.recipe.schema import load_recipe, parse_recipe
from attar.recipe.shapes import after, shape_of
from tests import tiny_models

HEAD = """
model: {model}
data: {data}
evaluate: {{tokens: 64, sequence_length: 32, speed: false}}
stages:
  - {{stage: train-head, name: head, head: {kind}, drafts: 2, steps: 4, batch_size: 2, sequence_length: 32,
      num_rollouts: 4}}
  - {{stage: quantize, method: rtn, check_tokens: 0}}
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.setattr(teacher, "HELD_OUT_TOKENS", 64)
    model = tiny_models.save(tiny_models.build("llama3"), tmp_path / "model")
    return HEAD.format(model=model, data=Path(json.__file__).parent, kind="medusa")


@pytest.mark.slow
def test_later_stages_take_the_model_and_the_head_is_not_evaluated(recipe, tmp_path):
    result = run_recipe(parse_recipe(recipe), tmp_path / "run")
    _, head, quantized = result.content["stages"]
    assert quantized["parents"] == ["original"] and quantized["measurements"]["kl_mean"] > 0
    assert head["measurements"] == {} and head["bytes"] > 0
    assert "head" in result.table() and "quantize" in result.table()
    assert result.run.last.name == "quantize"
    assert "head" in result.report.read_text()


def test_a_head_is_refused_where_a_model_is_wanted(recipe):
    text = recipe.replace("method: rtn", "method: rtn, from: head")
    with pytest.raises(RecipeError, match=r"from names 'head', a draft head"):
        parse_recipe(text)


def test_the_estimate_knows_the_size_of_the_head(recipe, tmp_path):
    plan = make_plan(parse_recipe(recipe), tmp_path / "run", open_checkpoint(tmp_path / "model"))
    entry = plan.recipe.stages[0]
    shape = after(entry, shape_of(plan.original))
    assert shape.parameters == 2 * (64 * 64 + 320 * 64)
    assert plan.steps[0].estimate.disk_bytes == 2 * shape.parameters
    assert plan.steps[0].estimate.time.plain > 0 and plan.steps[0].evaluation_key == ""


def test_the_recipe_of_the_repository_is_one():
    entry = load_recipe(Path(__file__).parents[2] / "recipes" / "head.yaml").stages[0]
    assert entry.settings.head == "medusa" and not entry.makes_model
