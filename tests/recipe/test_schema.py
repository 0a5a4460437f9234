"""Recipes: defaults, names, references, and errors that name file, line and key."""

from __future__ import annotations

from pathlib import Path

import pytest

from attar.checkpoint.open import open_checkpoint
from attar.errors import RecipeError
from attar.recipe.plan import DONE, make_plan
from attar.recipe.run import run_recipe
from attar.recipe.schema import load_recipe, parse_recipe
from attar.verbs import quickstart
from tests import tiny_models

RECIPES = Path(__file__).parents[2] / "recipes"
TEXT = """\
model: attar:tiny
data: corpus
seed: 3
evaluate: {tokens: 4096}
stages:
  - {stage: distill, layers: 4, steps: 200}
  - {stage: prune, method: heads, ratio: 0.25}
  - {stage: prune, method: neurons, ratio: 0.3, seed: 9}
  - {stage: recover, steps: 100}
  - {stage: quantize, name: rtn, scheme: W4A16, method: rtn, from: recover}
  - {stage: quantize, scheme: W4A16, method: gptq, from: recover}
"""


def test_a_recipe() -> None:
    recipe = parse_recipe(TEXT)
    assert (recipe.model, recipe.data, recipe.seed) == ("attar:tiny", "corpus", 3)
    assert [entry.name for entry in recipe.stages] == [
        "distill",
        "prune",
        "prune-2",
        "recover",
        "rtn",
        "quantize",
    ]
    assert [entry.folder for entry in recipe.stages][:3] == ["01-distill", "02-prune", "03-prune-2"]
    assert [entry.source for entry in recipe.stages] == [
        "original", "distill", "prune", "prune-2", "recover", "recover",
    ]  # fmt: skip
    assert recipe.stages[0].settings.student.layers == 4
    assert recipe.stages[4].where == "recipe:10"


@pytest.mark.parametrize("path", sorted(RECIPES.rglob("*.yaml")), ids=lambda path: path.stem)
def test_the_recipes_that_are_given_are_read(path: Path) -> None:
    recipe = load_recipe(path, ["data=whole:texts.tsv"])
    heads = any(getattr(entry.settings, "head", "none") != "none" for entry in recipe.stages)
    assert recipe.stages and (recipe.evaluate is None) == heads, "a draft head alone predicts nothing"
    assert {entry.settings.data for entry in recipe.stages} == {"whole:texts.tsv"}


def test_data_and_seed_reach_the_stages_and_the_evaluation() -> None:
    recipe = parse_recipe(TEXT)
    assert recipe.evaluate is not None
    assert (recipe.evaluate.tokens, recipe.evaluate.data, recipe.evaluate.seed) == (4096, "corpus", 3)
    assert [entry.settings.seed for entry in recipe.stages] == [3, 3, 9, 3, 3, 3]
    assert {entry.settings.data for entry in recipe.stages} == {"corpus"}


def test_every_stage_gets_the_recipes_data() -> None:
    recipe = parse_recipe("{model: a, data: corpus, stages: [{stage: prune}, {stage: export}]}")
    assert [stage.settings.data for stage in recipe.stages] == ["corpus", "corpus"]


@pytest.mark.parametrize(
    ("stages", "teacher"),
    [
        ("[{stage: distill}, {stage: prune}, {stage: prune}, {stage: recover}]", "distill"),
        ("[{stage: prune}, {stage: recover}]", "original"),
        ("[{stage: distill}, {stage: recover}]", "original"),
        ("[{stage: distill}, {stage: prune}, {stage: recover, teacher: original}]", "original"),
        ("[{stage: distill}, {stage: prune}, {stage: recover, from: distill, teacher: prune}]", "prune"),
        ("[{stage: prune}, {stage: distill, from: original}, {stage: recover, from: prune}]", "original"),
    ],
)
def test_the_teacher_of_a_recovery(stages: str, teacher: str) -> None:
    recipe = parse_recipe(f"{{model: a, stages: {stages}}}")
    assert recipe.entry("recover").teacher == teacher


