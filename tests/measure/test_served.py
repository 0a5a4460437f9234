"""What is served is what is measured: the runner's arithmetic is in the figures, and the record says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attar.data.packing import PADDING
from attar.errors import ModelError
from attar.measure.evaluate import evaluate, measure_quality
from attar.measure.logits import next_token_logits, subject_logits
from attar.measure.reference import make_reference
from attar.measure.settings import EvaluateSettings
from attar.measure.subject import ServingFormats, load_subject, serving_formats
from tests import tiny_models
from tests.compiler import needs_compiler
from tests.quantization.packing import pack, save

SETTINGS = EvaluateSettings(sample="", speed=False, answers=0)


def text(rows: int = 4, length: int = 16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(2, 320, (rows, length), generator=generator)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    return Path(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def base(folder: Path) -> Path:
    return tiny_models.save(tiny_models.build("llama3"), folder / "base")


@pytest.fixture(scope="module")
def four(folder: Path) -> Any:
    """A packed checkpoint of 4 bits."""
    return pack(save(folder / "llama"), folder / "four", scheme="W4A16", group_size=32)[1]


@pytest.mark.slow
@needs_compiler
def test_rounded_activations_are_in_the_figures(four: Any) -> None:
    """The compiled runner rounds activations: that loss is measured, and transformers has none."""
    reference = make_reference(load_subject(four), SETTINGS, batches=text())
    exact = measure_quality(load_subject(four, runner="transformers"), SETTINGS, reference)
    assert exact.kl_mean == 0.0
    for bits, least, most in ((8, 5e-5, 0.05), (16, 0.0, 5e-5)):
        subject = load_subject(four, runner=EvaluateSettings().runner, activations=bits)
        served = measure_quality(subject, SETTINGS, reference)
        assert served.kl_mean is not None and least < served.kl_mean < most
        assert (
            f"int{bits}" in serving_formats(subject).activations
            and serving_formats(subject).runner == "compiled"
        )


@needs_compiler
def test_the_format_of_keys_and_values_is_in_the_figures(four: Any) -> None:
    reference = make_reference(load_subject(four), SETTINGS, batches=text())
    usual, eight = (
        load_subject(four, runner="compiled", kv_dtype=kv, activations=16) for kv in ("auto", "int8")
    )
    assert [serving_formats(item).kv_dtype for item in (usual, eight)] == ["float16", "int8"]
    assert (
        measure_quality(usual, SETTINGS, reference).kl_mean
        != measure_quality(eight, SETTINGS, reference).kl_mean
    )


def test_modules_in_float32_are_exact(base: Path) -> None:
    """Padding on either side, and a row of nothing but padding, count as in transformers."""
    tokens = text()[0]
    tokens[0, 10:], tokens[1, :6], tokens[2] = PADDING, PADDING, PADDING
    subject, plain = load_subject(base, runner="modules", dtype="float32"), load_subject(base)
    assert serving_formats(subject) == ServingFormats("modules", "float32", "float32")
    ours = list(subject_logits(subject, tokens, 320))
    theirs = list(next_token_logits(plain.model, tokens, 320))
    assert [len(labels) for _, labels in ours] == [9, 9, 0, 15]
    for (logits, labels), (wanted, wanted_labels) in zip(ours, theirs, strict=True):
        assert torch.equal(labels, wanted_labels)
        assert torch.allclose(logits, wanted, atol=1e-4)


def test_the_record_names_what_computed(base: Path, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("def add(a, b):\n    return a + b\n" * 200)
    settings = EvaluateSettings(
        data=str(file), tokens=64, sequence_length=32, sample="def", sample_tokens=3, prompt_tokens=8,
        decode_tokens=2, reference_speed=True, runner="modules", kv_dtype="fp8",
    )  # fmt: skip
    measurements = evaluate(base, settings, reference=base)
    assert (measurements.runner, measurements.activations, measurements.kv_dtype) == (
        "modules",
        "float32",
        "fp8",
    )
    assert measurements.runner_note is None
    assert measurements.kl_mean is not None and measurements.kl_mean > 0, "keys and values in fp8"
    assert measurements.transformers_decode_tokens_per_s and measurements.transformers_prefill_tokens_per_s
    plain = evaluate(base, replace(settings, speed=False, reference_speed=False))
    assert plain.transformers_decode_tokens_per_s is plain.decode_tokens_per_s is None


def test_what_the_runtime_does_not_run_runs_in_transformers(tmp_path: Path) -> None:
    """Its attention cannot be replaced; asked for by name, a runner is not replaced either."""
    folder = tiny_models.save(tiny_models.build("stablelm"), tmp_path / "stablelm")
    subject = load_subject(folder, runner="auto")
    assert serving_formats(subject).runner == "transformers"
    assert subject.fallback_reason
    assert measure_quality(subject, SETTINGS, batches=text()).loss > 0
    with pytest.raises(ModelError):
        load_subject(folder, runner="modules")
