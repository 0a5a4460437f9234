"""What a teacher predicts, kept on disk: exact where all of it is kept, right on average where it is drawn,
and the same whatever is learned from it, in which order, and how often a run dies."""

import json
from pathlib import Path

import pytest
import torch

from attar.checkpoint.open import open_checkpoint
from attar.data.examples import Examples
from attar.data.packing import PADDING, numbered_generator
from attar.distillation.loss import DistillationLoss
from attar.distillation.objectives import OBJECTIVES
from attar.distillation.objectives.forward_kl import sparse_loss_and_grad
from attar.distillation.outputs import NOTHING
from attar.distillation.settings import distill_settings, recover_settings
from attar.distillation.signals import cached
from attar.distillation.signals.alignment.route import TokenizerPair
from attar.distillation.signals.cached import CachedTeacher, cached_signal
from attar.distillation.signals.online import OnlineTeacher
from attar.distillation.signals.prediction_store import PredictionStore, row_digest
from attar.distillation.signals.sampling import sparse_prediction, sparse_weights
from attar.distillation.signals.target import SignalSource
from attar.distillation.stage import recover
from attar.errors import SettingsError
from attar.walks import train as walk
from tests import tiny_models
from tests.killed import Killed

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
V, DRAWS = 12, 100_000


def keeping(model, folder, top=8, draws=2, temperature=1.0, precision="fp32"):
    return CachedTeacher(model, PredictionStore(folder), precision, top, draws, temperature, width=320)


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


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


@pytest.mark.few(1)
@pytest.mark.parametrize("top", [8, 10**6])
def test_padding_of_the_vocabulary_is_neither_kept_nor_learned(tmp_path, top):
    """Nonsense in columns that are no tokens, on both sides and of two widths, changes nothing."""
    student, teacher = (
        tiny_models.build("llama3", vocab_size=336),
        tiny_models.build("llama2", vocab_size=352),
    )
    folder = tiny_models.save(tiny_models.build("llama2"), tmp_path / "teacher")
    batch, results = Examples.of_text(tiny_models.tokens(tiny_models.build("llama3"))), []
    for nonsense in (0.0, 30.0):
        with torch.no_grad():
            student.lm_head.weight[320:], teacher.lm_head.weight[320:] = nonsense, nonsense
        work = tmp_path / str(nonsense)
        pair = TokenizerPair(vocabulary=320)
        source = SignalSource(teacher, open_checkpoint(folder), work, work, pair)
        loss = DistillationLoss(cached_signal(source, student, recover_settings(teacher_top=top)))
        value = loss(student, batch)
        (gradient,) = torch.autograd.grad(value, student.lm_head.weight)
        assert gradient[:320].any() and not gradient[320:].any()
        results.append((value.detach(), gradient))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def test_what_the_numbers_depend_on_names_their_folder(tmp_path):
    """Stages with one cache share what is the same, and never another teacher's."""
    folders = {}
    for seed in (0, 1):
        model = tiny_models.build("llama3", seed=seed)
        checkpoint = open_checkpoint(tiny_models.save(model, tmp_path / str(seed)))
        source = SignalSource(model, checkpoint, tmp_path / "cache", tmp_path, TokenizerPair(vocabulary=320))
        for options in ({}, {"temperature": 2.0}, {"teacher_samples": 3}, {"teacher_top": 9}):
            settings = recover_settings(**{"teacher_top": 8, "precision": "fp32", **options})
            stores = [cached_signal(source, model, settings).store.folder for _ in range(2)]
            assert stores[0] == stores[1]
            folders[seed, *options] = stores[0]
    assert len(set(folders.values())) == len(folders) == 8


def drawn(top, draws):
    """One position's distribution and its prediction, drawn 10^5 times: student's logits, p, p' (.., V)."""
    generator = numbered_generator(1, 0)
    t, z = 2 * torch.randn(2, V, generator=generator)
    uniforms = torch.rand(DRAWS, draws, dtype=torch.float64, generator=generator)
    tokens, likely, entropy = sparse_prediction(t.expand(DRAWS, V), top, uniforms)
    weights = sparse_weights(likely, draws)
    p = t.double().softmax(-1)
    assert entropy[0].item() == pytest.approx(-(p * p.log()).sum().item(), rel=1e-5)
    return z, p, tokens, weights, entropy


