"""``attar distill --head``: what it refuses, what its card says, and a run that is killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import attar
from attar.checkpoint.hashing import sha256_file
from attar.checkpoint.open import open_checkpoint
from attar.distillation.heads import train as module
from attar.distillation.rollouts import teacher as rollouts
from attar.errors import DataError, ModelError, SettingsError, UsageError
from attar.models.draft_heads.folder import load_draft_head
from tests import tiny_models
from tests.cases import mostly_slow
from tests.killed import Killed

SMALL = {
    "head": "medusa",
    "drafts": 2,
    "steps": 6,
    "batch_size": 2,
    "sequence_length": 32,
    "num_rollouts": 4,
    "prompt_tokens": 4,
    "evaluate_every": 3,
    "precision": "fp32",
    "data": str(Path(json.__file__).parent),
}
FILES = ("model.safetensors", "config.json", "attar.json", "README.md")
KINDS = {
    "medusa": {"draft_vocabulary": 100},
    "eagle": {},  # draws noise
    "eagle3": {"draft_vocabulary": 100, "unrolled": 2},
    "dflash": {"anchors": 4},  # draws anchors
    "dspark": {"anchors": 4, "markov": "rnn", "draft_vocabulary": 100},
}


@pytest.fixture
def target(tmp_path, monkeypatch):
    monkeypatch.setattr(rollouts, "HELD_OUT_TOKENS", 64)
    return tiny_models.save(tiny_models.build("llama3"), tmp_path / "target")


def hashes(folder):
    return {name: sha256_file(folder / name) for name in FILES}


def die_after(monkeypatch, calls):
    count, run = [0], module.HeadLoss.__call__

    def deadly(self, model, batch):
        count[0] += 1
        if count[0] > calls:
            raise Killed
        return run(self, model, batch)

    monkeypatch.setattr(module.HeadLoss, "__call__", deadly)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("kind", "cache"),
    mostly_slow(
        [("medusa", "0"), ("medusa", "1MB"), *((kind, "20KB") for kind in KINDS)],
        [("medusa", "0"), ("medusa", "1MB"), ("medusa", "20KB"), ("eagle", "20KB"), ("dspark", "20KB")],
    ),
)
def test_a_killed_run_ends_with_the_bytes_of_an_undisturbed_one(target, tmp_path, monkeypatch, kind, cache):
    options = SMALL | {"head": kind, "state_cache": cache, "checkpoint_every": 2} | KINDS[kind]
    attar.train_head(target, tmp_path / "a" / "head", **options)
    with monkeypatch.context() as patch:
        die_after(patch, 4)
        with pytest.raises(Killed):
            attar.train_head(target, tmp_path / "b" / "head", **options)
    work = tmp_path / "b" / ".head.work"
    assert (work / "train" / "state-00000002").is_dir()
    states = sorted((work / "states").glob("*.safetensors")) if cache != "0" else []
    assert bool(states) == (cache != "0")
    torch.manual_seed(99)
    attar.train_head(target, tmp_path / "b" / "head", **options)
    assert hashes(tmp_path / "a" / "head") == hashes(tmp_path / "b" / "head")


@pytest.mark.slow
def test_the_source_of_the_states_does_not_change_what_is_learned(target, tmp_path):
    """Beyond the last bits: a pass over other rows at once."""
    heads = [
        load_draft_head(attar.train_head(target, tmp_path / cache, **SMALL | {"state_cache": cache}))
        for cache in ("0", "20KB", "1MB")
    ]
    for head in heads[1:]:
        for one, other in zip(head.parameters(), heads[0].parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=0.05, atol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "cached"),
    [({}, 0), ({"steps": 20}, 6), ({"steps": 20, "state_cache": "0"}, 0), ({"state_cache": "20KB"}, 2)],
)
def test_states_are_kept_where_rows_are_read_several_times_or_it_is_asked_for(
    target, tmp_path, options, cached
):
    """A row takes 32 tokens of 2 times 64 numbers in 2 bytes: 8,192."""
    details = attar.train_head(
        target, tmp_path / "head", **SMALL | {"num_rollouts": 6} | options
    ).card.details
    assert details["rows"]["states_on_disk"] == cached


def test_the_head_is_trained_on_what_the_model_writes(target, tmp_path, monkeypatch):
    seen = []
    train = module.train
    monkeypatch.setattr(module, "train", lambda learner, loss, rows, *rest, **more: (
        seen.append(rows), train(learner, loss, rows, *rest, **more))[1])  # fmt: skip
    attar.train_head(target, tmp_path / "head", **SMALL)
    rows = seen[0]
    assert len(rows) == 4 and not rows.predicted[:, :3].any()
    params = attar.SamplingParams(max_tokens=28, temperature=1.0, seed=0)  # the first row's, seed 0 + 0
    alone = attar.LLM(target, dtype="float32").generate(rows.tokens[:1, :4].tolist(), params)[0]
    length = int(rows.mask[0].sum())
    assert tuple(rows.tokens[0, 4:length].tolist()) == tuple(alone.token_ids)
    attar.train_head(target, tmp_path / "half", **SMALL | {"teacher_generated": 0.5})
    written = (~seen[1].predicted[:, 0]).sum()
    assert len(seen[1]) == 12 and written == 6
    attar.train_head(target, tmp_path / "text", **SMALL | {"teacher_generated": 0.0})
    assert seen[2].predicted[:, 0].all()


@pytest.mark.slow
def test_a_reduced_vocabulary_is_counted_once_and_recorded(target, tmp_path):
    head = attar.train_head(target, tmp_path / "head", **SMALL | {"draft_vocabulary": 50})
    loaded = load_draft_head(head)
    assert loaded.d2t.dtype == torch.int64 and loaded.weight(0).shape == (50, 64)
    assert head.card.details["draft_vocabulary"]["tokens"] == 50
    assert 0.0 < head.card.details["draft_vocabulary"]["held_out_share"] < 1.0
    full = attar.train_head(target, tmp_path / "full", **SMALL)
    assert "draft_vocabulary" not in full.card.details


@pytest.mark.slow
def test_the_card_names_its_model_with_its_hash(target, tmp_path):
    head = attar.train_head(target, tmp_path / "head", **SMALL)
    parents = head.card.parents
    assert {parent.fingerprint for parent in parents} == {open_checkpoint(target).fingerprint()}
    assert {parent.name for parent in parents} == {"target"}
    assert head.card.details["steps"] == 6 and head.card.details["rows"]["different"] == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"for_drafting": True}, "unknown setting 'for_drafting' of train-head"),
        ({"student": "x"}, "unknown setting 'student'"),
        ({"features": "hidden"}, "unknown setting 'features'"),
        ({"adapter_rank": 4}, "adapter_rank is 4"),
        ({"teacher_top": 8}, "unknown setting 'teacher_top'"),
        ({"student_generated": 1.0}, "unknown setting 'student_generated'"),
        ({"objective": "tv"}, "unknown setting 'objective'"),
        ({"task": "masked"}, "unknown setting 'task'"),
        ({"draft_vocabulary": 1000}, "at most the model's 320"),
        ({"state_cache": "much"}, "state_cache"),
    ],
)
def test_what_does_not_suit_a_head_is_refused_by_name(target, tmp_path, options, message):
    with pytest.raises(UsageError, match=message):
        attar.train_head(target, tmp_path / "head", **SMALL | options)
    assert not (tmp_path / "head").exists() and not (tmp_path / ".head.work").exists()


def test_a_model_that_predicts_no_next_token_is_refused(tmp_path):
    encoder = tiny_models.save_encoder(tiny_models.build("bert", vocab_size=322), tmp_path / "bert")
    with pytest.raises((ModelError, SettingsError), match=r"predicts no next token|task masked"):
        attar.train_head(encoder, tmp_path / "head", **SMALL)


def test_a_head_that_is_no_linear_is_refused_before_any_work(target, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "head_of", lambda model: None)
    with pytest.raises(ModelError, match="no plain Linear"):
        attar.train_head(target, tmp_path / "head", **SMALL)


def test_text_without_a_prompt_is_one_line(target, tmp_path):
    (tmp_path / "chats.jsonl").write_text('{"prompt": "' + "x y " * 90 + '", "completion": "z"}\n')
    with pytest.raises(DataError, match="leaves room for an answer"):
        attar.train_head(target, tmp_path / "head", **SMALL | {"data": str(tmp_path / "chats.jsonl")})


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_kill_9_while_training_gives_the_same_bytes(kind, tmp_path):
    target = tiny_models.save(tiny_models.build("llama3"), tmp_path / "target")
    options = SMALL | {"head": kind, "steps": 40, "state_cache": "20KB", "checkpoint_every": 2} | KINDS[kind]
    code = (
        "import sys, json, attar; from attar.distillation.rollouts import teacher; "
        "teacher.HELD_OUT_TOKENS = 64; "
        "attar.train_head(sys.argv[1], sys.argv[2], **json.loads(sys.argv[3]))"
    )

    def start(out):
        words = [sys.executable, "-c", code, str(target), str(out), json.dumps(options)]
        return subprocess.Popen(words, env={**os.environ, "OMP_NUM_THREADS": "1"})

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert start(tmp_path / "a" / "head").wait() == 0
    killed, work = start(tmp_path / "b" / "head"), tmp_path / "b" / ".head.work" / "train"
    while not list(work.glob("state-0000000*")):
        assert killed.poll() is None
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    assert start(tmp_path / "b" / "head").wait() == 0
    assert hashes(tmp_path / "a" / "head") == hashes(tmp_path / "b" / "head")


@pytest.mark.slow
def test_a_quantized_model_gets_a_head(target, tmp_path):
    options = {"scheme": "W4A16", "method": "rtn", "group_size": 32, "check_tokens": 0}
    quantized = attar.quantize(target, tmp_path / "w4", **options)
    head = attar.train_head(quantized.path, tmp_path / "head", **SMALL)
    params = attar.SamplingParams(max_tokens=12, temperature=0.0)
    plain = attar.LLM(quantized.path).generate([[5, 6, 7]], params)[0]
    drafted = attar.LLM(quantized.path, draft=head.path).generate([[5, 6, 7]], params)[0]
    assert drafted.token_ids == plain.token_ids
