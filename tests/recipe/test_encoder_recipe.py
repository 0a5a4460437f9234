"""The recipe of an encoder from end to end: the classifier is measured, distilled, quantized, and loads."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from attar.models.classifiers import with_classifier
from attar.recipe.run import run_recipe
from attar.recipe.schema import load_recipe
from tests import tiny_models

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.slow
def test_the_encoder_recipe(tmp_path: Path) -> None:
    model = with_classifier(tiny_models.build("bert", vocab_size=322), ["bad", "good"])
    folder = tiny_models.save_encoder(model, tmp_path / "classifier")
    data = tmp_path / "train.tsv"
    data.write_text("".join(f"def f{i}(x): return x\t{('bad', 'good')[i % 2]}\n" for i in range(300)))
    overrides = [
        f"model={folder}",
        f"data={data}",
        f"evaluate.data=whole:{data}",
        "stages.distill.steps=2",
        "stages.distill.layers=2",
        "stages.distill.precision=fp32",
    ]
    run = run_recipe(load_recipe(RECIPES / "encoder.yaml", overrides), tmp_path / "run").run
    distilled, quantized = run.stages[1:]
    assert [stage.text("task") for stage in run.stages] == ["classification"] * 3
    assert distilled.number("quality_kept") is not None and distilled.number("f1") is not None
    assert "distill" in (quantized.text("held_out_note") or "")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run/01-distill")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run/01-distill")
    assert loaded(**tokenizer("def f1", return_tensors="pt")).logits.shape == (1, 2)
    assert loaded.config.id2label[1] == "good" and loaded.config.num_hidden_layers == 2
