"""Streams that processes share: the shards are dealt out, and the bytes are those of one process."""

import json
import os
import signal

import pytest
import torch

from attar.checkpoint.open import open_checkpoint
from attar.models.loading.load import load_model, save_model
from tests.scale import streams
from tests.scale.processes import run_ranks
from tests.scale.test_launch import gone, ranks_of, start, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
CASES = (
    "rtn",
    "nvfp4",
    "rotated",
    "dense",
    "gptq",
    "copy",
    "gguf",
    "magnitude",
    "extract",
    "ties",
    "dare_ties",
    "twice",
)


def weights(folder):
    """The bytes of a model's files, its index included."""
    files = [
        path for path in sorted(folder.iterdir()) if ".safetensors" in path.name or path.suffix == ".gguf"
    ]
    return {path.name: path.read_bytes() for path in files}


def details(folder):
    """What the card says, without times."""
    card = json.loads((folder / "attar.json").read_text())
    return {key: card[key] for key in ("details", "settings", "key")}


def test_two_processes_write_the_bytes_of_one(tmp_path):
    names = streams.models(tmp_path / "models")
    run_ranks(streams.stream_all, 2, names, str(tmp_path / "two"))
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == sorted(CASES), "nothing else is left"
    run_ranks(streams.stream_all, 1, names, str(tmp_path / "one"))
    for case in CASES:
        one, two = tmp_path / "one" / case, tmp_path / "two" / case
        assert weights(one) == weights(two), case
        assert len(weights(one)) > 2 or case in ("gguf", "extract"), case
        assert details(one) == details(two), case


@pytest.mark.parametrize("processes", [2, 1])
def test_a_killed_stream_is_ended_by_two_or_one(tmp_path, processes):
    config = tmp_path / "merge.yml"
    other = load_model(open_checkpoint("attar:tiny"), dtype=torch.float32)
    with torch.no_grad():
        other.get_output_embeddings().weight.mul_(1.1)
    save_model(other, tmp_path / "other", dtype=torch.float32)
    models = f"models: [{{model: attar:tiny}}, {{model: {tmp_path}/other}}]\nparameters: {{weight: 0.5}}\n"
    config.write_text(f"merge_method: linear\n{models}dtype: float32\n")
    words = ["merge", config, "--shard-size", "100kB", "--tokens", 0]
    out, work = tmp_path / "out", tmp_path / ".out.work" / "shards"
    run = start(*words, "-o", out, "--launch", 2)
    wait_until(lambda: len(list(work.glob("model-*"))) > 4 or run.poll() is not None)
    ranks = ranks_of(run)
    os.kill(ranks[1], signal.SIGKILL)
    _, error = run.communicate(timeout=120)
    wait_until(lambda: gone(ranks.values()), 60)
    assert "process 1 of 2 was killed" in error and not out.exists()
    finished = {path.name: path.stat().st_mtime_ns for path in work.glob("model-*")}
    assert finished
    again = start(*words, "-o", out, *(["--launch", processes] if processes > 1 else []))
    _, error = again.communicate(timeout=400)
    assert again.returncode == 0, error
    written = {path.name: path.stat().st_mtime_ns for path in out.glob("model-*")}
    assert finished.items() <= written.items(), "what was finished is not written again"
    assert len(written) > len(finished)
    alone = start(*words, "-o", tmp_path / "alone")
    assert alone.wait(timeout=400) == 0
    assert weights(out) == weights(tmp_path / "alone")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "merge.yml", "other", "out"]
