"""What a teacher predicts, kept on disk: exact where all of it is kept, right on average where it is drawn,
and the same whatever is learned from it, in which order, and how often a run dies."""

import json
from pathlib import Path

import pytest
import torch

from attar.data.examples import Examples
from attar.data.packing import PADDING
from attar.distillation.loss import DistillationLoss
from attar.distillation.objectives import OBJECTIVES
from attar.distillation.settings import distill_settings, recover_settings
from attar.distillation.signals.cached import CachedTeacher, summary
from attar.distillation.signals.online import OnlineTeacher
from attar.distillation.stage import recover
from attar.errors import SettingsError
from attar.walks import train as walk
from tests import tiny_models

SMALL = {
    "steps": 8,
    "batch_size": 2,
    "sequence_length": 16,
    "learning_rate": 3e-3,
    "precision": "fp32",
    "checkpoint_every": 2,
    "rows": 5,
    "teacher_top": 8,
    "data": str(Path(json.__file__).parent),
}


def keeping(model, folder, top=8, temperature=1.0, fingerprint="f", precision="fp32"):
    return CachedTeacher(model, folder, fingerprint, precision, top, temperature, width=320)


def test_all_tokens_kept_give_the_loss_and_the_gradient_of_the_plain_one(tmp_path):
    """But for the probabilities' rounding to float16; padding and the hard loss included."""
    teacher, student = tiny_models.build("llama3"), tiny_models.build("llama3", seed=1)
    tokens = tiny_models.tokens(teacher)
    tokens[0, -3:] = PADDING
    for alpha in (1.0, 0.3):
        plain, kept = (
            DistillationLoss(signal, alpha)(student, Examples.of_text(tokens))
            for signal in (
                OnlineTeacher(teacher, OBJECTIVES["kl"], 2.0),
                keeping(teacher, tmp_path, top=10**6, temperature=2.0),
            )
        )
        assert kept.item() == pytest.approx(plain.item(), rel=1e-3)
        wanted, got = (torch.autograd.grad(loss, list(student.parameters())) for loss in (plain, kept))
        for one, other in zip(wanted, got, strict=True):
            assert (one - other).norm() <= 2e-3 * one.norm() + 1e-7


def test_what_is_drawn_is_right_on_average():
    """The likeliest tokens keep their probabilities; the mean of many draws is the whole distribution."""
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(1)).expand(4000, -1).contiguous()
    kept = summary(logits, 4, seed=3)
    tokens, likely = kept["tokens"].long(), kept["likely"].double()
    p = logits[0].double().softmax(-1)
    assert kept["tokens"].dtype == torch.uint16 and tokens.shape == (4000, 5)
    assert torch.allclose(likely[0], p.topk(4).values, rtol=1e-3)
    assert kept["entropy"][0].item() == pytest.approx(-(p * p.log()).sum().item(), rel=1e-5)
    mean = torch.zeros(4000, 12, dtype=torch.float64).scatter_(1, tokens[:, :4], likely)
    mean.scatter_add_(1, tokens[:, 4:], 1 - likely.sum(1, keepdim=True))
    assert torch.allclose(mean.mean(0), p, atol=0.01)


def test_a_rows_numbers_are_its_own(tmp_path):
    """Alone, in a batch, first or last, from the teacher or from the file: the same bits."""
    teacher = tiny_models.build("llama3")
    rows = tiny_models.tokens(teacher, batch=3, length=12)
    together = keeping(teacher, tmp_path / "one")(rows)
    alone = [keeping(teacher, tmp_path / "two")(row[None]) for row in rows.flip(0)][::-1]
    again = keeping(None, tmp_path / "one")(rows)  # without a teacher
    assert torch.equal(together.tokens, again.tokens) and torch.equal(together.weights, again.weights)
    assert torch.equal(together.weights, torch.cat([part.weights for part in alone]))
    assert torch.equal(together.entropy, torch.cat([part.entropy for part in alone]))
    assert torch.allclose(together.weights.sum(1), torch.ones(33))


def test_another_teacher_setting_or_text_is_asked_anew(tmp_path):
    teacher = tiny_models.build("llama3")
    rows = tiny_models.tokens(teacher, batch=1, length=12)
    keeping(teacher, tmp_path)(rows)
    others = [{"fingerprint": "g"}, {"temperature": 2.0}, {"top": 4}, {"precision": "bf16"}]
    for number, change in enumerate(others, 2):
        keeping(teacher, tmp_path, **change)(rows)
        assert len(list(tmp_path.glob("*/*.safetensors"))) == number
    keeping(teacher, tmp_path)(rows.flip(1))
    assert len(list(tmp_path.glob("*/*.safetensors"))) == len(others) + 2


def test_a_broken_file_is_written_again(tmp_path):
    teacher = tiny_models.build("llama3")
    rows = tiny_models.tokens(teacher, batch=1, length=12)
    wanted = keeping(teacher, tmp_path)(rows)
    (file,) = tmp_path.glob("*/*.safetensors")
    file.write_bytes(file.read_bytes()[:100])
    assert torch.equal(keeping(teacher, tmp_path)(rows).weights, wanted.weights)
    assert torch.equal(keeping(None, tmp_path)(rows).weights, wanted.weights)


class Killed(BaseException):
    """Stands for a process that dies between two steps."""


@pytest.mark.parametrize("died_at", [1, 5])
def test_a_killed_run_ends_with_the_same_bytes(tmp_path, monkeypatch, died_at):
    """Five rows, sixteen times shown: over epochs whose batches hold rows of two of them."""
    teacher = tiny_models.save(tiny_models.build("llama3"), tmp_path / "teacher")
    pruned = tiny_models.save(tiny_models.build("llama3", intermediate_size=64), tmp_path / "pruned")
    settings = recover_settings(**SMALL)
    whole = recover(pruned, tmp_path / "whole" / "m", settings, teacher=teacher)
    step = walk._step

    def deadly(run, loss, batches, number, settings):
        if number == died_at:
            raise Killed
        return step(run, loss, batches, number, settings)

    with monkeypatch.context() as patch:
        patch.setattr(walk, "_step", deadly)
        with pytest.raises(Killed):
            recover(pruned, tmp_path / "cut" / "m", settings, teacher=teacher)
    assert list((tmp_path / "cut/.m.work/signal").glob("*/*.safetensors"))
    cut = recover(pruned, tmp_path / "cut" / "m", settings, teacher=teacher)
    assert cut.card.files == whole.card.files
    assert cut.card.details["curve"] == whole.card.details["curve"]


def test_two_stages_share_what_is_kept(tmp_path, monkeypatch):
    """The second one asks the teacher nothing: it reads the rows and the held-out text of the first."""
    teacher = tiny_models.save(tiny_models.build("llama3"), tmp_path / "teacher")
    settings = recover_settings(**SMALL)
    recover(teacher, tmp_path / "one", settings, teacher=teacher, signal=tmp_path / "signal")
    count = len(list((tmp_path / "signal").glob("*/*.safetensors")))

    def refuse(self, row, seed):
        raise AssertionError("the teacher was asked")

    monkeypatch.setattr(CachedTeacher, "_predict", refuse)
    recovered = recover(teacher, tmp_path / "two", settings, teacher=teacher, signal=tmp_path / "signal")
    assert count == len(list((tmp_path / "signal").glob("*/*.safetensors"))) > 5
    assert recovered.card.details["precision"] == "fp32"


def test_a_draft_model_needs_all_logits():
    with pytest.raises(SettingsError, match="lk, which reads all logits"):
        distill_settings(for_drafting=True, teacher_top=8)
