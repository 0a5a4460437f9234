"""Classifiers and masked language models are measured: against brute force, against a reference, in words."""

import pytest
import torch

from attar.checkpoint.open import open_checkpoint
from attar.checkpoint.processes import Processes
from attar.data.labelled import classification_examples, labelled_split
from attar.data.masking import MaskRule
from attar.errors import DataError, SettingsError, UsageError
from attar.measure.encoders import EncoderReference, encoder_task, f1_score
from attar.measure.evaluate import evaluate, prepare_reference
from attar.measure.run_folder import RunRecord, StageRecord
from attar.measure.settings import EvaluateSettings
from attar.measure.table import plain_table
from attar.measure.verdict import verdict
from attar.models.classifiers import with_classifier
from tests import tiny_models


def classifier(folder, seed=0, classes=2):
    model = with_classifier(
        tiny_models.build("bert", seed=seed, vocab_size=322), [f"LABEL_{i}" for i in range(classes)], seed
    )
    torch.nn.init.normal_(model.classifier.weight, generator=torch.Generator().manual_seed(seed))
    return tiny_models.save_encoder(model, folder)


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "x.tsv"
    path.write_text("".join(f"{'def f ' * (i % 5)}return {i}\t{i % 2}\n" for i in range(60)))
    return str(path)


def settings_of(data, **changes):
    return EvaluateSettings(data=f"whole:{data}", sequence_length=32, batch_size=7, **changes)