def test_names_given_first_are_avoided() -> None:
    recipe = parse_recipe("{model: a, stages: [{stage: prune}, {stage: prune}, {stage: prune, name: prune}]}")
    assert [entry.name for entry in recipe.stages] == ["prune-2", "prune-3", "prune"]


def test_evaluation_on_off_and_default() -> None:
    stages = "stages: [{stage: export}]"
    assert parse_recipe(f"{{model: a, {stages}, evaluate: false}}").evaluate is None
    default = parse_recipe(f"{{model: a, {stages}}}").evaluate
    assert default == parse_recipe(f"{{model: a, {stages}, evaluate: true}}").evaluate is not None


def test_the_resolved_recipe_reads_back() -> None:
    recipe = parse_recipe(TEXT)
    again = parse_recipe(recipe.to_yaml())
    assert again.to_dict() == recipe.to_dict()
    assert [entry.settings for entry in again.stages] == [entry.settings for entry in recipe.stages]
    assert parse_recipe(again.to_yaml(), overrides=["evaluate=false"]).to_dict()["evaluate"] is False


STAGES_OF_ALL_KINDS = """
model: a
seed: 5
stages:
  - {stage: prune, method: heads, ratio: 0.25, seed: 0}
  - {stage: prune}
  - {stage: recover, teacher: prune, steps: 7, accept_licence: [gemma], reason: a letter}
  - {stage: recover, from: prune-2}
  - {stage: quantize, name: rtn, method: rtn, data: auto, from: prune}
  - {stage: quantize, method: autoround}
  - {stage: export, format: dense}
"""


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "text",
    [
        TEXT,
        STAGES_OF_ALL_KINDS,
        "{model: a, evaluate: false, stages: [{stage: prune}]}",
        *(path.read_text() for path in sorted(RECIPES.rglob("*.yaml"))),
    ],
)
def test_the_written_recipe_reads_back_without_its_defaults(text: str) -> None:
    recipe = parse_recipe(text, str(Path(__file__).parents[2] / "recipes/x.yaml"))
    again = parse_recipe(recipe.written())
    assert again.to_dict() == recipe.to_dict()
    assert [entry.settings for entry in again.stages] == [entry.settings for entry in recipe.stages]
    assert len(recipe.written().splitlines()) < len(recipe.to_yaml().splitlines()) / 2


