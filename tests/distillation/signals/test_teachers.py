"""Teachers of every kind that attar reads: dense, quantized in each layout, a GGUF file; in bf16; with a
padded vocabulary."""

import json
from pathlib import Path

import pytest
import torch

import attar
from attar.data.examples import Examples
from attar.distillation.loss import DistillationLoss
from attar.distillation.objectives import OBJECTIVES
from attar.distillation.settings import distill_settings, recover_settings
from attar.distillation.signals.alignment.route import TokenizerPair
from attar.distillation.signals.alignment.tokenizers import check_known
from attar.distillation.signals.online import OnlineTeacher, online_signal
from attar.distillation.signals.target import SignalSource
from attar.distillation.stage import distill, recover
from attar.errors import DataError, SettingsError
from attar.walks import train as walk
from tests import tiny_models

SMALL = {
    "steps": 20,
    "batch_size": 4,
    "sequence_length": 32,
    "learning_rate": 3e-3,
    "precision": "fp32",
    "data": str(Path(json.__file__).parent),
}
WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}  # whole groups of 128


def curve(checkpoint):
    return [row["loss"] for row in checkpoint.card.details["curve"] if "loss" in row]


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return tiny_models.save(tiny_models.build("llama3", **WIDE), tmp_path_factory.mktemp("dense") / "model")


def packed(dense, folder, kind):
    """A teacher of a kind."""
    if kind == "gguf":
        return attar.export(dense, folder / "teacher.gguf", format="gguf", type="Q8_0", imatrix="none")
    if kind in ("gptq", "bitsandbytes"):
        scheme = "W8A16" if kind == "bitsandbytes" else "W4A16"
        group = {"group_size": 0} if kind == "bitsandbytes" else {}
        codes = attar.quantize(dense, folder / "codes", scheme=scheme, method="rtn", **group)
        return attar.export(codes, folder / kind, format=kind)
    return attar.quantize(dense, folder / kind, scheme=kind, method="rtn")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["W4A16", "FP8", "gptq", "bitsandbytes", "gguf"])
def test_a_student_learns_from_a_teacher_of_any_kind(tmp_path, dense, kind):
    path = getattr(packed(dense, tmp_path, kind), "path", tmp_path / "teacher.gguf")
    if kind == "gguf":
        path = next(tmp_path.rglob("*.gguf"))
    student = distill(path, tmp_path / "student", distill_settings(layers=1, **SMALL))
    assert curve(student)[-1] < 0.9 * curve(student)[0]
    assert student.config["num_hidden_layers"] == 1 and "quantization_config" not in student.config
    damaged = tiny_models.save(tiny_models.build("llama3", seed=1, **WIDE), tmp_path / "damaged")
    recovered = recover(damaged, tmp_path / "recovered", recover_settings(**SMALL), teacher=path)
    assert curve(recovered)[-1] < 0.9 * curve(recovered)[0]


@pytest.mark.slow
def test_a_teacher_in_bf16_gives_the_same_run_in_half_the_memory(tmp_path, dense, monkeypatch):
    """Every loss is bit for bit that of float32 weights under autocast."""
    damaged = tiny_models.save(tiny_models.build("llama3", seed=1, **WIDE), tmp_path / "damaged")
    settings = recover_settings(**{**SMALL, "steps": 4, "precision": "bf16"})
    kinds = []
    step = walk._step

    def spy(run, loss, source, number, settings):
        kinds.append({p.dtype for p in loss.signal.model.parameters()})
        return step(run, loss, source, number, settings)

    monkeypatch.setattr(walk, "_step", spy)
    rounded = recover(damaged, tmp_path / "rounded", settings, teacher=dense)
    assert kinds[0] == {torch.float32, torch.bfloat16}
    monkeypatch.setattr("attar.distillation.learn.round_frozen", lambda model: 0)
    plain = recover(damaged, tmp_path / "plain", settings, teacher=dense)
    assert kinds[-1] == {torch.float32}
    assert rounded.card.details["curve"] == plain.card.details["curve"]
    assert rounded.card.files["model.safetensors"] == plain.card.files["model.safetensors"]


@pytest.mark.few(2)
@pytest.mark.parametrize("objective", [name for name in OBJECTIVES if name != "hard"])
def test_padding_of_the_vocabulary_is_never_learned(objective):
    """Nonsense in columns that are no tokens, on both sides and of two widths, changes neither loss nor
    gradient: no probability leaks to them, and none is taught."""
    student = tiny_models.build("llama3", vocab_size=336)
    teacher = tiny_models.build("llama2", vocab_size=352)
    batch = Examples.of_text(tiny_models.tokens(tiny_models.build("llama3")))
    results = []
    for nonsense in (0.0, 30.0):
        with torch.no_grad():
            student.lm_head.weight[320:], teacher.lm_head.weight[320:] = nonsense, nonsense
        source = SignalSource(teacher, None, None, None, TokenizerPair(vocabulary=320))
        signal = online_signal(source, student, recover_settings(objective=objective))
        loss = DistillationLoss(signal)(student, batch)
        (gradient,) = torch.autograd.grad(loss, student.lm_head.weight)
        assert gradient[:320].any() and not gradient[320:].any()
        results.append((loss.detach(), gradient))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    narrow = tiny_models.build("llama2", vocab_size=320)
    with torch.no_grad():
        for (_, one), (_, other) in zip(narrow.named_parameters(), teacher.named_parameters(), strict=True):
            one.copy_(other[: len(one)])
    plain = DistillationLoss(OnlineTeacher(narrow, signal.objective, 1.0))(student, batch)
    assert plain.item() == pytest.approx(results[0][0].item(), rel=1e-6)


def test_rows_longer_than_the_teachers_context_are_refused(tmp_path):
    teacher = tiny_models.save(tiny_models.build("gpt2", n_positions=16), tmp_path / "teacher")
    damaged = tiny_models.save(tiny_models.build("llama3"), tmp_path / "damaged")
    with pytest.raises(SettingsError, match="sequence_length is 32, but must be at most 16, the context of"):
        recover(damaged, tmp_path / "out", recover_settings(**SMALL), teacher=teacher)
    assert not (tmp_path / "out").exists()


def test_a_special_token_that_the_teacher_lacks_is_refused_in_text():
    rows = torch.tensor([[3, 4, 320], [5, -100, -100]])
    check_known(rows, {})
    check_known(rows[1:], {320: "<tool>"})
    with pytest.raises(DataError, match="the token <tool>, which the teacher's tokenizer lacks"):
        check_known(rows, {320: "<tool>"})
