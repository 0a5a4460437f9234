"""Classifiers: a fresh head learns, a shallower student learns from its teacher, padding changes nothing."""

import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification

from attar.data.examples import Examples
from attar.data.packing import PADDING
from attar.distillation.features.probe import make_features
from attar.distillation.loss import DistillationLoss
from attar.distillation.objectives import OBJECTIVES
from attar.distillation.settings import distill_settings, recover_settings
from attar.distillation.signals.online import OnlineTeacher
from attar.distillation.stage import distill, recover
from attar.distillation.tasks import TASKS, task_of
from attar.errors import DataError, ModelError, SettingsError
from attar.models.classifiers import with_classifier
from tests import tiny_models

SMALL = {
    "steps": 40,
    "batch_size": 16,
    "sequence_length": 24,
    "learning_rate": 3e-3,
    "precision": "fp32",
}


def labelled(tmp_path, count=240, names=("bad", "good")):
    """Texts whose class is a word among others."""
    generator = torch.Generator().manual_seed(0)
    lines = []
    for number in range(count):
        others = [f"word{int(i)}" for i in torch.randint(0, 30, (3,), generator=generator)]
        label = number % len(names)
        lines.append(
            " ".join([*others[:2], ("raise", "return", "yield")[label], *others[2:]]) + f"\t{names[label]}"
        )
    path = tmp_path / "texts.tsv"
    path.write_text("\n".join(lines))
    return str(path)


def backbone(tmp_path, family="bert", **changes):
    model = AutoModel.from_config(tiny_models.config(family, vocab_size=322, **changes))
    return tiny_models.save_encoder(tiny_models.randomize(model), tmp_path / family)


