"""What positions count in a rounding: measured once, kept for a resumed run, the usual weights where the
model does not fit."""

import pytest
import torch
from safetensors.torch import load_file

import attar
from attar.quantization import position_weights
from attar.quantization.settings import quantize_settings
from tests import tiny_models
from tests.quantization.test_tuning import TEXTS

SMALL = {"scheme": "W3A16", "group_size": 32, "samples": 4, "batch_size": 2, "sequence_length": 32}
SMALL |= {"check_tokens": 0, "data": TEXTS, "progress": False, "effort": "fast"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("positions") / "model"
    return tiny_models.save(tiny_models.build("smollm"), folder, dtype=torch.bfloat16)


def tensors(model, out, **changes):
    attar.quantize(model, out, **{**SMALL, **changes})
    return load_file(out / "model.safetensors")


def same(some, others):
    return all(torch.equal(tensor, others[name]) for name, tensor in some.items())


@pytest.mark.few(1)
@pytest.mark.parametrize("method", [{"method": "autoround", "iterations": 3}, {}], ids=["autoround", "gptq"])
def test_positions_are_measured_unless_a_number_is_given(model, tmp_path, monkeypatch, method):
    usual = tensors(model, tmp_path / "usual", first_tokens=8.0, **method)
    assert not same(tensors(model, tmp_path / "measured", **method), usual)
    asked = []
    monkeypatch.setattr(position_weights, "free_memory", lambda device: asked.append(device) or 1000)
    assert same(tensors(model, tmp_path / "small", **method), usual) and len(asked) == 1
    assert same(tensors(model, tmp_path / "again", first_tokens=8.0, **method), usual) and len(asked) == 1


def test_where_zeros_are_chosen_all_tokens_count_once(model, tmp_path):
    plain = tensors(model, tmp_path / "plain", sparsity="2:4", first_tokens=1.0)
    assert same(tensors(model, tmp_path / "zeros", sparsity="2:4"), plain)


def no_gradient(*args, **kwargs):
    raise NotImplementedError("derivative for attar::scan is not implemented")


@pytest.mark.parametrize(
    ("name", "answer", "told"),
    [
        ("free_memory", lambda device: 1000, "1.00 kB are free"),
        ("position_weights", no_gradient, "derivative"),
    ],
)
def test_what_cannot_be_measured_is_told(model, tmp_path, monkeypatch, capsys, name, answer, told):
    monkeypatch.setattr(position_weights, name, answer)
    attar.quantize(model, tmp_path / "out", **{**SMALL, "progress": True})
    lines = "".join(capsys.readouterr())
    assert "the first 16 tokens of a row count 8 times" in lines and told in lines


def test_a_resumed_run_measures_nothing_again(model, tmp_path, monkeypatch):
    wanted = tensors(model, tmp_path / "wanted")
    monkeypatch.setattr("attar.quantization.stage.write", stop)
    with pytest.raises(KeyboardInterrupt):
        tensors(model, tmp_path / "out")
    monkeypatch.undo()
    monkeypatch.setattr(position_weights, "position_weights", stop)
    assert same(tensors(model, tmp_path / "out"), wanted)


def stop(*args, **kwargs):
    raise KeyboardInterrupt


def test_the_setting_is_a_number_or_minus_one():
    assert quantize_settings().calibration.first_weight == 8.0
    assert quantize_settings(first_tokens=3.0).calibration.first_weight == 3.0
    with pytest.raises(attar.SettingsError, match="first_tokens"):
        quantize_settings(first_tokens=-2.0)
