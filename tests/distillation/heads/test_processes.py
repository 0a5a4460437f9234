"""``torchrun -m attar distill --head``: two processes learn what one learns, and one of them writes it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import attar
from attar.checkpoint.open import open_checkpoint
from attar.models.draft_heads.folder import load_draft_head
from tests import tiny_models

OPTIONS = {
    "steps": 4,
    "batch_size": 4,
    "sequence_length": 32,
    "num_rollouts": 8,
    "prompt_tokens": 4,
    "checkpoint_every": 2,
    "precision": "fp32",
    "data": str(Path(json.__file__).parent),
}


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def run(target, out, **options):
    flags = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    words = [sys.executable, *launcher, "-m", "attar", "train-head", str(target), "-o", str(out), *flags]
    return subprocess.run(
        words, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=280
    )


HEADS = {
    "medusa": {"head": "medusa", "drafts": 2},
    "medusa-2": {"head": "medusa", "drafts": 2, "joint": 0.5},
    "dspark": {"head": "dspark", "drafts": 2, "anchors": 40},
}


@pytest.mark.slow
@pytest.mark.parametrize("options", HEADS.values(), ids=HEADS)
def test_two_processes_learn_what_one_learns(tmp_path, options):
    target = tiny_models.save(tiny_models.build("llama3"), tmp_path / "target")
    both = run(target, tmp_path / "two" / "head", **OPTIONS, **options)
    assert both.returncode == 0, both.stderr
    assert [path.name for path in (tmp_path / "two").iterdir()] == ["head"], "nothing else is left"
    one = attar.train_head(target, tmp_path / "one", **OPTIONS, **options)
    two = open_checkpoint(tmp_path / "two" / "head")
    assert two.card.details["steps"] == one.card.details["steps"]
    folder = "head" if "joint" in options else ""
    heads = [load_draft_head(open_checkpoint(checkpoint.path / folder)) for checkpoint in (one, two)]
    if options["head"] != "dspark":  # whose anchors each process draws
        for ours, theirs in zip(*(head.parameters() for head in heads), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0.02, atol=2e-3)
    prompts, greedy = [[5, 6, 7], [8, 9]], attar.SamplingParams(max_tokens=12, temperature=0.0)
    model = two.path if folder else target
    plain = attar.LLM(model, dtype="float32").generate(prompts, greedy)
    drafted = attar.LLM(model, draft=two.path / folder, dtype="float32").generate(prompts, greedy)
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]


@pytest.mark.slow
def test_what_is_wrong_ends_both(tmp_path):
    target = tiny_models.save(tiny_models.build("llama3"), tmp_path / "target")
    both = run(target, tmp_path / "head", **OPTIONS, head="medusa", draft_vocabulary=10_000)
    assert both.returncode != 0 and "at most the model's" in both.stderr
    assert not (tmp_path / "head").exists()
