"""The recipes that make students, from end to end on tiny models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attar.distillation.rollouts import teacher as rollouts
from attar.recipe.run import run_recipe
from attar.recipe.schema import load_recipe
from tests import tiny_models

RECIPES = Path(__file__).parents[2] / "recipes"
SMALL = ("steps=2", "batch_size=2", "sequence_length=24", "precision=fp32")
GROUPS = ("group_size=16",)

pytestmark = pytest.mark.slow


@pytest.fixture
def run(tmp_path):
    """Run a recipe on a tiny teacher with a few steps; the cards of its stages, by their names."""

    def call(name, *more, stages=("distill",), model=None):
        model = model or tiny_models.build("llama3", num_hidden_layers=4)
        folder = tiny_models.save(model, tmp_path / "model")
        overrides = [f"model={folder}", "evaluate.tokens=256", "evaluate.speed=false", *more]
        overrides += [f"stages.distill.{option}" for option in SMALL]
        if "quantize" in stages:
            overrides += [f"stages.quantize.{option}" for option in (*GROUPS, "samples=2")]
        record = run_recipe(load_recipe(RECIPES / f"{name}.yaml", overrides), tmp_path / "run").run
        assert [stage.name for stage in record.stages] == ["original", *stages]
        return dict(zip(stages, (stage.details for stage in record.stages[1:]), strict=True))

    return call


def test_half_the_depth(run):
    details = run("half-depth", "data=python-stdlib", stages=("distill", "quantize"))
    assert len(details["distill"]["student"]["layers"]) == 2
    assert details["distill"]["student"]["layers_by"] == "influence"


def test_minitron(run):
    sizes = ("heads=2", "neurons=32", "hidden=32")
    details = run("minitron", "data=python-stdlib", *(f"stages.distill.{size}" for size in sizes))
    cut = details["distill"]["student"]["cut"]
    assert "neurons" in cut and "channels" in cut


def test_answers_of_a_black_box(run, tmp_path):
    answers = tmp_path / "answers.jsonl"
    turns = [("user", "What is {}?"), ("assistant", "It is the number after {}.")]
    rows = (
        {"messages": [{"role": role, "content": text.format(n)} for role, text in turns]} for n in range(200)
    )
    answers.write_text("".join(json.dumps(row) + "\n" for row in rows))
    details = run("black-box", f"data={answers}", stages=("distill", "quantize"))
    assert len(details["distill"]["student"]["layers"]) == 4


def test_a_draft_model(run, monkeypatch):
    monkeypatch.setattr(rollouts, "HELD_OUT_TOKENS", 64)
    monkeypatch.setattr(rollouts.RolloutWriter, "prompt", 4)
    details = run("draft", "data=python-stdlib", "stages.distill.num_rollouts=4", "stages.distill.width=32")
    assert 0 < details["distill"]["drafting"]["acceptance"] < 1
