"""Distilling for drafting: rows of the teacher's own, fresh narrow students, the report, a run killed half
way."""

import json
from pathlib import Path

import pytest
import torch

from attar.checkpoint.hashing import sha256_file
from attar.data.examples import Examples
from attar.data.packing import PADDING
from attar.distillation.for_drafting import describe_report, draft_report
from attar.distillation.rollouts import teacher as rollouts
from attar.distillation.rollouts.teacher import RolloutWriter, write_rows
from attar.distillation.settings import distill_settings
from attar.distillation.stage import distill
from attar.models.loading.load import load_tokenizer
from attar.progress import SILENT
from tests import tiny_models

SMALL = {
    "steps": 30,
    "batch_size": 4,
    "sequence_length": 32,
    "learning_rate": 3e-3,
    "precision": "fp32",
    "checkpoint_every": 10,
    "data": str(Path(json.__file__).parent),
    "layers": 1,
    "for_drafting": True,
    "num_rollouts": 64,
    "prompt_tokens": 4,
}


@pytest.fixture
def teacher(tmp_path, monkeypatch):
    monkeypatch.setattr(rollouts, "HELD_OUT_TOKENS", 1024)
    return tiny_models.save(tiny_models.build("llama3"), tmp_path / "teacher")


def write(model, work, *, length=10, rows=6, ends=(), temperature=1.0, seed=0, vocabulary=320):
    prompts = tiny_models.tokens(model, batch=rows, length=3).tolist()
    options = {"vocabulary": vocabulary, "ends": ends, "temperature": temperature, "seed": seed}
    return write_rows(model, prompts, length, **options, work=work, progress=SILENT)


def test_rows_begin_with_their_prompts_and_follow_the_teacher(tmp_path):
    """Nearly greedy draws over a cache are the likeliest tokens of whole passes."""
    model = tiny_models.build("llama3")
    rows = write(model, tmp_path, temperature=1e-4)
    assert torch.equal(rows[:, :3], tiny_models.tokens(model, batch=6, length=3))
    assert torch.equal(tiny_models.logits(model, rows)[:, 2:-1].argmax(-1), rows[:, 3:])


@pytest.mark.slow
def test_draws_are_those_of_the_teachers_distribution(tmp_path, monkeypatch):
    monkeypatch.setattr(rollouts, "ROWS", 1000)
    model = tiny_models.build("llama3")
    prompts = torch.tensor([[7, 8, 9]]).expand(4_000, 3)
    rows = write_rows(
        model,
        prompts.tolist(),
        4,
        vocabulary=40,
        ends=(),
        temperature=2.0,
        seed=0,
        work=tmp_path,
        progress=SILENT,
    )
    p = (tiny_models.logits(model, prompts[:1])[0, -1, :40].double() / 2.0).softmax(-1)
    counts = rows[:, 3].bincount(minlength=40).double() / 4_000
    assert len(counts) == 40 and 0.5 * (p - counts).abs().sum() < 0.06


def test_what_follows_an_end_is_padding(tmp_path):
    model = tiny_models.build("llama3")
    free = write(model, tmp_path / "free", length=12)
    end = int(free[0, 6])
    cut = write(model, tmp_path / "cut", length=12, ends=(end,))
    assert cut[0, 6] == end and (cut[0, 7:] == PADDING).all()
    for ours, theirs in zip(cut, free, strict=True):
        kept = ours[ours != PADDING]
        assert torch.equal(kept, theirs[: len(kept)])


def test_written_rows_survive_a_kill(tmp_path, monkeypatch):
    model = tiny_models.build("llama3")
    monkeypatch.setattr(rollouts, "ROWS", 2)
    whole = write(model, tmp_path / "whole")
    write(model, tmp_path / "killed")
    (tmp_path / "killed/000002.safetensors").unlink()
    (tmp_path / "killed/000002.partial").write_bytes(b"half")
    monkeypatch.setattr(rollouts, "sample_rows", counted(calls := [], rollouts.sample_rows))
    assert torch.equal(write(model, tmp_path / "killed"), whole) and len(calls) == 1


def test_a_run_with_fewer_prompts_takes_its_rows_from_those_written(tmp_path, monkeypatch):
    model = tiny_models.build("llama3")
    monkeypatch.setattr(rollouts, "ROWS", 4)
    whole = write(model, tmp_path)
    monkeypatch.setattr(rollouts, "sample_rows", counted(calls := [], rollouts.sample_rows))
    assert torch.equal(write(model, tmp_path, rows=3), whole[:3]) and not calls
    more = write(model, tmp_path, rows=8)
    assert torch.equal(more[:6], whole) and len(calls) == 1


def test_rows_after_other_prompts_are_written_anew(tmp_path):
    model = tiny_models.build("llama3")
    options = {"vocabulary": 320, "ends": (), "temperature": 1.0, "seed": 0}
    for prompts in ([[1, 2, 3], [4, 5]], [[1, 2, 3], [6]]):
        rows = write_rows(model, prompts, 10, **options, work=tmp_path, progress=SILENT)
        for row, prompt in zip(rows.tolist(), prompts, strict=True):
            assert row[: len(prompt)] == prompt


def counted(calls, function):
    def wrapped(*arguments, **options):
        calls.append(arguments)
        return function(*arguments, **options)

    return wrapped


