"""kill -9 at random points of every stage of a run, then the same command: the bytes of an undisturbed run.

Each stage of one run is killed once at a random moment; the next start goes on, to be killed in the next
stage. Two seeds give each stage two points.
"""

import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import tiny_models

RECIPE = Path(__file__).parents[1] / "recipes/quickstart.yaml"
ROWS = {"batch_size": 4, "sequence_length": 64}
TRAINING = {**ROWS, "steps": 24, "checkpoint_every": 4, "learning_rate": 0.003}
CHANGES = {
    0: TRAINING,
    1: {**ROWS, "samples": 32},
    2: {**ROWS, "samples": 32},
    3: TRAINING,
    5: {**ROWS, "samples": 48},
}
SMALLER = [
    "evaluate={tokens: 512, sequence_length: 64, speed: false, sample: '', batch_size: 4}",
    *(f"stages.{number}.{key}={value}" for number, more in CHANGES.items() for key, value in more.items()),
]


def command(model, out):
    sets = [part for item in SMALLER for part in ("--set", item)]
    return [
        sys.executable,
        "-m",
        "attar.cli.main",
        "run",
        str(RECIPE),
        "-o",
        str(out),
        "--set",
        f"model={model}",
        *sets,
    ]


def start(model, out):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        command(model, out), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )


def finish(model, out):
    """Run to the end; seconds each stage took, from what the run says."""
    process = start(model, out)
    began: dict[str, float] = {}
    ended = {}
    for line in process.stderr:
        if actual := re.match(r"(\d\d-[\w-]+): (starts|goes on)", line):
            if began:
                ended[list(began)[-1]] = time.monotonic()
            began[actual[1]] = time.monotonic()
    assert process.wait() == 0
    if began:  # a run whose stages are all done only writes its report
        ended[list(began)[-1]] = time.monotonic()
    return {name: ended[name] - began[name] for name in began}


def kill_during(model, out, stage, delay):
    """Start the run and kill it ``delay`` seconds into a stage; True if it was still alive."""
    process = start(model, out)
    for line in process.stderr:
        if line.startswith(f"{stage}: "):
            time.sleep(delay)
            alive = process.poll() is None
            process.send_signal(signal.SIGKILL)
            process.wait()
            return alive
    process.wait()
    return False


def weights(out):
    files = sorted(out.rglob("*.safetensors"))
    return {str(file.relative_to(out)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    model = tiny_models.build(
        "llama3", hidden_size=128, intermediate_size=256, num_hidden_layers=4, vocab_size=320
    )
    tiny_models.save(model, folder / "model")
    seconds = finish(folder / "model", folder / "run")
    return folder / "model", weights(folder / "run"), seconds


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [1, 2])
def test_killed_in_every_stage(undisturbed, tmp_path, seed):
    model, wanted, seconds = undisturbed
    chance = random.Random(seed)
    hits = 0
    for stage, length in seconds.items():
        hits += kill_during(model, tmp_path / "run", stage, chance.uniform(0.0, length))
    if not (tmp_path / "run/report.html").exists():
        finish(model, tmp_path / "run")
    assert hits >= len(seconds) - 1, "the kills must have met living runs"
    assert weights(tmp_path / "run") == wanted
    assert not list((tmp_path / "run").glob(".*.work")) and not list((tmp_path / "run").glob(".*.partial"))


TEXT = ["--samples", "8", "--sequence-length", "32", "--data", str(Path(json.__file__).parent)]
INTERRUPTED = {
    "prune": ["--ratio", "0.5", *TEXT],
    "export": ["--format", "gguf", "--type", "Q4_0"],
    "merge": [],
}


def begun(arguments, out):
    """Start attar with a SIGINT that can be felt, whatever started pytest; return once the work has begun."""
    process = subprocess.Popen(
        [sys.executable, "-m", "attar.cli.main", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while process.poll() is None and not out.with_name(f".{out.name}.partial").exists():
        time.sleep(0.005)
    return process


@pytest.mark.slow
@pytest.mark.parametrize("verb", INTERRUPTED)
def test_ctrl_c_is_one_line_and_the_same_command_goes_on(verb, tmp_path):
    """Interrupted twice, then left alone: the bytes of an undisturbed run."""
    model = tiny_models.save(tiny_models.build("smollm"), tmp_path / "model")
    source, (out, whole) = model, (tmp_path / "out", tmp_path / "whole")
    if verb == "merge":
        source = tmp_path / "merge.yml"
        models = [{"model": str(model), "parameters": {"weight": weight}} for weight in (0.5,)]
        source.write_text(json.dumps({"merge_method": "linear", "models": models}))
    command = [verb, str(source), *INTERRUPTED[verb], "-q", "-o"]
    for _ in range(2):
        process = begun([*command, str(out)], out)
        process.send_signal(signal.SIGINT)
        fields = process.communicate()[1].splitlines()
        assert process.returncode == 130, fields
        assert fields[-1].startswith(f"stopped; to go on: attar {verb} ") and "Traceback" not in "".join(
            fields
        )
        assert not out.exists()
    for folder in (out, whole):
        process = begun([*command, str(folder)], folder)
        fields = process.communicate()[1]
        assert process.returncode == 0, fields
    files = sorted(path.name for path in whole.iterdir() if path.suffix in (".safetensors", ".gguf"))
    assert files and all((out / name).read_bytes() == (whole / name).read_bytes() for name in files)
