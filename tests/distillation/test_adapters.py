"""Adapters on a frozen student: where they start, what they change, and what recover writes."""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import attar
from attar.checkpoint.hashing import sha256_file
from attar.distillation.adapters import add_adapters
from attar.distillation.settings import recover_settings
from attar.distillation.stage import recover
from attar.errors import MissingExtraError, SettingsError
from attar.models.anatomy.discover import discover
from attar.models.anatomy.parts import weight_of
from attar.models.loading.adapter_files import read_adapter_config
from attar.models.loading.load import load_model
from attar.quantization.grids import IntGrid
from attar.quantization.methods.rtn import rtn
from tests import tiny_models

DATA = str(Path(json.__file__).parent)
SETTINGS = {
    "steps": 8,
    "batch_size": 2,
    "sequence_length": 16,
    "learning_rate": 3e-3,
    "precision": "fp32",
    "checkpoint_every": 4,
    "data": DATA,
    "adapter_rank": 4,
}


def linears(model):
    return [name for block in discover(model).blocks for name in block.linears]


def rounded(model, grid):
    """The model with the nearest codes of every Linear of the blocks."""
    with torch.no_grad():
        for name in linears(model):
            weight = weight_of(model.get_submodule(name))
            weight.copy_(rtn(weight.clone(), grid).dequantize())
    return model


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A teacher and its 2-bit student."""
    folder = tmp_path_factory.mktemp("models")
    teacher = tiny_models.save(tiny_models.build("llama3"), folder / "teacher")
    options = {"scheme": "W2A16", "group_size": 16, "method": "rtn", "check_tokens": 0, "data": DATA}
    return teacher, attar.quantize(teacher, folder / "w2", **options).path


def test_without_peft_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    model = tiny_models.build("qwen2")
    with pytest.raises(MissingExtraError) as raised:
        add_adapters(model, linears(model), 4)
    assert ".[adapters]" in raised.value.hint


@pytest.mark.parametrize("changes", [{"adapter_rank": -1}, {"adapter_init": "random"}])
def test_wrong_settings_are_refused(changes):
    with pytest.raises(SettingsError, match=next(iter(changes))):
        recover_settings(**changes)


def test_another_shape_has_no_error_to_start_at():
    pytest.importorskip("peft")
    student, teacher = tiny_models.build("llama3", intermediate_size=64), tiny_models.build("llama3")
    with pytest.raises(SettingsError, match="zero"):
        add_adapters(student, linears(student), 4, teacher)


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_the_start_is_the_best_fit_of_the_rounding_error(family):
    pytest.importorskip("peft")
    teacher, student = tiny_models.build(family), rounded(tiny_models.build(family), IntGrid(2, 16))
    names = linears(student)
    before = {name: weight_of(student.get_submodule(name)).detach().clone() for name in names}
    merged = add_adapters(student, names, 4, teacher).merge_and_unload()
    for name in names:
        wanted = weight_of(teacher.get_submodule(name)).detach().double()
        tail = torch.linalg.svdvals(wanted - before[name])[4:].square().sum().sqrt()
        left = (wanted - weight_of(merged.get_submodule(name)).detach()).norm()
        assert float(left) == pytest.approx(float(tail), rel=1e-4)


def test_the_zero_start_changes_nothing_and_trains_only_adapters():
    pytest.importorskip("peft")
    student = tiny_models.build("llama3")
    tokens = tiny_models.tokens(student)
    with torch.no_grad():
        wanted = student(input_ids=tokens).logits
        adapted = add_adapters(student, linears(student), 4)
        assert torch.equal(adapted(input_ids=tokens).logits, wanted)
    trained = {name for name, value in adapted.named_parameters() if value.requires_grad}
    assert trained and all("lora_" in name for name in trained)


@pytest.mark.few(1)
@pytest.mark.parametrize("init", ["zero", "error"])
def test_recover_trains_adapters_over_frozen_codes(models, init, tmp_path):
    peft = pytest.importorskip("peft")
    teacher, student = models
    settings = recover_settings(**{**SETTINGS, "steps": 24, "checkpoint_every": 24}, adapter_init=init)
    recovered = recover(student, tmp_path / "out", settings, teacher=teacher)
    base, merged = (load_model(path, dtype=torch.float32) for path in (student, recovered.path))
    for name, value in base.named_parameters():
        if name.removesuffix(".weight") not in linears(base):
            assert torch.equal(value, merged.get_parameter(name)), name
    for name in linears(base):
        change = weight_of(merged.get_submodule(name)) - weight_of(base.get_submodule(name))
        assert 0 < torch.linalg.matrix_rank(change.detach(), rtol=1e-2) <= 4
    original = load_model(teacher, dtype=torch.float32)
    tokens = tiny_models.tokens(original, batch=4, length=16)
    with torch.no_grad():
        wanted, before, after = (
            model(input_ids=tokens).logits.log_softmax(-1) for model in (original, base, merged)
        )
        kl = [
            nn.functional.kl_div(z, wanted, log_target=True, reduction="batchmean") for z in (before, after)
        ]
        assert kl[1] < 0.95 * kl[0]  # random tokens, a random model
        loaded = peft.PeftModel.from_pretrained(base, str(recovered.path / "adapter")).eval()
        assert torch.allclose(loaded(input_ids=tokens).logits.log_softmax(-1), after, atol=1e-4)
    config = read_adapter_config(recovered.path / "adapter")
    assert config["base_model_name_or_path"] == str(student) and config["r"] == 4
    assert recovered.card.settings["adapter_rank"] == 4


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_bytes(models, tmp_path, monkeypatch):
    pytest.importorskip("peft")
    from attar.walks import train as module

    teacher, student = models
    recover(student, tmp_path / "whole", recover_settings(**SETTINGS), teacher=teacher)
    step = module._step

    def deadly(run, loss, batches, number, settings):
        if number == 6:
            raise KeyboardInterrupt
        return step(run, loss, batches, number, settings)

    monkeypatch.setattr(module, "_step", deadly)
    with pytest.raises(KeyboardInterrupt):
        recover(student, tmp_path / "cut", recover_settings(**SETTINGS), teacher=teacher)
    monkeypatch.setattr(module, "_step", step)
    torch.manual_seed(99)
    recover(student, tmp_path / "cut", recover_settings(**SETTINGS), teacher=teacher)
    for name in ("model.safetensors", "adapter/adapter_model.safetensors", "adapter/adapter_config.json"):
        assert sha256_file(tmp_path / "cut" / name) == sha256_file(tmp_path / "whole" / name), name