@pytest.mark.slow
def test_held_out_rows_are_the_same_for_every_seed(tmp_path, monkeypatch):
    """So that cards of different seeds tell of the same rows; what is trained on follows the seed."""
    monkeypatch.setattr(rollouts, "HELD_OUT_TOKENS", 64)
    model, text = tiny_models.build("llama3"), Examples.of_text(torch.full((4, 12), 7))
    tokenizer = load_tokenizer(tiny_models.save(model, tmp_path / "model"))
    changes = {name: SMALL[name] for name in ("data", "num_rollouts", "prompt_tokens")}
    writers = [
        RolloutWriter(
            model,
            tokenizer,
            distill_settings(seed=seed, for_drafting=True, **changes),
            12,
            tmp_path / str(seed),
            SILENT,
        )
        for seed in (0, 1)
    ]
    one, other = (writer.held_out_rows() for writer in writers)
    assert one.tokens.shape == (8, 12) and torch.equal(one.tokens, other.tokens)
    one, other = (writer.training_rows(8, text).tokens for writer in writers)
    assert one.shape == (8, 12) and not torch.equal(one, other) and torch.equal(one[4:], text.tokens)


def test_a_model_drafts_perfectly_for_itself():
    model = tiny_models.build("llama3")
    numbers = draft_report(model, model, tiny_models.tokens(model, batch=3, length=12), prompt=2, batch=2)
    assert numbers["acceptance"] == pytest.approx(1.0) and numbers["greedy_agreement"] == 1.0
    assert numbers["tokens"] == 30 and numbers["by_rows"]["8"] == pytest.approx(9.0)
    assert "acceptance 1.000" in describe_report(numbers) and "3.00, 5.00, 9.00" in describe_report(numbers)


def test_the_report_is_by_definition_of_the_places_behind_the_prompt():
    target, draft = tiny_models.build("llama3"), tiny_models.build("llama3", seed=1)
    rows = tiny_models.tokens(target, batch=2, length=9)
    p, q = (tiny_models.logits(model, rows).double().softmax(-1)[:, 2:-1] for model in (target, draft))
    chosen = rows[:, 3:, None]
    ratios = (q.gather(-1, chosen) / p.gather(-1, chosen)).clamp(max=1.0)[..., 0]
    numbers = draft_report(draft, target, rows, prompt=3, batch=2)
    assert numbers["acceptance"] == pytest.approx(torch.minimum(p, q).sum(-1).mean().item(), rel=1e-4)
    assert numbers["greedy_agreement"] == pytest.approx((p.argmax(-1) == q.argmax(-1)).double().mean().item())
    pairs = ratios[:, :-1] * ratios[:, 1:]
    wanted = 1 + ratios.mean().item() + pairs.mean().item()
    assert numbers["by_rows"]["2"] == pytest.approx(wanted, rel=1e-4)


def test_the_report_counts_the_common_vocabulary_and_no_padding():
    model, wide = tiny_models.build("llama3"), tiny_models.build("llama3", vocab_size=384)
    rows = tiny_models.tokens(model, batch=2, length=10)
    padded = torch.cat([rows, torch.full((2, 4), PADDING)], 1)
    got, wanted = (draft_report(wide, model, row, prompt=2, batch=2) for row in (padded, rows))
    assert got["tokens"] == wanted["tokens"] == 16
    assert got["acceptance"] == pytest.approx(wanted["acceptance"], rel=1e-5)
    assert got["by_rows"]["4"] == pytest.approx(wanted["by_rows"]["4"], rel=1e-5)


@pytest.mark.slow
def test_acceptance_rises_above_that_of_plain_training(teacher, tmp_path):
    """The same student, rows and steps; only what is learned differs."""
    learned = {}
    for name, changes in {
        "plain": {"alpha": 0.0, "teacher_generated": 0.0},
        "lk": {},
        "tv": {"objective": "tv"},
    }.items():
        student = distill(teacher, tmp_path / name, distill_settings(**{**SMALL, **changes}))
        learned[name] = student.card.details["drafting"]["acceptance"]
    assert learned["lk"] > 1.2 * learned["plain"] and learned["tv"] > 1.2 * learned["plain"], learned


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_bytes(teacher, tmp_path, monkeypatch):
    settings = distill_settings(**{**SMALL, "steps": 20, "width": 32})
    whole = distill(teacher, tmp_path / "a/out", settings)
    from attar.walks import train as module

    step = module._step

    def dying(run, loss, batches, number, settings):
        if number == 15:
            raise KeyboardInterrupt
        return step(run, loss, batches, number, settings)

    monkeypatch.setattr(module, "_step", dying)
    with pytest.raises(KeyboardInterrupt):
        distill(teacher, tmp_path / "b/out", settings)
    monkeypatch.setattr(module, "_step", step)
    monkeypatch.setattr(rollouts, "sample_rows", counted(calls := [], rollouts.sample_rows))
    resumed = distill(teacher, tmp_path / "b/out", settings)
    assert not calls  # the teacher wrote everything before the kill
    for file in ("model.safetensors", "attar.json"):
        assert sha256_file(whole.path / file) == sha256_file(resumed.path / file)
    assert not (tmp_path / "b/.out.work").exists()