@pytest.mark.parametrize(("top", "draws"), [(4, 1), (0, 3), (3, 2)])
def test_the_mean_gradient_of_many_draws_is_that_of_all_tokens(top, draws):
    """Within three standard errors at every token; that of the likeliest alone is far off."""
    z, p, tokens, weights, entropy = drawn(top, draws)
    dense, _ = OBJECTIVES["kl"](z[None].double(), p.log()[None], 1.0)
    wanted = z.double().softmax(-1) - p
    values, gradients = sparse_loss_and_grad(z.expand(DRAWS, V).contiguous(), tokens, weights, entropy)
    gradients = gradients.double()
    error = gradients.std(0) / DRAWS**0.5 + 1e-6
    assert ((gradients.mean(0) - wanted).abs() <= 3 * error).all()
    spread = values.double().std() / DRAWS**0.5
    assert (values.double().mean() - dense[0]).abs() <= 3 * spread + 1e-5
    likeliest = max(top, 4)
    alone = torch.zeros(V, dtype=torch.float64)
    alone[p.topk(likeliest).indices] = p.topk(likeliest).values / p.topk(likeliest).values.sum()
    biased = z.double().softmax(-1) - alone
    assert ((biased - wanted).abs() > 9 * error).sum() >= V // 2


def test_sizes_of_what_is_kept():
    """292 bytes a position at K = 64, at any vocabulary below 65,536."""
    logits = torch.randn(3, 1000)
    teacher = CachedTeacher(None, None, "fp32", 64, 16, 1.0, 1000)
    tokens, likely, entropy = sparse_prediction(logits, 64, teacher._uniforms([5], 3))
    sizes = [tokens.to(torch.uint16).nbytes, likely.half().nbytes, entropy.nbytes]
    assert sum(sizes) == 3 * 292


@pytest.mark.few(2)
@pytest.mark.parametrize("family", ["llama3", "gpt2", "gemma2"])
@pytest.mark.parametrize("length", [12, 37])
def test_a_rows_numbers_are_its_own(tmp_path, family, length, monkeypatch):
    """Alone, in a batch, first or last, from the teacher or from the file: the same bits."""
    monkeypatch.setattr(cached, "TOKENS", 8 * length)
    teacher = tiny_models.build(family)
    rows = tiny_models.tokens(teacher, batch=11, length=length)
    together = keeping(teacher, tmp_path / "one").predictions(rows)
    other = keeping(teacher, tmp_path / "two")
    alone = [other.predictions(row[None]) for row in rows.flip(0)][::-1]
    apart = {name: torch.cat([part[name] for part in alone]) for name in together}
    differs = {name: (together[name] != apart[name]).nonzero()[:3].tolist() for name in together}
    assert same(together, apart), (differs, torch.get_num_threads())
    again = keeping(None, tmp_path / "one").predictions(rows)  # without a teacher
    assert same(together, again)
    assert same({name: value.flip(0) for name, value in together.items()}, other.predictions(rows.flip(0)))


def test_a_row_that_training_asks_for_is_that_of_the_pass_before(tmp_path):
    """Under autocast, as a process of several does it."""
    teacher = tiny_models.build("llama3")
    rows = tiny_models.tokens(teacher, batch=3, length=12)
    before, within = (keeping(teacher, tmp_path / name, precision="bf16") for name in ("before", "within"))
    before.prepare([Examples.of_text(rows)])
    with torch.autocast("cpu", torch.bfloat16):
        within.target(Examples.of_text(rows[1:2]), NOTHING)
        assert same(within.predictions(rows), before.predictions(rows))


@pytest.mark.slow
def test_one_pass_over_all_rows_writes_few_files(tmp_path):
    teacher = tiny_models.build("llama3")
    rows = tiny_models.tokens(teacher, batch=150, length=12)
    kept = keeping(teacher, tmp_path / "pass")
    kept.prepare([Examples.of_text(rows), Examples.of_text(rows[:10])])
    assert len(list((tmp_path / "pass").glob("*.safetensors"))) == 3
    batch = rows[torch.randperm(150, generator=numbered_generator(2, 0))[:20]]
    wanted = keeping(teacher, tmp_path / "batch").predictions(batch)
    assert same(kept.predictions(batch), wanted)
    assert same(keeping(None, tmp_path / "pass").predictions(batch), wanted)


def test_answers_alone_have_their_predictions(tmp_path):
    teacher = tiny_models.build("llama3")
    batch = Examples.of_text(tiny_models.tokens(teacher, batch=2, length=12))
    targets = batch.targets.clone()
    targets[0, :7] = PADDING
    kept = keeping(teacher, tmp_path)
    every = kept.target(batch, NOTHING)
    answers = kept.target(Examples(batch.tokens, targets), NOTHING)
    assert torch.equal(answers.weights, every.weights[7:]) and len(every.weights) == 22


