"""``--launch 2``: two processes, one bar, one error; the death of one, or of the launcher, ends all, and the
same command goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from attar.checkpoint.open import open_checkpoint
from attar.cli.launch import without_launch
from attar.errors import UsageError
from attar.models.loading.load import load_model
from tests import tiny_models

OPTIONS = ["--layers", 2, "--batch-size", 4, "--sequence-length", 32, "--precision", "fp32"]
OPTIONS += ["--checkpoint-every", 2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def start(*words):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-m", "attar", *map(str, words)], env=ENVIRONMENT, **pipes)


def ranks_of(launcher):
    """Process ids of a launcher's processes by rank."""
    pids = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            environment = dict(
                entry.split("=", 1) for entry in (folder / "environ").read_text().split("\0") if "=" in entry
            )
        except (OSError, PermissionError):
            continue
        if parent == launcher.pid and "RANK" in environment:
            pids[int(environment["RANK"])] = int(folder.name)
    return pids


def wait_until(condition, seconds=240):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.05)


def gone(pids):
    """Whether processes have ended (a zombie has)."""

    def runs(pid):
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    return not any(runs(pid) for pid in pids)


@pytest.fixture
def target(tmp_path):
    return tiny_models.save(tiny_models.build("llama3"), tmp_path / "target")


def test_the_processes_get_the_line_without_the_launcher():
    line = ["distill", "m", "--launch", "2", "-o", "out", "--shard", "--steps", "4"]
    assert without_launch(line) == ["distill", "m", "-o", "out", "--steps", "4"]
    assert without_launch(["quantize", "m", "--launch=4", "-o", "out"]) == ["quantize", "m", "-o", "out"]


@pytest.mark.parametrize(
    ("words", "part"),
    [(["--launch", "zwei"], "no number"), (["--launch", "0"], "no number"), (["--shard"], "--launch 2")],
)
def test_what_cannot_be_launched_is_refused(words, part, tmp_path, capfd):
    from attar.cli.main import call

    assert call(["distill", "attar:tiny", "-o", str(tmp_path / "out"), *words]) == UsageError.exit_code
    assert part in capfd.readouterr().err


LINES = {
    "distill": ["attar:tiny", "-o", "out"],
    "recover": ["attar:tiny", "-o", "out"],
    "quantize": ["attar:tiny", "-o", "out"],
    "prune": ["attar:tiny", "-o", "out"],
    "merge": ["merge.yml", "-o", "out"],
    "extract": ["attar:tiny", "--base", "attar:tiny", "-o", "out"],
    "export": ["attar:tiny", "-o", "out"],
    "evaluate": ["attar:tiny"],
}


@pytest.mark.parametrize("verb", LINES)
def test_every_verb_that_trains_sweeps_streams_or_measures_is_launched(verb, capfd):
    from attar.cli.main import call

    assert call([verb, *LINES[verb], "--launch", "zwei"]) == UsageError.exit_code
    assert "no number of processes" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["prune", "attar:tiny", "--scan", "scan.json", "--launch", "2"], "--scan works in one process"),
        (["evaluate", "attar:tiny", "--on", "local", "--launch", "2"], "--on and --launch"),
    ],
)
def test_what_one_process_does_is_not_launched(words, part, capfd):
    from attar.cli.main import call

    assert call(words) == UsageError.exit_code
    assert part in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("shard", [[], ["--shard"]], ids=["replicated", "sharded"])
def test_a_student_of_two_processes_is_that_of_one(target, tmp_path, shard):
    words = ["distill", target, *OPTIONS, "--steps", 5, "--data", Path(json.__file__).parent]
    runs = {"one": [], "two": ["--launch", 2, *shard]}
    for name, more in runs.items():
        run = start(*words, "-o", tmp_path / "out" / name, *more)
        out, error = run.communicate(timeout=400)
        assert run.returncode == 0, error
        assert error.count("distill: done") == 1 and out.count("\n") == 1, "one bar, one answer"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["one", "two"], (
        "nothing else is left"
    )
    one, two = (load_model(open_checkpoint(tmp_path / "out" / name), dtype=torch.float32) for name in runs)
    for ours, theirs in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_one_error_line_for_all(target, tmp_path):
    run = start("distill", target, "-o", tmp_path / "out", "--layers", 999, "--launch", 2)
    _, error = run.communicate(timeout=240)
    assert run.returncode == 2
    assert [line for line in error.splitlines() if "error" in line] == [
        "error: --layers is 999, but must be between 1 and the teacher's 3"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["rank 0", "rank 1", "launcher", "ctrl-c"])
def test_the_end_of_one_is_the_end_of_all_and_the_same_command_goes_on(target, tmp_path, victim):
    words = ["distill", target, "-o", tmp_path / "out", *OPTIONS, "--steps", 400, "--launch", 2]
    words += ["--data", Path(json.__file__).parent]
    run = start(*words)
    work = tmp_path / ".out.work" / "train"
    wait_until(lambda: list(work.glob("state-*")) or run.poll() is not None)
    ranks = ranks_of(run)
    assert sorted(ranks) == [0, 1]
    if victim.startswith("rank"):
        os.kill(ranks[int(victim[-1])], signal.SIGKILL)
    else:
        run.send_signal(signal.SIGKILL if victim == "launcher" else signal.SIGINT)
    _, error = run.communicate(timeout=120)
    wait_until(lambda: gone(ranks.values()), 60)
    lines = [line for line in error.splitlines() if line.startswith(("error", "stopped"))]
    if victim.startswith("rank"):
        assert run.returncode == 1
        assert lines == [f"error: process {victim[-1]} of 2 was killed (SIGKILL), so the others ended too"]
    elif victim == "ctrl-c":
        assert run.returncode == 130
        assert len(lines) == 1 and lines[0].startswith("stopped; to go on: attar distill")
    assert not (tmp_path / "out").exists() and list(work.glob("state-*"))
    begun = int(sorted(work.glob("state-*"))[-1].name[6:])
    again = start(*words)
    _, error = again.communicate(timeout=500)
    assert again.returncode == 0, error
    curve = open_checkpoint(tmp_path / "out").card.details["curve"]
    assert curve[-1]["step"] == 400 and begun > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "target"]