def classifier(family="bert", classes=2, seed=0, **changes):
    model = tiny_models.build(family, seed=seed, **changes)
    return with_classifier(model, [f"LABEL_{number}" for number in range(classes)], seed)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A trained classifier and its data."""
    folder = tmp_path_factory.mktemp("teacher")
    data = labelled(folder)
    settings = recover_settings(**SMALL, data=data, alpha=0.0, task="classification")
    return recover(backbone(folder), folder / "out", settings), data


def accuracy(checkpoint, data):
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint.path)
    examples = TASKS["classification"].held_out(checkpoint, recover_settings(**SMALL, data=data))
    with torch.no_grad():
        logits = model(input_ids=examples.inputs, attention_mask=examples.mask.long()).logits
    return float((logits.argmax(-1) == examples.targets).float().mean())


def test_a_fresh_head_is_trained_without_a_teacher(teacher):
    checkpoint, data = teacher
    assert checkpoint.config["architectures"] == ["BertForSequenceClassification"]
    assert checkpoint.config["id2label"] == {"0": "bad", "1": "good"}
    assert accuracy(checkpoint, data) > 0.95
    assert {item["split"] for item in checkpoint.card.details["text"]} == {"train", "calibration"}


@pytest.mark.few(1)
@pytest.mark.parametrize("width", [0, 32])
def test_a_student_of_fewer_layers_or_of_half_the_width_learns_from_the_classifier(teacher, tmp_path, width):
    checkpoint, data = teacher
    settings = distill_settings(**SMALL, data=data, layers=2, temperature=2.0, alpha=0.5, width=width)
    student = distill(checkpoint, tmp_path / "student", settings)
    assert student.config["num_hidden_layers"] == 2 and student.config["id2label"]["1"] == "good"
    assert student.config["hidden_size"] == (width or 64)
    assert accuracy(student, data) > 0.95
    if not width:  # its layers are the teacher's: it hardly has anything to learn
        return
    curve = [row["loss"] for row in student.card.details["curve"] if "loss" in row]
    assert curve[-1] < 0.5 * curve[0]


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_bytes(teacher, tmp_path, monkeypatch):
    checkpoint, data = teacher
    settings = distill_settings(
        **{**SMALL, "steps": 20}, checkpoint_every=10, data=data, layers=1, temperature=2.0
    )
    whole = distill(checkpoint, tmp_path / "whole", settings)
    from attar.walks import train

    step, calls = train._step, []

    def killed(*arguments):
        calls.append(1)
        if len(calls) == 15:
            raise KeyboardInterrupt
        return step(*arguments)

    monkeypatch.setattr(train, "_step", killed)
    with pytest.raises(KeyboardInterrupt):
        distill(checkpoint, tmp_path / "again", settings)
    monkeypatch.setattr(train, "_step", step)
    again = distill(checkpoint, tmp_path / "again", settings)
    files = [(result.path / "model.safetensors").read_bytes() for result in (whole, again)]
    assert files[0] == files[1]


@pytest.mark.few(2)
@pytest.mark.parametrize("objective", ["kl", "reverse-kl", "jsd", "tv"])
@pytest.mark.parametrize("T", [1.0, 3.0])
def test_the_soft_loss_on_classes_is_that_of_the_paper(objective, T):
    teacher, student = classifier(classes=3), classifier(classes=3, seed=1)
    rows = tiny_models.tokens(student, batch=5, length=9)
    batch = Examples(rows, torch.tensor([0, 2, 1, 1, 0]))
    alpha = 0.7
    loss = DistillationLoss(OnlineTeacher(teacher, OBJECTIVES[objective], T), alpha)(student, batch)
    with torch.no_grad():
        z, t = (model(input_ids=rows).logits.double() for model in (student, teacher))
    q, p = (z / T).softmax(-1), (t / T).softmax(-1)
    m = (p + q) / 2

    def kl(a, b):
        return (a * (a / b).log()).sum(-1)

    soft = {
        "kl": T**2 * kl(p, q),
        "reverse-kl": T**2 * kl(q, p),
        "jsd": 4 * T**2 * (kl(p, m) + kl(q, m)) / 2,
        "tv": (p - q).abs().sum(-1) / 2,
    }[objective]
    hard = torch.nn.functional.cross_entropy(z, batch.targets)
    expected = alpha * soft.mean() + (1 - alpha) * hard
    assert loss.item() == pytest.approx(float(expected), rel=1e-4)
    same = DistillationLoss(OnlineTeacher(teacher, OBJECTIVES[objective], T))(teacher, batch)
    assert same.item() < 1e-6


@pytest.mark.few(2)
@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "llama3", "gpt2"])
def test_padding_changes_nothing(family):
    teacher, student = classifier(family), classifier(family, seed=1)
    rows = tiny_models.tokens(student, batch=3, length=9)
    targets = torch.tensor([0, 1, 1])
    loss = DistillationLoss(OnlineTeacher(teacher, OBJECTIVES["kl"], 2.0), 0.5)
    padded = torch.nn.functional.pad(rows, (0, 4), value=PADDING)
    same = loss(student, Examples(padded, targets)).item()
    assert same == loss(student, Examples(rows, targets)).item()
    shorter = rows.clone()
    shorter[1:, 6:] = PADDING
    alone = [Examples(rows[:1], targets[:1]), Examples(rows[1:, :6], targets[1:])]
    expected = sum(loss(student, part).item() * len(part) for part in alone) / 3
    assert loss(student, Examples(shorter, targets)).item() == pytest.approx(expected, rel=1e-4)


def test_segments_reach_models_that_have_them():
    model = classifier("bert")
    rows, targets = tiny_models.tokens(model, batch=2, length=8), torch.tensor([0, 1])
    segments = torch.tensor([[0] * 4 + [1] * 4] * 2)
    loss = DistillationLoss(None)
    plain, typed = Examples(rows, targets), Examples(rows, targets, segments)
    assert loss(model, typed).item() != loss(model, plain).item()
    other = classifier("roberta", type_vocab_size=1)
    assert loss(other, typed).item() == loss(other, plain).item()


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "llama3", "gpt2"])
def test_a_fresh_head_keeps_the_backbone(family):
    model = tiny_models.build(family)
    head = with_classifier(model, ["a", "b", "c"], 3)
    weights = head.base_model.state_dict()
    for name, tensor in model.base_model.state_dict().items():
        assert torch.equal(weights[name], tensor), name
    torch.rand(1)
    again = with_classifier(model, ["a", "b", "c"], 3)
    assert all(
        torch.equal(a, b)
        for a, b in zip(head.state_dict().values(), again.state_dict().values(), strict=True)
    )
    assert head(input_ids=tiny_models.tokens(model, batch=1)).logits.shape == (1, 3)
    assert head.config.architectures == [type(head).__name__] and head.config.id2label[2] == "c"


def test_the_task_follows_architecture_and_data():
    auto = recover_settings(alpha=0.0, data="x.txt")
    texts = recover_settings(alpha=0.0, data="whole:x.tsv")
    for architecture, plain, with_labels in [
        ("BertForSequenceClassification", "classification", "classification"),
        ("BertForMaskedLM", "masked", "classification"),
        ("BertModel", "causal", "classification"),
        ("LlamaForCausalLM", "causal", "causal"),
        ("GPT2LMHeadModel", "causal", "causal"),
    ]:
        config = {"architectures": [architecture]}
        assert task_of(config, auto).name == plain
        assert task_of(config, texts).name == with_labels


def test_settings_of_language_models_are_refused():
    config = {"architectures": ["BertForSequenceClassification"]}
    with pytest.raises(
        SettingsError, match="teacher_top is 8, but must be left out with task classification"
    ):
        task_of(config, recover_settings(teacher_top=8))
    with pytest.raises(SettingsError, match=r"teacher_generated is 0\.5, but must be left out"):
        task_of(config, distill_settings(teacher_generated=0.5))
    with pytest.raises(SettingsError, match="for_drafting is True"):
        task_of(config, distill_settings(for_drafting=True))


def test_what_cannot_be_learned_is_refused_in_one_line(teacher, tmp_path):
    checkpoint, data = teacher
    path = backbone(tmp_path)
    with pytest.raises(ModelError, match="BertModel is not a classifier to learn from") as error:
        distill(path, tmp_path / "out", distill_settings(**SMALL, data=data, task="classification"))
    assert "attar recover" in error.value.hint
    with pytest.raises(DataError, match=r"holds no labels"):
        distill(checkpoint, tmp_path / "out", distill_settings(**SMALL, data="python-docs"))
    wrong = tmp_path / "wrong.tsv"
    wrong.write_text("fine\tgood\nodd\tugly\n")
    with pytest.raises(DataError, match=r"wrong\.tsv:2: label 'ugly' is no class of the model"):
        distill(checkpoint, tmp_path / "out", distill_settings(**SMALL, data=str(wrong)))
    one = tmp_path / "one.tsv"
    one.write_text("fine\tgood\nwell\tgood\n")
    settings = recover_settings(**SMALL, data=str(one), alpha=0.0, task="classification")
    with pytest.raises(DataError, match=r"one\.tsv:1: every text has label 'good'"):
        recover(path, tmp_path / "out", settings)
    three = labelled(tmp_path, names=("bad", "good", "so-so"))
    with pytest.raises(DataError, match="is no class of the model"):
        recover(path, tmp_path / "out", recover_settings(**SMALL, data=three), teacher=checkpoint.path)
    assert not (tmp_path / "out").exists()


def test_teacher_and_student_must_have_the_same_classes(teacher, tmp_path):
    checkpoint, data = teacher
    other = tmp_path / "other"
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint.path)
    model.config.id2label, model.config.label2id = {0: "good", 1: "bad"}, {"good": 0, "bad": 1}
    tiny_models.save_encoder(model, other)
    with pytest.raises(ModelError, match="the teacher's classes are good, bad, the student's bad, good"):
        recover(checkpoint, tmp_path / "out", recover_settings(**SMALL, data=data), teacher=other)


@pytest.mark.slow
def test_tinybert_in_two_phases(teacher, tmp_path):
    """First the intermediates of the teacher, then its predictions."""
    checkpoint, data = teacher
    intermediates = {"features": ("hidden", "attention-scores", "embeddings"), "objective": "none"}
    settings = distill_settings(**SMALL, data=data, width=32, layers=2, **intermediates)
    first = distill(checkpoint, tmp_path / "first", settings)
    curve = [row["loss"] for row in first.card.details["curve"] if "loss" in row]
    assert curve[-1] < 0.9 * curve[0]
    second = recover(
        first, tmp_path / "second", recover_settings(**SMALL, data=data), teacher=checkpoint.path
    )
    assert accuracy(second, data) > 0.95 and second.config["hidden_size"] == 32


@pytest.mark.few(2)
@pytest.mark.parametrize("feature", ["hidden", "patient", "attention", "embeddings"])
def test_padding_changes_no_feature(feature):
    """Texts of two lengths in one batch have the features of each by itself, weighed by their tokens."""
    teacher, student = classifier(), classifier(seed=1)
    settings = distill_settings(features=(feature,), objective="none").features
    features = make_features(student, teacher, settings, "classification", 0)
    signal = OnlineTeacher(teacher, OBJECTIVES["kl"], 1.0)
    loss = DistillationLoss(signal, 1.0, features, weight=0.0)
    rows, targets = tiny_models.tokens(student, batch=2, length=9), torch.tensor([0, 1])
    rows[1, 5:] = PADDING
    whole = loss(student, Examples(rows, targets)).item()
    padded = torch.nn.functional.pad(rows, (0, 3), value=PADDING)
    assert loss(student, Examples(padded, targets)).item() == pytest.approx(whole, rel=1e-5)
    alone = [loss(student, Examples(row[row >= 0][None], targets[:1])).item() for row in rows]
    if feature != "attention":  # there a row's mean depends on its number of keys
        first, second = (1, 1) if feature == "patient" else (9, 5)  # tokens that are compared
        wanted = (first * alone[0] + second * alone[1]) / (first + second)
        assert whole == pytest.approx(wanted, rel=1e-4)
