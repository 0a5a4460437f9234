"""The verbs distill and recover on tiny models: they learn, they save what loads, they refuse what cannot be
compared."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from attar.distillation.settings import distill_settings, recover_settings
from attar.distillation.stage import distill, recover
from attar.errors import ModelError, SettingsError
from tests import tiny_models

SMALL = {
    "steps": 12,
    "batch_size": 4,
    "sequence_length": 32,
    "learning_rate": 3e-3,
    "precision": "fp32",
    "checkpoint_every": 6,
    "data": str(Path(json.__file__).parent),  # a few files: the whole library takes seconds to read
}


def save(family, tmp_path, name=None, **changes):
    return tiny_models.save(tiny_models.build(family, **changes), tmp_path / (name or family))


def test_student_has_the_layers_and_comes_closer_to_its_teacher(tmp_path):
    folder = save("llama3", tmp_path)
    student = distill(folder, tmp_path / "out", distill_settings(layers=2, **{**SMALL, "steps": 60}))
    assert student.config["num_hidden_layers"] == 2
    AutoModelForCausalLM.from_pretrained(student.path)
    curve = [row["loss"] for row in student.card.details["curve"] if "loss" in row]
    assert curve[-1] < 0.8 * curve[0]
    assert student.card.details["layer_map"] == [0, 2]
    assert {parent.role for parent in student.card.parents} == {"weights", "signal"}


def test_recover_keeps_the_shape_and_comes_closer(tmp_path):
    teacher = save("smollm", tmp_path, "teacher")
    pruned = save("smollm", tmp_path, "pruned", intermediate_size=64)
    recovered = recover(pruned, tmp_path / "out", recover_settings(**{**SMALL, "steps": 60}), teacher=teacher)
    assert recovered.config["intermediate_size"] == 64
    curve = [row["loss"] for row in recovered.card.details["curve"] if "loss" in row]
    assert curve[-1] < 0.8 * curve[0]


def test_too_many_layers_and_a_task_that_does_not_suit_are_refused(tmp_path):
    with pytest.raises(SettingsError, match="between 1 and the teacher's 3"):
        distill(save("llama3", tmp_path), tmp_path / "out", distill_settings(layers=9, **SMALL))
    with pytest.raises(ModelError, match="not a causal"):
        distill(save("bert", tmp_path), tmp_path / "out", distill_settings(task="causal", **SMALL))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bert", "llama3"]


def test_documents_can_be_kept_apart(tmp_path):
    text = tmp_path / "lines.jsonl"
    text.write_text("".join(json.dumps({"text": f"line number {i} of the text"}) + "\n" for i in range(50)))
    settings = recover_settings(**{**SMALL, "steps": 4, "data": str(text)}, packing="separate")
    recovered = recover(save("smollm", tmp_path), tmp_path / "out", settings, teacher=tmp_path / "smollm")
    assert recovered.card.details["steps"] == 4
