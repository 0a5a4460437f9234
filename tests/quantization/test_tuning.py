"""The phase of tuning in the verb: codes of the rounding, tuned scales and norms in the file, or neither."""

import random

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BertForSequenceClassification

import attar
from attar import memory
from attar.checkpoint import open_checkpoint
from attar.errors import DataError, MemoryNeededError, SettingsError
from attar.progress import SILENT, Silent
from attar.quantization import quantization_method, tuning
from attar.quantization.calibration import batches_of
from attar.quantization.methods.tune import original_states
from attar.quantization.plan import plan
from attar.quantization.settings import quantize_settings, tuning_rows
from tests import tiny_models

TEXTS = [f"def area_{i}(width, height):\n    return width * height + {i}\n" * 6 for i in range(120)]
SMALL = {
    "scheme": "W2A16",
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


@pytest.mark.parametrize(
    ("options", "bits", "length", "steps"),
    [
        ({}, 3, 512, 64),
        ({}, 4, 512, 0),
        ({"method": "rtn"}, 2, 512, 0),
        ({"method": "qat"}, 2, 512, 0),
        ({"effort": "fast"}, 2, 512, 0),
        ({"effort": "good"}, 4, 32, 128),
        ({"effort": "good"}, 4, 256, 128),
        ({"effort": "good"}, 4, 4096, 32),
        ({"effort": "best", "method": "rtn"}, 8, 512, 256),
        ({"effort": "best", "tune": 5}, 2, 512, 5),
        ({"tune": 0}, 2, 512, 0),
    ],
)
def test_the_effort_says_how_many_steps(options, bits, length, steps):
    settings = quantize_settings(**options)
    assert settings.tuning.steps(settings.method, bits, length) == steps


def test_a_step_is_a_row_or_short_rows_together():
    assert tuning_rows(128, 32) == (8, 256, 128 * 8 + 256)
    assert tuning_rows(64, 512) == (1, 16, 80)
    assert tuning_rows(32, 4096) == (1, 8, 40)
    assert tuning_rows(0, 512) == (0, 0, 0)


def test_the_best_effort_reads_more_text(model):
    checkpoint = open_checkpoint(model)
    chosen = plan(checkpoint, quantize_settings(effort="best").storage)
    settings = tuning.with_tuning(quantize_settings(effort="best"), chosen, checkpoint, SILENT)
    assert (settings.tuning.tune, settings.calibration.samples) == (512, 256)  # of rows of 128, its context
    more = tuning.with_tuning(quantize_settings(effort="best", samples=300), chosen, checkpoint, SILENT)
    assert more.calibration.samples == 300


def test_what_follows_from_the_effort_alone_is_left_out_with_a_line(model, tmp_path, monkeypatch):
    """A machine too small for the whole model rounds it all the same; who asked for steps is told."""
    checkpoint, said = open_checkpoint(model), []
    monkeypatch.setattr(memory, "free_memory", lambda **_: 1000)
    small = Silent()
    small.log = said.append
    chosen = plan(checkpoint, quantize_settings(scheme="W2A16").storage)
    settings = tuning.with_tuning(quantize_settings(scheme="W2A16"), chosen, checkpoint, small)
    assert settings.tuning.tune == 0 and "memory" in said[0] and len(said) == 1
    with pytest.raises(MemoryNeededError, match="--tune 0"):
        tuning.with_tuning(quantize_settings(scheme="W2A16", tune=4), chosen, checkpoint, small)


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
