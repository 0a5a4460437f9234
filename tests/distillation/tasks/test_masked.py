"""Masked language models: a student learns the hidden tokens from its teacher, and a killed run resumes."""

import json
from pathlib import Path

import pytest
import torch

from attar.data.examples import Examples
from attar.data.masking import MaskRule, hide
from attar.data.packing import PADDING, numbered_generator
from attar.distillation.features.probe import make_features
from attar.distillation.loss import DistillationLoss
from attar.distillation.objectives import OBJECTIVES
from attar.distillation.settings import distill_settings
from attar.distillation.signals.online import OnlineTeacher
from attar.distillation.stage import distill
from attar.errors import DataError, ModelError
from attar.models.surgery.cut_model import keep_layers
from attar.walks import train
from tests import tiny_models

SMALL = {
    "steps": 20,
    "batch_size": 4,
    "sequence_length": 32,
    "learning_rate": 3e-3,
    "precision": "fp32",
    "checkpoint_every": 5,
    "data": str(Path(json.__file__).parent),
}


def save(tmp_path, family="bert"):
    return tiny_models.save_encoder(tiny_models.build(family, vocab_size=322), tmp_path / family)


@pytest.mark.few(1)
@pytest.mark.parametrize("family", tiny_models.ENCODERS)
def test_a_student_of_an_encoder_comes_closer_to_its_teacher(tmp_path, family):
    student = distill(
        save(tmp_path, family),
        tmp_path / "out",
        distill_settings(layers=2, **{**SMALL, "steps": 40, "checkpoint_every": 40}),
    )
    curve = [row["loss"] for row in student.card.details["curve"] if "loss" in row]
    assert curve[-1] < 0.8 * curve[0]
    assert student.config["architectures"][0].endswith("ForMaskedLM")


@pytest.mark.slow
def test_a_killed_run_hides_the_same_tokens(tmp_path, monkeypatch):
    folder, settings = save(tmp_path), distill_settings(layers=1, alpha=0.5, **SMALL)
    whole = distill(folder, tmp_path / "whole", settings)
    step, calls = train._step, []

    def killed(*arguments):
        calls.append(1)
        if len(calls) == 13:
            raise KeyboardInterrupt
        return step(*arguments)

    monkeypatch.setattr(train, "_step", killed)
    with pytest.raises(KeyboardInterrupt):
        distill(folder, tmp_path / "again", settings)
    monkeypatch.setattr(train, "_step", step)
    again = distill(folder, tmp_path / "again", settings)
    files = [(result.path / "model.safetensors").read_bytes() for result in (whole, again)]
    assert files[0] == files[1]


def test_the_loss_is_that_of_the_hidden_tokens_alone():
    teacher, student = tiny_models.build("bert"), tiny_models.build("bert", seed=1)
    rows = tiny_models.tokens(student, batch=4, length=24)
    rows[2:, 15:] = PADDING
    batch = hide(rows, MaskRule(2, (0, 1, 2), 320), numbered_generator(0, 0))
    T, alpha = 2.0, 0.6
    loss = DistillationLoss(OnlineTeacher(teacher, OBJECTIVES["kl"], T), alpha)(student, batch)
    soft, hard = [], []
    for number in range(4):
        real = batch.mask[number]
        for position in batch.predicted[number].nonzero()[:, 0].tolist():
            with torch.no_grad():
                inputs = batch.tokens[number][real][None]
                z, t = (m(input_ids=inputs).logits[0, position].double() for m in (student, teacher))
            p, q = (t / T).softmax(-1), (z / T).softmax(-1)
            soft.append(T**2 * float((p * (p / q).log()).sum()))
            hard.append(-float(z.log_softmax(-1)[batch.targets[number, position]]))
    assert len(hard) == batch.count() > 4
    expected = (alpha * sum(soft) + (1 - alpha) * sum(hard)) / len(hard)
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    changed = Examples(batch.tokens.clone(), batch.targets)
    wider = torch.nn.functional.pad(changed.tokens, (0, 3), value=PADDING)
    targets = torch.nn.functional.pad(changed.targets, (0, 3), value=PADDING)
    again = DistillationLoss(OnlineTeacher(teacher, OBJECTIVES["kl"], T), alpha)(
        student, Examples(wider, targets)
    )
    assert float(again) == pytest.approx(float(loss), rel=1e-6)


def test_distilberts_loss_is_soft_hard_and_cosine():
    """Of hidden tokens the first two, of all real tokens and all pairs of layers the third."""
    teacher = tiny_models.build("bert")
    student = keep_layers(tiny_models.build("bert", seed=1), [0, 2])
    rows = tiny_models.tokens(student, batch=3, length=20)
    rows[1, 12:] = PADDING
    batch = hide(rows, MaskRule(2, (0, 1, 2), 320), numbered_generator(0, 0))
    settings = distill_settings(features=("hidden-cosine:0.2",)).features
    features = make_features(student, teacher, settings, "masked", 0)
    signal = OnlineTeacher(teacher, OBJECTIVES["kl"], 2.0)
    plain = DistillationLoss(signal, 0.7)(student, batch).item()
    with_cosine = DistillationLoss(signal, 0.7, features)(student, batch).item()
    asked = {"input_ids": batch.inputs, "attention_mask": batch.mask.long(), "output_hidden_states": True}
    with torch.no_grad():
        ours, theirs = (model(**asked).hidden_states for model in (student, teacher))
    pairs = [(1, 2), (2, 3)]  # behind each half of the depth
    cosines = [
        torch.nn.functional.cosine_similarity(ours[i].double(), theirs[j].double(), dim=-1)[batch.mask]
        for i, j in pairs
    ]
    expected = 0.2 * (1 - torch.stack(cosines)).mean().item()
    assert with_cosine - plain == pytest.approx(expected, rel=1e-4)


def test_held_out_text_of_which_nothing_is_hidden_is_refused(tmp_path):
    (tmp_path / "text.txt").write_text("a")
    settings = distill_settings(
        layers=1, **{**SMALL, "data": str(tmp_path / "text.txt"), "packing": "separate"}
    )
    with pytest.raises(DataError, match=r"text\.txt: nothing is predicted in the held-out text"):
        distill(save(tmp_path), tmp_path / "out", settings)
    assert not (tmp_path / "out").exists()


def test_a_causal_model_is_refused(tmp_path):
    folder = tiny_models.save(tiny_models.build("llama3"), tmp_path / "llama3")
    with pytest.raises(ModelError, match="LlamaForCausalLM is not a masked language model"):
        distill(folder, tmp_path / "out", distill_settings(task="masked", **SMALL))
    assert not (tmp_path / "out").exists()
