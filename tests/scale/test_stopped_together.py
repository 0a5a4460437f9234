"""Ctrl-C where several processes work, ``--launch 2`` and ``--jobs 2``: they end together with their states,
and the same command ends in the bytes of an undisturbed one."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import tiny_models

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
TEXT = Path(json.__file__).parent
TRAINING = {"layers": 2, "batch_size": 4, "sequence_length": 32, "precision": "fp32", "steps": 120}
RECIPE = """\
model: {model}
data: {text}
stages:
  - {stage}
evaluate: {{tokens: 256, batch_size: 2, speed: false, sample: ""}}
"""


class OnTerminal:
    """A command whose stderr is a terminal, where its bars are drawn."""

    def __init__(self, *words):
        ours, theirs = pty.openpty()
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "attar", *map(str, words)]
        self.child = subprocess.Popen(command, stderr=theirs, stdout=subprocess.DEVNULL, env=environment)
        os.close(theirs)
        self.screen, self.text = ours, ""

    def read(self, until, seconds=600):
        """What it shows, up to where ``until()`` is true."""
        end = time.monotonic() + seconds
        while not until():
            assert time.monotonic() < end, self.text[-2000:]
            if select.select([self.screen], [], [], 0.05)[0]:
                try:
                    self.text += os.read(self.screen, 1 << 16).decode("utf-8", "replace")
                except OSError:  # every process has closed it
                    break

    def finish(self):
        """The exit code and all that was shown."""
        self.read(lambda: False)
        os.close(self.screen)
        return self.child.wait(60), self.text


def weights(folder):
    """The bytes of every file of weights below a folder."""
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*.safetensors"))}


@pytest.fixture
def target(tmp_path):
    return tiny_models.save(tiny_models.build("llama3"), tmp_path / "target")


def test_two_processes_stop_before_the_first_regular_state(target, tmp_path):
    options = [word for name, value in TRAINING.items() for word in (f"--{name.replace('_', '-')}", value)]
    words = ["distill", target, *options, "--data", TEXT, "--checkpoint-every", 1000, "--launch", 2]
    undisturbed = OnTerminal(*words, "-o", tmp_path / "undisturbed")
    assert undisturbed.finish()[0] == 0
    stopped = OnTerminal(*words, "-o", tmp_path / "stopped")
    stopped.read(lambda: re.search(r"\b([3-9]|\d\d)/120", stopped.text))
    stopped.child.send_signal(signal.SIGINT)
    code, text = stopped.finish()
    assert code == 130 and "stopped; to go on: attar distill" in text, text[-2000:]
    (state,) = (tmp_path / ".stopped.work" / "train").glob("state-*")
    assert 3 <= int(state.name.removeprefix("state-")) < 120
    assert OnTerminal(*words, "-o", tmp_path / "stopped").finish()[0] == 0
    assert weights(tmp_path / "stopped") == weights(tmp_path / "undisturbed") != {}


def test_a_sweep_of_two_jobs_stops_and_goes_on(target, tmp_path):
    stage = {"stage": "distill", **TRAINING, "checkpoint_every": 4}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(model=target, text=TEXT, stage=json.dumps(stage)))
    words = ["sweep", recipe, "--set", "stages.distill.temperature=1,2", "--jobs", 2]
    undisturbed = OnTerminal(*words, "-o", tmp_path / "undisturbed")
    code, text = undisturbed.finish()
    assert code == 0, text[-2000:]
    stopped, folder = OnTerminal(*words, "-o", tmp_path / "stopped"), tmp_path / "stopped"

    def states():
        return list(folder.rglob("train/state-????????"))

    stopped.read(lambda: len(states()) == 2)
    stopped.child.send_signal(signal.SIGINT)
    code, text = stopped.finish()
    assert code == 130 and "stopped; to go on: attar sweep" in text, text[-2000:]
    assert len(states()) == 2 and not list(folder.rglob("*distill*/model.safetensors"))
    code, text = OnTerminal(*words, "-o", folder).finish()
    assert code == 0, text[-2000:]
    assert weights(folder) == weights(tmp_path / "undisturbed") != {}
