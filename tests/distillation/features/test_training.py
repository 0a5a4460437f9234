"""Distillation with features from folder to folder: they fall, resume, keep zeros, leave nothing behind."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from attar.checkpoint.hashing import sha256_file
from attar.distillation.feature_settings import FEATURE_NAMES
from attar.distillation.settings import distill_settings, recover_settings
from attar.distillation.stage import distill, recover
from attar.errors import SettingsError, UsageError
from attar.walks import train as module
from tests import tiny_models
from tests.cases import mostly_slow
from tests.log_lines import LogLines

SETTINGS = {
    "steps": 8,
    "batch_size": 4,
    "sequence_length": 32,
    "learning_rate": 3e-3,
    "precision": "fp32",
    "data": str(Path(json.__file__).parent),
}


def save(family, folder, **changes):
    return tiny_models.save(tiny_models.build(family, **changes), folder)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return save("smollm", tmp_path_factory.mktemp("models") / "teacher")


@pytest.fixture(autouse=True)
def little_held_out_text(monkeypatch):
    module = sys.modules["attar.distillation.tasks.causal"]  # its package has a task of that name
    monkeypatch.setattr(module, "HELD_OUT_TOKENS", 256)


def losses(checkpoint):
    return [row["loss"] for row in checkpoint.card.details["curve"] if "loss" in row]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", mostly_slow(FEATURE_NAMES, ["hidden", "attention", "relation"]))
def test_the_feature_falls_and_leaves_no_projection(name, teacher, tmp_path):
    """By the feature alone; of a narrow student, but for what is flat in it."""
    options = {
        "features": (f"{name}:2",),
        "objective": "none",
        "width": 0 if name.startswith(("attention", "qkv")) else 32,
    }
    settings = distill_settings(layers=2, **options, **{**SETTINGS, "steps": 40})
    student = distill(teacher, tmp_path / "out", settings)
    curve = losses(student)
    assert curve[-1] < (0.96 if name in ("distance", "angle") else 0.8) * curve[0]
    names = set(load_file(student.path / "model.safetensors"))
    assert names and all(name.startswith("model.") for name in names)
    assert "eager" not in (student.path / "config.json").read_text()


@pytest.mark.slow
def test_hard_labels_with_features_run_the_teacher_for_its_insides_alone(teacher, tmp_path):
    options = {**SETTINGS, "steps": 1, "layers": 1}
    first = [
        losses(distill(teacher, tmp_path / f"{number}", distill_settings(**options, **more)))[0]
        for number, more in enumerate(
            (
                {"alpha": 0.0},
                {"features": ("hidden",), "objective": "none"},
                {"features": ("hidden",), "objective": "hard"},
            )
        )
    ]
    assert first[2] == pytest.approx(first[0] + first[1], rel=1e-5) and min(first) > 0.01


def test_a_learned_map_is_in_the_card_and_can_be_given_by_hand(teacher, tmp_path):
    options = {**SETTINGS, "layers": 2, "features": ("hidden", "qkv")}
    lines = LogLines()
    student = distill(
        teacher, tmp_path / "out", distill_settings(**options, feature_map="learned"), progress=lines
    )
    learned = student.card.details["feature_map"]
    assert [len(row) for row in learned["weights"]] == [3, 3]
    assert all(sum(row) == pytest.approx(1.0, abs=1e-3) for row in learned["weights"])
    assert learned["weights"][0] != [0.25, 0.5, 0.25]
    assert any(f"--feature-map {learned['hard']}" in line for line in lines.lines)
    again = distill(teacher, tmp_path / "hard", distill_settings(**options, feature_map=learned["hard"]))
    assert "feature_map" not in again.card.details


@pytest.mark.slow
@pytest.mark.parametrize("patience", [0, 9])
def test_a_killed_run_ends_with_the_same_bytes(patience, teacher, tmp_path, monkeypatch):
    settings = distill_settings(
        layers=2,
        width=32,
        features=("hidden", "embeddings:0.5"),
        checkpoint_every=4,
        evaluate_every=2,
        patience=patience,
        **SETTINGS,
    )
    whole = distill(teacher, tmp_path / "a/out", settings)
    measure = module._measure

    def killed(run, held_out, history, arguments):
        if history.step == 6:
            raise KeyboardInterrupt
        return measure(run, held_out, history, arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "_measure", killed)
        distill(teacher, tmp_path / "b/out", settings)
    resumed = distill(teacher, tmp_path / "b/out", settings)
    for file in ("model.safetensors", "config.json"):
        assert sha256_file(whole.path / file) == sha256_file(resumed.path / file)


@pytest.mark.slow
def test_recovery_with_projected_features_keeps_zeros(tmp_path):
    model = tiny_models.build("smollm")
    weight = model.model.layers[0].mlp.up_proj.weight
    with torch.no_grad():
        weight.mul_((torch.arange(weight.shape[1]) % 2).float())
    pruned = tiny_models.save(model, tmp_path / "pruned")
    teacher = tiny_models.save(tiny_models.build("smollm", hidden_size=32), tmp_path / "narrow")
    settings = recover_settings(features=("hidden",), keep_zeros="true", accumulate=2, **SETTINGS)
    recovered = recover(pruned, tmp_path / "out", settings, teacher=teacher)
    name = "model.layers.0.mlp.up_proj.weight"
    after = load_file(recovered.path / "model.safetensors")[name]
    assert not after[:, ::2].any() and not torch.equal(after, weight.detach())


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"precision": "bf16"}, {"gradient_checkpointing": True}, {"optimizer": "muon"}]
)
def test_features_work_with(options, teacher, tmp_path):
    settings = distill_settings(
        layers=2, width=32, features=FEATURE_NAMES, **{**SETTINGS, "steps": 3, **options}
    )
    curve = losses(distill(teacher, tmp_path / "out", settings))
    assert all(value == value for value in curve) and len(curve) == 3


@pytest.mark.slow
def test_recovery_by_adapters_with_features(teacher, tmp_path):
    pytest.importorskip("peft")
    pruned = save("smollm", tmp_path / "pruned", seed=1)
    settings = recover_settings(features=("hidden", "attention"), adapter_rank=4, **{**SETTINGS, "steps": 20})
    curve = losses(recover(pruned, tmp_path / "out", settings, teacher=teacher))
    assert curve[-1] < curve[0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"features": ("hiden",)}, "features is 'hiden', but must be one of hidden, hidden-relative"),
        ({"features": ("hidden:x",)}, "a positive weight, as hidden:0.5"),
        ({"features": ("hidden:-1",)}, "a positive weight"),
        ({"features": ("hidden", "hidden:2")}, "hidden once alone"),
        ({"features": ("hidden",), "teacher_top": 8}, "teacher_top is 8, but must be 0 with features"),
        (
            {"features": ("hidden",), "objective": "sft"},
            "features is 'hidden', but must be left out with objective sft",
        ),
        ({"feature_map": "even"}, "uniform, last, top, learned, or pairs as 0:2,1:5"),
        ({"feature_map": "0:1:2"}, "uniform, last, top, learned, or pairs as 0:2,1:5"),
        ({"objective": "none"}, "one of predictions without features"),
    ],
)
def test_settings_that_are_refused(options, words):
    with pytest.raises(SettingsError, match=words):
        distill_settings(**options)


def test_features_need_a_teacher(tmp_path):
    with pytest.raises(UsageError, match="needs a teacher"):
        recover(
            save("smollm", tmp_path / "a"),
            tmp_path / "out",
            recover_settings(features=("hidden",), alpha=0.0),
        )
