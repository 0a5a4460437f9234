"""Ctrl-C in every verb that trains, before the first regular state: the same call goes on from that step, and
ends in the bytes of an undisturbed one."""

import os
import signal

import pytest
import torch

import attar
from attar.interruption import Interruption, StoppedError
from tests import tiny_models
from tests.cases import mostly_slow

STEPS = 7
TEXTS = [f"def area_{i}(width, height):\n    return width * height + {i}\n" * 6 for i in range(60)]
ROWS = {"sequence_length": 32, "batch_size": 2, "data": TEXTS}
TRAINING = {**ROWS, "steps": STEPS, "checkpoint_every": 50}
CALIBRATION = {**ROWS, "samples": 4}
QUANTIZE = {**CALIBRATION, "group_size": 32, "check_tokens": 0}
CASES = {
    "distill": ("distill", {**TRAINING, "layers": 1}),
    "distill, text of the student": ("distill", {**TRAINING, "layers": 1, "objective": "minillm"}),
    "recover": ("recover", {**TRAINING, "teacher": "model"}),
    "recover, adapters": ("recover", {**TRAINING, "teacher": "model", "adapter_rank": 2}),
    "head": ("train_head", {**TRAINING, "head": "eagle"}),
    "joint head": ("train_head", {**TRAINING, "head": "medusa", "joint": 0.5}),
    "qat": ("quantize", {**QUANTIZE, "method": "qat", "steps": STEPS}),
    "tuning": ("quantize", {**QUANTIZE, "method": "rtn", "scheme": "W2A16", "tune": STEPS}),
    "autoround": ("quantize", {**QUANTIZE, "method": "autoround", "iterations": STEPS}),
    "block reconstruction": (
        "prune",
        {**CALIBRATION, "method": "wanda", "reconstruct": "block"},
    ),
}


class StepCounter:
    """Counts the steps of all trainings, and signals its own process in one of them."""

    def __init__(self, monkeypatch):
        self.steps, self.signal_at = 0, 0
        due = Interruption.due

        def counted(interruption):
            self.steps += 1
            if self.steps == self.signal_at:
                os.kill(os.getpid(), signal.SIGINT)
            return due(interruption)

        monkeypatch.setattr(Interruption, "due", counted)

    def run(self, call, signal_at=0):
        """The steps that a call took."""
        self.steps, self.signal_at = 0, signal_at
        call()
        return self.steps


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    built = tiny_models.build("smollm", num_hidden_layers=2)
    return tiny_models.save(built, tmp_path_factory.mktemp("stopped") / "model", dtype=torch.bfloat16)


@pytest.mark.parametrize("case", mostly_slow(CASES, ["recover"]))
def test_a_stopped_training_goes_on_from_its_step(case, model, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    verb, settings = CASES[case]
    settings = {name: model if value == "model" else value for name, value in settings.items()}
    counter = StepCounter(monkeypatch)

    def work(out):
        return lambda: getattr(attar, verb)(model, tmp_path / out, progress=False, **settings)

    whole = counter.run(work("undisturbed"))
    assert whole >= STEPS
    with pytest.raises(StoppedError):
        counter.run(work("stopped"), signal_at=3)
    assert not (tmp_path / "stopped").exists()
    assert counter.run(work("stopped")) == whole - 3
    stopped = tmp_path / "stopped"
    files = sorted(path.relative_to(stopped) for path in stopped.glob("**/*.safetensors"))
    assert files
    for file in files:
        assert (stopped / file).read_bytes() == (tmp_path / "undisturbed" / file).read_bytes()
