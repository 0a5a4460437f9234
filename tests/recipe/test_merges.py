"""Merges in recipes: models named by stage, errors with lines, what makes the stage run again."""

import pytest

from attar.checkpoint.open import open_checkpoint
from attar.errors import RecipeError
from attar.recipe.plan import DONE, make_plan
from attar.recipe.run import run_recipe
from attar.recipe.schema import load_recipe, parse_recipe
from tests import tiny_models

RECIPE = """\
model: {model}
evaluate: false
stages:
  - {{stage: export, name: half, format: dense, dtype: float16}}
  - stage: merge
    config:
      merge_method: linear
      models:
        - {{model: half, parameters: {{weight: 0.5}}}}
        - {{model: {other}, parameters: {{weight: 0.5}}}}
      dtype: float32
"""


@pytest.fixture
def models(tmp_path):
    places = {}
    for seed, name in enumerate(("model", "other")):
        places[name] = tiny_models.save(tiny_models.build("smollm", seed=seed), tmp_path / name)
    return places


@pytest.fixture
def recipe(models, tmp_path):
    path = tmp_path / "recipe.yml"
    path.write_text(RECIPE.format(**models))
    return path


def test_a_merge_reads_the_stages_that_its_config_names(recipe):
    entry = load_recipe(recipe).entry("merge")
    assert entry.parents == ("half",) and entry.source == "half"


def test_the_resolved_recipe_reads_back_equal(recipe, tmp_path):
    first = load_recipe(recipe)
    (tmp_path / "resolved.yml").write_text(first.to_yaml())
    again = load_recipe(tmp_path / "resolved.yml")
    assert again.entry("merge").settings == first.entry("merge").settings
    assert again.entry("merge").parents == ("half",)


def test_a_file_beside_the_recipe(recipe, models, tmp_path):
    (tmp_path / "merge.yml").write_text(
        f"merge_method: passthrough\nmodels: [{{model: {models['other']}}}, ]\n"
    )
    text = f"model: {models['model']}\nstages: [{{stage: merge, config: merge.yml}}]\n"
    recipe.write_text(text)
    assert "passthrough" in load_recipe(recipe).entry("merge").settings.config


def test_it_runs_and_runs_again_when_a_model_from_outside_changes(recipe, models, tmp_path):
    made = run_recipe(load_recipe(recipe), tmp_path / "run")
    assert [stage["name"] for stage in made.content["stages"]] == ["original", "half", "merge"]
    card = open_checkpoint(tmp_path / "run/02-merge").card
    assert sorted(parent.name for parent in card.parents) == ["01-half", "other"]
    assert [step.state for step in _plan(recipe, models, tmp_path).steps] == [DONE, DONE]
    tiny_models.save(tiny_models.build("smollm", seed=5), models["other"])
    assert [step.state for step in _plan(recipe, models, tmp_path).steps] == [DONE, "changed"]


def _plan(recipe, models, tmp_path):
    return make_plan(load_recipe(recipe), tmp_path / "run", open_checkpoint(models["model"]))


WRONG = {
    "unknown parameter": ("weight: 0.5", "wieght: 0.5", r"recipe:9: .*'wieght'.*'weight'"),
    "unknown method": ("linear", "liner", r"recipe:7: .*'liner'.*'linear'"),
    "no config": ("    config:\n", "    compat: paper\n    confg:\n", r"needs the key 'config'"),
    "a source": ("    config:\n", "    from: half\n    config:\n", r"recipe:6: stage 'merge' has no 'from'"),
    "unknown setting": (
        "    config:\n",
        "    sede: 1\n    config:\n",
        r"recipe:6: unknown key 'sede'.*'seed'",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_the_line(name):
    old, new, message = WRONG[name]
    text = RECIPE.format(model="attar:tiny", other="attar:tiny").replace(old, new, 1)
    with pytest.raises(RecipeError, match=message):
        parse_recipe(text)
