"""What a teacher predicts is shared by the stages of a run, and gone when it ends."""

import json
from pathlib import Path

import pytest

from attar.distillation.signals.cached import CachedTeacher
from attar.recipe.run import run_recipe
from attar.recipe.schema import parse_recipe
from tests import tiny_models

TEXT = """
model: {model}
data: {data}
evaluate: false
stages:
  - {{stage: recover, name: one, teacher: original, {settings}}}
  - {{stage: recover, name: two, teacher: original, {settings}}}
"""
SETTINGS = "steps: 3, batch_size: 2, sequence_length: 16, rows: 4, teacher_top: 8, precision: fp32"


@pytest.mark.slow
def test_the_second_stage_asks_the_teacher_nothing(tmp_path, monkeypatch):
    model = tiny_models.save(tiny_models.build("llama3"), tmp_path / "model")
    asked = []
    predict = CachedTeacher._predict

    def spy(self, rows, seeds):
        asked.append((self.store.folder.parent, len(list(self.store.folder.glob("*.safetensors")))))
        return predict(self, rows, seeds)

    monkeypatch.setattr(CachedTeacher, "_predict", spy)
    text = TEXT.format(model=model, data=Path(json.__file__).parent, settings=SETTINGS)
    run = run_recipe(parse_recipe(text, "r.yaml", ()), tmp_path / "run")
    assert [count for _, count in asked] == list(range(len(asked)))  # every file is written once
    assert {folder for folder, _ in asked} == {tmp_path / "run/.signal"}
    assert not (tmp_path / "run/.signal").exists()
    assert run.content["finished"] and (tmp_path / "run/02-two").is_dir()