@torch.no_grad()
def logits_of(folder, data):
    """One text at a time, without padding."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder).double()
    rows = labelled_split(f"whole:{data}", "evaluation", 0).rows
    tokenizer = tiny_models.encoder_tokenizer()
    names = [model.config.id2label[i] for i in range(model.config.num_labels)]
    examples = classification_examples(tokenizer, rows, names, 32)
    logits = [model(input_ids=row[row >= 0][None]).logits[0] for row in examples.tokens]
    return torch.stack(logits), examples.targets


def test_a_classifier_is_measured_as_by_hand(tmp_path, data):
    folder, other = classifier(tmp_path / "a"), classifier(tmp_path / "b", seed=1)
    z, targets = logits_of(folder, data)
    t, _ = logits_of(other, data)
    measured = evaluate(folder, settings_of(data), reference=other)
    assert (measured.task, measured.tokens, measured.held_out) == ("classification", 60, True)
    assert measured.loss == pytest.approx(torch.nn.functional.cross_entropy(z, targets).item(), rel=1e-5)
    accuracy = (z.argmax(1) == targets).double().mean().item()
    assert measured.accuracy == pytest.approx(accuracy)
    kl = (t.softmax(1) * (t.log_softmax(1) - z.log_softmax(1))).sum(1)
    assert measured.kl_mean == pytest.approx(kl.mean().item(), rel=1e-4)
    assert measured.top1_agreement == pytest.approx((z.argmax(1) == t.argmax(1)).double().mean().item())
    reference_accuracy = (t.argmax(1) == targets).double().mean().item()
    assert measured.quality_kept == pytest.approx(accuracy / reference_accuracy)
    assert 0 < measured.quality_kept_stderr < 0.5
    assert measured.kl_mean_stderr == pytest.approx(kl.std().item() / 60**0.5, rel=0.5)
    assert measured.kl_mean_row_stderr == pytest.approx(kl.std().item() / 60**0.5, rel=1e-4)
    lost = (t.argmax(1) == targets) & (z.argmax(1) != targets)
    assert measured.tokens_lost == pytest.approx(lost.double().mean().item())
    assert 0 < measured.kl_noise_floor < 0.1 * measured.kl_mean
    assert measured.prefill_tokens_per_s > 0 and measured.decode_tokens_per_s is None
    same = evaluate(folder, settings_of(data), reference=folder)
    assert same.kl_mean == 0.0 and same.quality_kept == 1.0


def test_f1_counts_class_one():
    chosen, labels = torch.tensor([1, 1, 0, 0, 1]), torch.tensor([1, 0, 1, 0, 1])
    assert f1_score(chosen, labels) == pytest.approx(2 * 2 / (2 * 2 + 1 + 1))
    assert f1_score(torch.zeros(3), torch.zeros(3)) == 0.0


@pytest.mark.slow
def test_three_classes_have_no_f1_and_do_not_compare_with_two(tmp_path, data):
    three, two = classifier(tmp_path / "three", classes=3), classifier(tmp_path / "two")
    assert evaluate(three, settings_of(data)).f1 is None
    assert evaluate(two, settings_of(data)).f1 is not None
    with pytest.raises(UsageError, match="three has 3 classes, the reference 2"):
        evaluate(three, settings_of(data), reference=two)


def test_a_masked_model_is_measured_on_hidden_tokens(tmp_path):
    text = tmp_path / "x.txt"
    text.write_text("def f(x):\n    return x + 1\n" * 200)
    folder = tiny_models.save_encoder(tiny_models.build("bert", vocab_size=322), tmp_path / "a")
    measured = evaluate(folder, EvaluateSettings(data=f"whole:{text}", tokens=640, sequence_length=64))
    assert measured.task == "masked" and 0.1 * 640 < measured.tokens < 0.2 * 640
    assert measured.loss > 1.0 and measured.f1 is None
    assert MaskRule.of(tiny_models.encoder_tokenizer()).special
    again = evaluate(folder, EvaluateSettings(data=f"whole:{text}", tokens=640, sequence_length=64))
    assert again.loss == measured.loss


@pytest.mark.slow
def test_one_reference_serves_several_evaluations(tmp_path, data):
    folder, other = classifier(tmp_path / "a"), classifier(tmp_path / "b", seed=1)
    reference = prepare_reference(other, settings_of(data))
    assert isinstance(reference, EncoderReference) and reference.kept and reference.nbytes == 60 * 2 * 4
    fresh = evaluate(folder, settings_of(data), reference=other)
    assert evaluate(folder, settings_of(data), reference=reference).kl_mean == fresh.kl_mean


def test_what_cannot_be_measured_is_refused(tmp_path, data):
    folder = classifier(tmp_path / "a")
    with pytest.raises(DataError, match="holds no labels"):
        evaluate(folder, EvaluateSettings(data="python-docs"))
    with pytest.raises(SettingsError, match="transformers with an encoder"):
        evaluate(folder, settings_of(data, runner="compiled"))
    causal = tiny_models.save(tiny_models.build("llama3"), tmp_path / "causal")
    with pytest.raises(UsageError, match="the reference is none"):
        evaluate(folder, settings_of(data), reference=causal)
    with pytest.raises(UsageError, match="the reference is an encoder"):
        evaluate(causal, settings_of(data), reference=prepare_reference(folder, settings_of(data)))
    assert encoder_task(open_checkpoint(folder)) == "classification" and not encoder_task(causal)


def test_an_encoder_is_measured_by_one_process(tmp_path, data):
    with pytest.raises(UsageError, match="by one process"):
        evaluate(classifier(tmp_path / "a"), settings_of(data), processes=Processes(0, 2))


@pytest.mark.slow
def test_texts_that_were_trained_on_are_said(tmp_path, data):
    from attar.distillation.settings import recover_settings
    from attar.distillation.stage import recover

    options = {"steps": 1, "batch_size": 4, "sequence_length": 16, "precision": "fp32", "alpha": 0.0}
    out = recover(classifier(tmp_path / "a"), tmp_path / "out", recover_settings(**options, data=data))
    measured = evaluate(out, settings_of(data, speed=False))
    assert not measured.held_out and "of the texts were read by recover" in measured.held_out_note


def test_the_table_has_accuracy_in_place_of_perplexity():
    measured = {"task": "classification", "accuracy": 0.9, "bytes": 4e6, "quality_kept": 0.97}
    measured |= {"perplexity": 1.2, "prefill_tokens_per_s": 800.0}
    run = RunRecord((StageRecord("original", measurements=measured),))
    table = plain_table(run)
    assert "accuracy %" in table and "perplexity" not in table and "decode" not in table
    assert "keeps 97 % of its accuracy" in verdict(run)