def test_a_damaged_file_is_written_again(tmp_path):
    teacher = tiny_models.build("llama3")
    rows = tiny_models.tokens(teacher, batch=1, length=12)
    wanted = keeping(teacher, tmp_path).predictions(rows)
    (file,) = tmp_path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:100])
    assert row_digest(rows[0]) not in PredictionStore(tmp_path)
    assert same(keeping(teacher, tmp_path).predictions(rows), wanted)
    assert same(keeping(None, tmp_path).predictions(rows), wanted)


def dying(function, after):
    calls = iter(range(10**6))

    def run(*args, **kwargs):
        if next(calls) == after:
            raise Killed
        return function(*args, **kwargs)

    return run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A teacher, its pruned copy, and the run that nothing kills."""
    folder = tmp_path_factory.mktemp("undisturbed")
    teacher = tiny_models.save(tiny_models.build("llama3"), folder / "teacher")
    pruned = tiny_models.save(tiny_models.build("llama3", intermediate_size=64), folder / "pruned")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cached, "FILE_ROWS", 256)
        whole = recover(pruned, folder / "whole" / "m", recover_settings(**SMALL), teacher=teacher)
    return teacher, pruned, whole


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name", "after"), [(walk, "_step", 1), (walk, "_step", 5), (PredictionStore, "write", 1)]
)
def test_a_killed_run_ends_with_the_same_bytes(undisturbed, tmp_path, monkeypatch, owner, name, after):
    """Five rows, sixteen times shown: over epochs whose batches hold rows of two of them."""
    monkeypatch.setattr(cached, "FILE_ROWS", 256)
    (teacher, pruned, whole), settings = undisturbed, recover_settings(**SMALL)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, dying(getattr(owner, name), after))
        with pytest.raises(Killed):
            recover(pruned, tmp_path / "cut" / "m", settings, teacher=teacher)
    assert list((tmp_path / "cut/.m.work/signal").glob("*/*.safetensors"))
    cut = recover(pruned, tmp_path / "cut" / "m", settings, teacher=teacher)
    assert cut.card.files == whole.card.files
    assert cut.card.details["curve"] == whole.card.details["curve"]


def test_two_stages_share_what_is_kept(tmp_path, monkeypatch):
    """The second one asks the teacher nothing: it reads the rows and the held-out text of the first. Other
    settings ask again."""
    teacher = tiny_models.save(tiny_models.build("llama3"), tmp_path / "teacher")
    settings = recover_settings(**{**SMALL, "steps": 4, "checkpoint_every": 4})
    recover(teacher, tmp_path / "one", settings, teacher=teacher, signal=tmp_path / "signal")
    files = sorted((tmp_path / "signal").glob("*/*.safetensors"))
    monkeypatch.setattr(CachedTeacher, "_predict", dying(CachedTeacher._predict, 0))
    recovered = recover(teacher, tmp_path / "two", settings, teacher=teacher, signal=tmp_path / "signal")
    assert files == sorted((tmp_path / "signal").glob("*/*.safetensors")) != []
    assert recovered.card.details["precision"] == "fp32"
    for change in ({"temperature": 2.0}, {"teacher_top": 4}, {"teacher_samples": 5}):
        monkeypatch.setattr(CachedTeacher, "_predict", dying(CachedTeacher._predict, 0))
        with pytest.raises(Killed):
            other = recover_settings(**{**SMALL, "steps": 4, **change})
            recover(teacher, tmp_path / "three", other, teacher=teacher, signal=tmp_path / "signal")


@pytest.mark.slow
def test_drawn_tokens_alone_teach(tmp_path):
    teacher = tiny_models.save(tiny_models.build("llama3"), tmp_path / "teacher")
    pruned = tiny_models.save(tiny_models.build("llama3", intermediate_size=64), tmp_path / "pruned")
    settings = recover_settings(**{**SMALL, "steps": 60, "teacher_top": 0}, teacher_samples=24)
    assert settings.teacher_signal == "cached"
    recovered = recover(pruned, tmp_path / "out", settings, teacher=teacher)
    curve = [row["loss"] for row in recovered.card.details["curve"] if "loss" in row]
    assert curve[-1] < 0.8 * curve[0]


@pytest.mark.parametrize("option", ["teacher_top", "teacher_samples"])
def test_what_reads_all_logits_is_refused(option):
    with pytest.raises(SettingsError, match=f"{option} is 8, but must be 0 with objective lk"):
        distill_settings(for_drafting=True, **{option: 8})
    with pytest.raises(SettingsError, match=f"{option} is 8, but must be 0 with objective sft"):
        recover_settings(objective="sft", **{option: 8})
