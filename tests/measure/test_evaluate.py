"""Evaluation: against transformers' own loss, against itself, over padded vocabularies, end to end."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from attar.data.packing import PADDING
from attar.errors import ModelError, NumericsError, SettingsError, UsageError
from attar.measure.evaluate import evaluate, measure_quality
from attar.measure.reference import make_reference
from attar.measure.settings import EvaluateSettings
from attar.measure.subject import Subject
from tests import tiny_models
from tests.measure.measure_models import llama, words

SETTINGS = EvaluateSettings(tokens=96, sequence_length=16, batch_size=2, answers=0)
KEYS = (
    "perplexity", "kl_mean", "kl_p99", "top1_agreement", "bytes", "bits_per_weight", "prefill_tokens_per_s",
    "decode_tokens_per_s", "peak_rss_bytes",
)  # fmt: skip


def text(seed: int = 0, vocabulary: int = 64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocabulary, (2, 16), generator=generator) for _ in range(3)]


def test_loss_is_transformers_loss(subject: Subject) -> None:
    batches = text()
    with torch.no_grad():
        expected = torch.stack([subject.model(batch, labels=batch).loss for batch in batches]).mean()
    quality = measure_quality(subject, SETTINGS, batches=batches)
    assert quality.tokens == 3 * 2 * 15
    assert quality.loss == pytest.approx(float(expected), rel=1e-5)
    assert quality.perplexity == pytest.approx(math.exp(float(expected)), rel=1e-4)
    assert quality.kl_mean is None


def test_a_model_equals_itself(subject: Subject) -> None:
    reference = make_reference(subject, SETTINGS, batches=text())
    quality = measure_quality(subject, SETTINGS, reference)
    assert (quality.kl_mean, quality.kl_p99, quality.top1_agreement) == (0.0, 0.0, 1.0)


def test_divergence_is_that_of_the_distributions(subject: Subject) -> None:
    """Mean, 99th percentile and agreement against plain float64 softmaxes of the whole text."""
    batches, other = text(), Subject(llama(5), words())
    tokens = torch.cat(batches)
    with torch.no_grad():
        p, q = (item.model(tokens).logits[:, :-1].double().log_softmax(-1) for item in (subject, other))
    distances = (p.exp() * (p - q)).sum(-1).flatten()
    quality = measure_quality(other, SETTINGS, make_reference(subject, SETTINGS, batches=batches))
    assert quality.kl_mean == pytest.approx(float(distances.mean()), rel=1e-5)
    assert quality.kl_p99 == pytest.approx(float(distances.quantile(0.99)), rel=1e-5)
    assert quality.top1_agreement == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))


def test_quality_kept_is_a_share_of_the_reference_s_accuracy(subject: Subject) -> None:
    """On a text that the reference wrote and half of which was changed, against plain argmaxes."""
    batches, other = text(), Subject(llama(5), words())
    with torch.no_grad():
        for _ in range(15):
            batches = [torch.cat([b[:, :1], subject.model(b).logits[:, :-1].argmax(-1)], 1) for b in batches]
        batches = [torch.where(torch.rand(b.shape) < 0.3, (b + 1) % 64, b) for b in batches]
        tokens = torch.cat(batches)
        theirs, ours = (
            float((item.model(tokens).logits[:, :-1].argmax(-1) == tokens[:, 1:]).double().mean())
            for item in (subject, other)
        )
    assert theirs > 0.2
    quality = measure_quality(other, SETTINGS, make_reference(subject, SETTINGS, batches=batches))
    assert quality.accuracy == pytest.approx(ours)
    assert quality.quality_kept == pytest.approx(ours / theirs)
    assert 0 < quality.quality_kept_stderr < 0.5 and 0 < quality.kl_mean_stderr < 0.1 * quality.kl_mean
    alone = measure_quality(subject, SETTINGS, batches=batches)
    assert (alone.accuracy, alone.quality_kept) == (pytest.approx(theirs), None)
    assert alone.kl_mean_stderr is None and alone.quality_kept_stderr is None


def test_padding_counts_for_nothing(subject: Subject) -> None:
    batches = text()
    padded = [torch.cat([batch, torch.full((2, 5), PADDING)], dim=1) for batch in batches]
    other = Subject(llama(5), words())
    plain = measure_quality(other, SETTINGS, make_reference(subject, SETTINGS, batches=batches))
    same = measure_quality(other, SETTINGS, make_reference(subject, SETTINGS, batches=padded))
    assert same.tokens == plain.tokens
    assert same.loss == pytest.approx(plain.loss, rel=1e-4)
    assert same.kl_mean == pytest.approx(plain.kl_mean, rel=1e-4)


def test_padded_vocabulary_changes_nothing(subject: Subject) -> None:
    """The same weights with 16 more rows in embedding and head that stand for no token."""
    wide = llama(0, vocabulary=80)
    state = subject.model.state_dict()
    with torch.no_grad():
        for name, value in wide.state_dict().items():
            value[:64].copy_(state[name]) if value.shape != state[name].shape else value.copy_(state[name])
    padded = Subject(wide, words(size=64), None, "padded")
    for reference, model in ((subject, padded), (padded, subject)):
        quality = measure_quality(model, SETTINGS, make_reference(reference, SETTINGS, batches=text()))
        assert quality.kl_mean == pytest.approx(0.0, abs=1e-9)
        assert quality.top1_agreement == 1.0
    own = measure_quality(subject, SETTINGS, batches=text())
    assert measure_quality(padded, SETTINGS, batches=text()).loss == pytest.approx(own.loss, rel=1e-6)


def test_nan_is_an_error_that_counts() -> None:
    model = llama(1)
    model.model.norm.weight.data[0] = math.nan
    with pytest.raises(NumericsError, match="broken gives NaN logits for 90 of 90 tokens"):
        measure_quality(Subject(model, words(), None, "broken"), SETTINGS, batches=text())


def test_measurements_are_flat_json(subject: Subject) -> None:
    reference = make_reference(subject, SETTINGS, batches=text())
    settings = EvaluateSettings(
        tokens=96, sequence_length=16, sample="w1 w2", sample_tokens=4, prompt_tokens=8, decode_tokens=4
    )
    record = json.loads(
        json.dumps(
            evaluate(Subject(llama(5), words(), None, "other"), settings, reference=reference).to_dict()
        )
    )
    assert set(KEYS) <= set(record)
    assert not any(isinstance(value, dict) for value in record.values())
    assert (record["model"], record["reference"], record["runner"]) == ("other", "tiny", "transformers")
    assert (record["activations"], record["kv_dtype"], record["tasks"]) == ("float32", "float32", [])
    assert record["bytes"] == 4 * record["parameters"]
    assert record["bits_per_weight"] == 32.0
    assert len(record["sample"].split()) == 4
    assert record["peak_rss_bytes"] > 10**7
    assert record["prefill_tokens_per_s"] > 0 < record["decode_tokens_per_s"]


def test_what_is_not_asked_for_is_none(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attar.measure.evaluate.held_out", lambda *_: text())
    actual = evaluate(subject, EvaluateSettings(speed=False, sample="")).to_dict()
    for name in (
        "kl_mean",
        "kl_p99",
        "top1_agreement",
        "reference",
        "decode_tokens_per_s",
        "sample",
        "prompt",
    ):
        assert actual[name] is None


def test_other_tokenizer_fails_before_any_work(subject: Subject) -> None:
    reference = make_reference(subject, SETTINGS, batches=text())
    with pytest.raises(UsageError, match="different tokenizers"):
        evaluate(Subject(llama(5), words(size=63), None, "other"), SETTINGS, reference=reference)


def test_folders_from_end_to_end(tmp_path: Path) -> None:
    """Two checkpoints and a text file, as ``attar evaluate MODEL --reference BASE --data FILE``."""
    base = tiny_models.save(tiny_models.build("llama3"), tmp_path / "base")
    other = tiny_models.save(tiny_models.build("llama3", seed=1), tmp_path / "other")
    file = tmp_path / "text.txt"
    file.write_text("def add(a, b):\n    return a + b\n" * 200)
    settings = EvaluateSettings(data=str(file), tokens=128, sequence_length=32, sample="def", sample_tokens=4,
                                prompt_tokens=8, decode_tokens=2)  # fmt: skip
    measurements = evaluate(other, settings, reference=base)
    assert measurements.tokens == 4 * 31
    assert measurements.kl_mean is not None and measurements.kl_mean > 0.01
    assert (measurements.model, measurements.reference) == ("other", "base")
    assert (measurements.answers_same, measurements.reference_answers_length) == (0.0, 4.0)
    same = evaluate(base, replace(settings, runner="transformers"), reference=base)
    assert (same.answers_same, same.answers_agreement) == (1.0, 1.0)
    assert (same.kl_mean, same.top1_agreement) == (0.0, 1.0)


def test_encoder_without_a_head_is_refused(tmp_path: Path) -> None:
    bare = transformers.AutoModel.from_config(tiny_models.config("bert"))
    folder = tiny_models.save(bare, tmp_path / "bert")
    with pytest.raises(ModelError, match="does not predict next tokens"):
        evaluate(folder, SETTINGS)


@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
def test_missing_device_is_one_line(tmp_path: Path, device: str) -> None:
    with pytest.raises(SettingsError) as caught:
        evaluate(tmp_path, EvaluateSettings(device=device))
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_settings_default(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attar.measure.evaluate.held_out", lambda *_: text())
    actual: Any = evaluate(Subject(subject.model, words("def", *[f"w{n}" for n in range(1, 64)])))
    assert actual.prompt == "def __init__(self"
