"""What an effort means: the method and the steps by it, and what is left out where it cannot be."""

import pytest
import torch
from transformers import BertForSequenceClassification

import attar
from attar import memory
from attar.checkpoint import open_checkpoint
from attar.errors import MemoryNeededError
from attar.progress import SILENT, Silent
from attar.quantization.effort import with_effort
from attar.quantization.plan import plan
from attar.quantization.settings import CorrectingSettings, quantize_settings
from tests import tiny_models

TEXTS = [f"def area_{i}(width, height):\n    return width * height + {i}\n" * 6 for i in range(120)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("effort") / "model"
    return tiny_models.save(tiny_models.build("smollm"), folder, dtype=torch.bfloat16)


def chosen(folder, progress=SILENT, **options):
    """The settings that the options mean for a model."""
    checkpoint, settings = open_checkpoint(folder), quantize_settings(**options)
    return with_effort(settings, plan(checkpoint, settings.storage), checkpoint, progress)


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


@pytest.mark.parametrize(
    ("options", "method"),
    [
        ({}, "gptq"),
        ({"scheme": "W3A16"}, "yaqa"),
        ({"scheme": "W3A16", "effort": "fast"}, "gptq"),
        ({"scheme": "W3A16", "tune": 0}, "yaqa"),
        ({"scheme": "W3A16", "act_order": "group"}, "gptq"),
        ({"scheme": "W3A16", "method": "gptq"}, "gptq"),
        ({"effort": "good"}, "yaqa"),
        ({"effort": "best"}, "yaqa"),
        ({"effort": "good", "method": "rtn"}, "rtn"),
        ({"effort": "good", "sparsity": "2:4"}, "gptq"),
        ({"tune": 4}, "gptq"),
    ],
)
def test_the_effort_says_how_weights_are_rounded(model, options, method):
    settings = chosen(model, **options)
    assert settings.method == method
    assert isinstance(settings.rounding, CorrectingSettings) == (method == "yaqa")


def test_what_was_asked_of_the_rounding_goes_on_to_the_method(model):
    settings = chosen(model, effort="good", refine=2, damp=0.02, scales="mse", act_order="off")
    assert (settings.rounding.refine, settings.rounding.damp) == (2, 0.02)
    assert (settings.rounding.scales, settings.rounding.act_order) == ("mse", "off")


def test_a_mixture_of_experts_is_rounded_by_the_layers_hessian(tmp_path):
    """A few tokens reach an expert: too few for the output side of its curvature."""
    folder = tiny_models.save(tiny_models.build("qwen3_moe"), tmp_path / "mixture", dtype=torch.bfloat16)
    settings = chosen(folder, effort="good")
    assert settings.method == "gptq" and settings.tuning.tune > 0


def test_the_best_effort_reads_more_text(model):
    settings = chosen(model, effort="best")
    assert (settings.tuning.tune, settings.calibration.samples) == (512, 256)  # of rows of 128, its context
    assert chosen(model, effort="best", samples=300).calibration.samples == 300


def test_what_follows_from_the_effort_alone_is_left_out_with_a_line(model, monkeypatch):
    """A machine too small for the whole model rounds it all the same; who asked for steps is told."""
    monkeypatch.setattr(memory, "free_memory", lambda **_: 1000)
    small, said = Silent(), []
    small.log = said.append
    settings = chosen(model, small, scheme="W2A16")
    assert (settings.method, settings.tuning.tune) == ("gptq", 0)
    assert said[0].startswith("note: rounded by gptq alone: ") and "memory" in said[0] and len(said) == 1
    chosen(model, small, scheme="W2A16", method="awq")
    assert said[1].startswith("note: scales and norms are not tuned: ")
    assert chosen(model, small, scheme="W2A16", tune=0).method == "gptq"
    with pytest.raises(MemoryNeededError, match="--tune 0"):
        chosen(model, scheme="W2A16", tune=4)


def test_an_encoder_is_rounded_by_the_layers_hessian_with_a_line(tmp_path):
    folder = tiny_models.save(
        BertForSequenceClassification(tiny_models.build("bert").config), tmp_path / "bert"
    )
    progress, said = Silent(), []
    progress.log = said.append
    assert chosen(folder, progress, effort="good").method == "gptq"
    why = "effort is 'good', but must be fast: this model has no head of logits to compare"
    assert said == [f"note: rounded by gptq alone: {why}"]


def test_the_card_has_the_method_that_was_taken(model, tmp_path):
    small = {"samples": 4, "batch_size": 2, "sequence_length": 32, "check_tokens": 0, "tune": 1}
    options = {"group_size": 32, "data": TEXTS, "progress": False, **small}
    auto = attar.quantize(model, tmp_path / "auto", scheme="W2A16", **options)
    attar.quantize(model, tmp_path / "named", scheme="W2A16", method="yaqa", **options)
    assert auto.card.settings["method"] == "yaqa"
    assert (tmp_path / "auto/model.safetensors").read_bytes() == (
        tmp_path / "named/model.safetensors"
    ).read_bytes()
