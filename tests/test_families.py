"""The demo's recipe on other models: tiny random Qwen2, Gemma and GPT-2, from input to report."""

import json
from importlib import import_module
from pathlib import Path

import pytest
import torch

import attar
from tests import tiny_models
from tests.marks import slow_but

RECIPE = Path(__file__).parents[1] / "recipes/quickstart.yaml"
TEXT = str(Path(json.__file__).parent)  # some files of the library: reading all of it takes seconds
QUICK = [f"evaluate={{tokens: 512, sample_tokens: 4, decode_tokens: 2, prompt_tokens: 8, data: {TEXT}}}"] + [
    f"stages.{number}.{key}={value}"
    for number, settings in {
        0: {"steps": 3},
        1: {"samples": 4, "ratio": 0.3},  # removes one of two head groups as of four
        2: {"samples": 4},
        3: {"steps": 3},
        4: {"check_tokens": 64},
        5: {"samples": 4, "check_tokens": 64},
    }.items()
    for key, value in {**settings, "data": TEXT}.items()
]


@pytest.mark.parametrize("family", slow_but(("qwen2", "gemma2", "gemma3", "gpt2"), "gpt2"))
def test_the_quickstart_recipe_runs_through(family, tmp_path, monkeypatch):
    causal = import_module("attar.distillation.tasks.causal")  # its package has a task of that name
    monkeypatch.setattr(causal, "HELD_OUT_TOKENS", 1024)
    model = tiny_models.build(family, num_hidden_layers=2)
    folder = tiny_models.save(model, tmp_path / family, dtype=torch.bfloat16)
    result = attar.run(RECIPE, tmp_path / "run", overrides=[f"model={folder}", *QUICK])
    stages = json.loads((tmp_path / "run/run.json").read_text())["stages"]
    assert stages[0]["name"] == "original" and len(stages) >= 7
    sizes = {stage["name"]: stage["measurements"]["bytes"] for stage in stages}
    assert sizes["gptq"] == sizes["rtn"] < 0.6 * sizes["original"]
    assert all(stage["measurements"]["kl_mean"] is not None for stage in stages)
    assert (tmp_path / "run/report.html").read_text().lower().startswith("<!doctype html>")
    assert result.path == tmp_path / "run"