def test_a_written_recipe_is_what_one_would_write() -> None:
    text = "model: a\nstages:\n- stage: prune\n  ratio: 0.3\n- stage: quantize\n"
    assert parse_recipe(text).written() == text


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "ratio: 0.3",
            "ration: 0.3",
            "r.yaml:8: unknown key 'ration' in stage 'prune-2'; did you mean 'ratio'?",
        ),
        ("ratio: 0.3", "ratio: 1.5", "r.yaml:8: ratio is 1.5, but must be the fraction removed"),
        ("ratio: 0.3", "ratio: lots", "r.yaml:8: ratio is 'lots', but must be a number"),
        ("method: rtn", "method: rnt", "r.yaml:10: method is 'rnt', but must be auto, rtn, "),
        ("stage: recover", "stage: recovr", "r.yaml:9: unknown stage 'recovr'; did you mean 'recover'?"),
        ("stage: recover", "stage: evaluate", "r.yaml:9: 'evaluate' is not a stage"),
        ("stage: recover", "stage: [a]", "r.yaml:9: unknown stage ['a']"),
        ("{stage: recover, steps: 100}", "{steps: 100}", "r.yaml:9: the key 'stage' is missing"),
        ("{stage: recover, steps: 100}", "recover", "r.yaml:9: a stage is a mapping"),
        (
            "from: recover}\n  - {",
            "from: recovery}\n  - {",
            "r.yaml:10: from names 'recovery', which is no earlier",
        ),
        (
            "stage: distill",
            "stage: distill, from: recover",
            "r.yaml:6: from names 'recover', which is no earlier",
        ),
        (
            "stage: recover",
            "stage: recover, teacher: rtn",
            "r.yaml:9: teacher names 'rtn', which is no earlier",
        ),
        ("name: rtn", "name: recover, method: rtn", "r.yaml:10: key 'method' is given twice"),
        ("name: rtn", "name: a/b", "r.yaml:10: name is 'a/b', but must be letters"),
        ("name: rtn", "name: original", "r.yaml:10: name is 'original', but must be letters"),
        ("name: rtn", "name: 5", "r.yaml:10: name is 5, but must be letters"),
        ("method: gptq", "name: rtn", "r.yaml:11: two stages are named 'rtn'"),
        ("tokens", "token", "r.yaml:4: unknown key 'token' in evaluate; did you mean 'tokens'?"),
        ("{tokens: 4096}", "3", "r.yaml:4: evaluate is 3, but must be false or a mapping"),
        ("seed: 3", "sead: 3", "r.yaml:3: unknown key 'sead' in the recipe; did you mean 'seed'?"),
        ("seed: 3", "seed: -1", "r.yaml:3: seed is -1, but must be a whole number, 0 or more"),
        ("seed: 3", "seed: true", "r.yaml:3: seed is True, but must be a whole number"),
        ("data: corpus", "data: 7", "r.yaml:2: data is 7, but must be text"),
        ("model: attar:tiny\n", "", "r.yaml:1: the key 'model' is missing"),
        ("model: attar:tiny", "model:", "r.yaml:1: model is None, but must be text"),
        ("stages:", "stage:", "r.yaml:5: unknown key 'stage' in the recipe; did you mean 'stages'?"),
        (TEXT, "- a", "r.yaml:1: a recipe is a mapping"),
        (TEXT, "", "r.yaml:1: a recipe is a mapping"),
        (TEXT, "model: a", "r.yaml:1: the key 'stages' is missing"),
        (TEXT, "model: a\nstages: []", "r.yaml:2: stages must be a list with at least one stage"),
        (TEXT, "model: a\nstages: {stage: prune}", "r.yaml:2: stages must be a list with at least one stage"),
    ],
)
def test_errors(old: str, new: str, message: str) -> None:
    assert old in TEXT
    with pytest.raises(RecipeError) as caught:
        parse_recipe(TEXT.replace(old, new), "r.yaml")
    assert caught.value.message.startswith(message)
    assert "\n" not in caught.value.message
    assert caught.value.exit_code == 2


def test_the_quickstart() -> None:
    recipe = load_recipe(quickstart())
    assert recipe.model == "attar:tiny"
    assert {"distill", "prune", "recover", "quantize"} <= {entry.stage for entry in recipe.stages}
    quantized = {entry.settings.method: entry for entry in recipe.stages if entry.stage == "quantize"}
    rtn, gptq = quantized["rtn"], quantized["gptq"]
    assert rtn.source == gptq.source and rtn.settings.storage.scheme == gptq.settings.storage.scheme
    assert rtn.settings.storage.group_size == gptq.settings.storage.group_size


def test_the_quickstart_is_the_file_in_the_repository() -> None:
    assert quickstart().resolve() == Path(__file__).parents[2] / "recipes" / "quickstart.yaml"


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
    positions = {}
    for seed, name in enumerate(("model", "other")):
        positions[name] = tiny_models.save(tiny_models.build("smollm", seed=seed), tmp_path / name)
    return positions


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


def test_a_file_next_to_the_recipe(recipe, models, tmp_path):
    (tmp_path / "merge.yml").write_text(
        f"merge_method: passthrough\nmodels: [{{model: {models['other']}}}, ]\n"
    )
    text = f"model: {models['model']}\nstages: [{{stage: merge, config: merge.yml}}]\n"
    recipe.write_text(text)
    assert "passthrough" in load_recipe(recipe).entry("merge").settings.config


@pytest.mark.slow
def test_it_runs_and_runs_again_when_a_model_from_outside_changes(recipe, models, tmp_path):
    result = run_recipe(load_recipe(recipe), tmp_path / "run")
    assert [stage["name"] for stage in result.content["stages"]] == ["original", "half", "merge"]
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
