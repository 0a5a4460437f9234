"""``--set``: values, paths, and errors that name the override."""

from __future__ import annotations

import pytest

from attar.errors import RecipeError
from attar.recipe.schema import parse_recipe

TEXT = """\
model: attar:tiny
evaluate: false
stages:
  - {stage: prune, method: heads, ratio: 0.25}
  - {stage: prune, method: neurons, ratio: 0.25}
  - {stage: quantize, name: gptq}
"""


def test_stages_are_numbered_from_one_and_have_names() -> None:
    recipe = parse_recipe(
        TEXT, overrides=["stages.1.ratio=0.3", "stages.prune.ratio=0.1", "stages.gptq.group_size=32"]
    )
    assert [entry.settings.options.ratio for entry in recipe.stages[:2]] == [0.1, 0.3]
    assert recipe.entry("gptq").settings.storage.group_size == 32


def test_values_are_yaml() -> None:
    changes = [
        "model=org/name@main",
        "seed=4",
        "stages.gptq.ignore=[a, 're:b.*']",
        "stages.2.damp=1e-3",
        "data = x=y",
    ]
    recipe = parse_recipe(TEXT, overrides=changes)
    assert (recipe.model, recipe.seed, recipe.data) == ("org/name@main", 4, "x=y")
    assert recipe.stages[2].settings.storage.ignore == ("a", "re:b.*")
    assert recipe.stages[2].settings.rounding.damp == 0.001


def test_what_is_absent_or_false_gives_way() -> None:
    recipe = parse_recipe(TEXT, overrides=["evaluate.tokens=100"])
    assert recipe.evaluate is not None and recipe.evaluate.tokens == 100


def test_the_last_change_counts() -> None:
    recipe = parse_recipe(TEXT, overrides=["seed=1", "seed=2"])
    assert recipe.seed == 2


def test_a_whole_stage() -> None:
    recipe = parse_recipe(TEXT, overrides=["stages.0={stage: distill, layers: 2}"])
    assert recipe.stages[0].stage == "distill"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("stages.1.ratio", "not of the form key=value"),
        ("=3", "not of the form key=value"),
        ("stages..ratio=3", "not of the form key=value"),
        ("stages.3.ratio=0.3", "no stage 3"),
        ("stages.prun.ratio=0.3", "no stage 'prun'; did you mean 'prune'?"),
        ("stages.1.ration=0.3", "unknown key 'ration' in stage 'prune-2'; did you mean 'ratio'?"),
        ("stages.1.ratio=2", "ratio is 2.0, but must be"),
        ("stages.1.ratio=lots", "ratio is 'lots', but must be a number"),
        ("stages.1.ratio=[1", "not valid YAML"),
        ("modle=x", "unknown key 'modle' in the recipe; did you mean 'model'?"),
        ("model.name=x", "'attar:tiny' has no keys"),
        ("stages=3", "stages must be a list"),
    ],
)
def test_errors(change: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(TEXT, "r.yaml", [change])
    assert caught.value.message.startswith(f"--set {change}: {message}")
