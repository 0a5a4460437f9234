"""The phase of tuning in the verb: codes of the rounding, tuned scales and norms in the file, or neither."""

import random

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BertForSequenceClassification

import attar
from attar.checkpoint.lineage import texts_of
from attar.data.sources import COMPRESSION
from attar.errors import DataError, SettingsError
from attar.quantization import quantization_method, tuning
from attar.quantization.calibration import batches_of
from attar.quantization.methods.tune import original_states
from attar.quantization.settings import quantize_settings, tuning_rows
from tests import tiny_models

TEXTS = [f"def area_{i}(width, height):\n    return width * height + {i}\n" * 6 for i in range(120)]
SMALL = {
    "scheme": "W2A16",
    "method": "gptq",
    "group_size": 32,
    "samples": 4,
    "batch_size": 2,
    "sequence_length": 32,
    "check_tokens": 0,
    "data": TEXTS,
    "progress": False,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tuning") / "model"
    return tiny_models.save(tiny_models.build("smollm"), folder, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def plain(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("plain") / "out"
    attar.quantize(model, out, effort="fast", **SMALL)
    return load_file(out / "model.safetensors")


def test_codes_are_those_of_the_rounding_and_scales_and_norms_are_tuned(model, plain, tmp_path):
    out = attar.quantize(model, tmp_path / "out", tune=5, **SMALL)
    tensors, told = load_file(tmp_path / "out/model.safetensors"), out.card.details["tuning"]
    assert told["taken"] and told["after"] < told["before"]
    changed = {name for name, tensor in plain.items() if not torch.equal(tensor, tensors[name])}
    assert {name.rpartition(".")[2] for name in changed} == {"weight_scale", "weight"}
    assert all("norm" in name for name in changed if name.endswith(".weight"))
    assert {name: (t.dtype, t.shape) for name, t in plain.items()} == {
        n: (t.dtype, t.shape) for n, t in tensors.items()
    }
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert torch.isfinite(loaded(torch.arange(5, 20)[None]).logits).all()
    texts = [text["split"] for text in out.card.details.get("texts", [])]
    assert not texts or "train" in texts


def test_what_is_no_nearer_is_not_taken(model, plain, tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "RATES", {2: 5.0})
    out = attar.quantize(model, tmp_path / "out", tune=1, **SMALL)
    assert out.card.details["tuning"]["taken"] is False
    for name, tensor in load_file(tmp_path / "out/model.safetensors").items():
        assert torch.equal(tensor, plain[name]), name


def test_the_text_of_a_tuning_behind_rounding_to_nearest_is_recorded(model, tmp_path):
    options = {**SMALL, "method": "rtn", "tune": 1, "data": "auto"}
    out = attar.quantize(model, tmp_path / "out", **options)
    assert out.card.details["tuning"]["steps"] == 1
    (text,) = texts_of(out)
    assert text["stage"] == "quantize" and text["split"] == COMPRESSION
    options = {**SMALL, "method": "rtn", "tune": 0}
    assert not texts_of(attar.quantize(model, tmp_path / "alone", **options))


def test_a_step_is_a_row_or_short_rows_together():
    assert tuning_rows(128, 32) == (8, 256, 128 * 8 + 256)
    assert tuning_rows(64, 512) == (1, 16, 80)
    assert tuning_rows(32, 4096) == (1, 8, 40)
    assert tuning_rows(0, 512) == (0, 0, 0)


def test_the_text_of_the_tuning_is_not_what_the_rounding_read(model, tmp_path, monkeypatch):
    read, calibrated = [], []

    def states(model, rows, batch):
        read.append(rows)
        return original_states(model, rows, batch)

    monkeypatch.setattr(tuning, "original_states", states)
    monkeypatch.setattr(
        quantization_method, "batches_of", lambda *given: calibrated.extend(batches_of(*given)) or calibrated
    )
    digits = random.Random(0)  # text in which no row repeats
    texts = [" ".join(str(digits.random()) for _ in range(20)) for _ in range(120)]
    attar.quantize(model, tmp_path / "out", tune=2, **{**SMALL, "data": texts})
    rows, tuned = torch.cat(calibrated), read[0]
    assert len(rows) == 4 and len(tuned) > 64
    assert not (rows[:, None] == tuned[None]).all(-1).any()


def test_groups_in_order_are_refused():
    with pytest.raises(SettingsError, match="act_order"):
        quantize_settings(tune=4, act_order="group")


def test_a_model_without_logits_of_tokens_is_refused_before_any_work(tmp_path):
    classifier = BertForSequenceClassification(tiny_models.build("bert").config)
    folder = tiny_models.save(classifier, tmp_path / "bert")
    with pytest.raises(SettingsError, match="tune"):
        attar.quantize(folder, tmp_path / "out", tune=2, **SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["bert"]


def test_one_row_of_text_is_refused(model, tmp_path, monkeypatch):
    plain = tuning.pack
    monkeypatch.setattr(tuning, "pack", lambda *given, rows, **more: plain(*given, rows=1, **more))
    with pytest.raises(DataError, match="one row"):
        attar.quantize(model, tmp_path / "out", tune=2, **SMALL)
