"""The buffer of rollouts: its fraction, its age, and runs that are killed inside a round."""

import json
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from attar.checkpoint.hashing import sha256_file
from attar.checkpoint.open import open_checkpoint
from attar.data.examples import Examples
from attar.distillation.learn import student_rollouts
from attar.distillation.rollouts import teacher as rollouts
from attar.distillation.rollouts.buffer import RolloutBuffer
from attar.distillation.rollouts.sampling import Rollouts
from attar.distillation.settings import distill_settings, recover_settings
from attar.distillation.signals.alignment.route import TokenizerPair
from attar.distillation.signals.target import SignalSource
from attar.distillation.stage import distill, recover
from attar.errors import SettingsError
from attar.progress import SILENT
from attar.walks import train as loop
from tests import tiny_models

DATA = str(Path(json.__file__).parent)
SMALL = {
    "steps": 12,
    "batch_size": 2,
    "sequence_length": 24,
    "learning_rate": 1e-3,
    "precision": "fp32",
    "checkpoint_every": 5,
    "data": DATA,
    "layers": 1,
    "prompt_tokens": 4,
    "rollout_every": 3,
}


class Recorder:
    """In place of a student: writes rows of the number of the call."""

    def __init__(self):
        self.calls = []

    def write(self, model, text, seed):
        self.calls.append((model, len(text), seed))
        tokens = torch.full_like(text.tokens, len(self.calls))
        examples = Examples.of_text(tokens)
        nothing = torch.zeros(tokens.shape)
        columns = {"behaviour": nothing, "policy": nothing.clone()}
        return Rollouts(tokens=tokens, targets=examples.targets, **columns)


def buffer(tmp_path, **changes):
    settings = distill_settings(**{**SMALL, "objective": "reverse-kl", "student_generated": 1.0, **changes})
    text = Examples.of_text(torch.arange(1000, 1160).view(16, 10))
    return RolloutBuffer(text, Recorder(), settings, tmp_path / "rollouts", SILENT)


def origins(source, steps, model=None):
    """Of each batch: 0 for text, else which write its rows are from, oldest first."""
    batches = [source.batch(number, model) for number in range(steps)]
    return [sorted({int(t) if t < 1000 else 0 for t in batch.tokens[:, 0]}) for batch in batches]


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_the_fraction_of_the_students_batches_is_exact(tmp_path, share):
    numbers = origins(buffer(tmp_path, student_generated=share, steps=40), 40)
    assert sum(row != [0] for row in numbers) == 40 * share


def test_rows_are_written_every_few_steps_and_used_once(tmp_path):
    source = buffer(tmp_path)
    assert origins(source, 12) == [[1]] * 3 + [[2]] * 3 + [[3]] * 3 + [[4]] * 3
    assert [count for _, count, _ in source.writer.calls] == [6] * 4
    seeds = [seed for _, _, seed in source.writer.calls]
    assert [later - seed for seed, later in pairwise(seeds)] == [6] * 3


class Numbering(Recorder):
    """In place of a student: every row is of a number of its own."""

    def write(self, model, text, seed):
        rows = super().write(model, text, seed)
        numbers = torch.arange(seed, seed + len(text))
        return replace(rows, tokens=numbers[:, None].expand_as(rows.tokens).clone())


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_row_of_a_round_is_in_one_batch(tmp_path, monkeypatch, ranks):
    """However many processes share the rows out."""
    answers = {"is_initialized": ranks > 1, "get_world_size": ranks, "get_rank": 0, "barrier": None}
    for name, value in answers.items():
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    source = replace(buffer(tmp_path), writer=Numbering())
    batches = [source.batch(number, None) for number in range(6)]
    numbers = [int(token) for batch in batches for token in batch.tokens[:, 0]]
    assert len(set(numbers)) == len(numbers) == 6 * 2
    assert [count for _, count, _ in source.writer.calls] == 2 * [3 * 2]


def test_accumulated_batches_count_as_batches_of_one_step(tmp_path):
    source = buffer(tmp_path, accumulate=2)
    assert origins(source, 24) == [[step // 6 + 1] for step in range(24)]
    assert [count for _, count, _ in source.writer.calls] == [12] * 4


def test_a_round_that_is_on_disk_is_not_written_again(tmp_path):
    first = origins(buffer(tmp_path), 12)
    resumed = buffer(tmp_path)
    assert [resumed.batch(7, None).tokens[0, 0].item()] == first[7]
    assert not resumed.writer.calls


def test_old_rounds_are_deleted_but_none_that_a_state_may_need(tmp_path):
    """A state is at most checkpoint_every = 5 steps old, two rounds."""
    source = buffer(tmp_path, steps=60)
    origins(source, 60)
    rounds = sorted(int(file.name[:6]) for file in (tmp_path / "rollouts").glob("*.safetensors"))
    assert rounds[-1] == 19 and rounds[0] in (15, 16) and len(rounds) < 6


def test_the_mixed_in_text_of_minillm(tmp_path):
    source = buffer(tmp_path, objective="minillm", student_generated=None)
    batch = source.batch(0, None)
    assert len(batch) == 4 and batch.behaviour.isnan().all(1).tolist() == [False, False, True, True]


@pytest.fixture
def short(monkeypatch):
    """Little held-out text."""
    monkeypatch.setattr(sys.modules["attar.distillation.tasks.causal"], "HELD_OUT_TOKENS", 1024)
    monkeypatch.setattr(rollouts, "HELD_OUT_TOKENS", 1024)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return tiny_models.save(tiny_models.build("llama3"), tmp_path_factory.mktemp("teacher") / "teacher")


def test_a_token_that_the_teacher_lacks_is_never_drawn(teacher, tmp_path):
    """The student's tokenizer has special tokens of its own, beyond the teacher's vocabulary."""
    text, settings = open_checkpoint(teacher), recover_settings(objective="reverse-kl", student_generated=1.0)
    for vocabulary, drawn in ((300, 300), (None, tiny_models.VOCABULARY)):
        source = SignalSource(None, None, tmp_path, tmp_path, TokenizerPair(vocabulary=vocabulary))
        rows = Examples.of_text(torch.arange(40).view(4, 10))
        assert student_rollouts(rows, text, source, settings, SILENT).writer.vocabulary == drawn


METHODS = {
    "gkd": {"objective": "jsd", "student_generated": 0.5},
    "policy-gradient": {"objective": "policy-gradient"},
    "minillm": {"objective": "minillm"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_a_run_killed_inside_a_round_ends_with_the_same_bytes(teacher, short, tmp_path, monkeypatch, name):
    settings = distill_settings(**{**SMALL, **METHODS[name]})
    whole = distill(teacher, tmp_path / "a/out", settings)
    step = loop._step

    for last in (5, 7, 10):  # states are of steps 5 and 10, rounds begin at 3, 6 and 9

        def dying(run, loss, batches, number, settings, last=last):
            if number == last:
                raise KeyboardInterrupt
            return step(run, loss, batches, number, settings)

        monkeypatch.setattr(loop, "_step", dying)
        with pytest.raises(KeyboardInterrupt):
            distill(teacher, tmp_path / "b/out", settings)
    monkeypatch.setattr(loop, "_step", step)
    resumed = distill(teacher, tmp_path / "b/out", settings)
    for file in ("model.safetensors", "attar.json"):
        assert sha256_file(whole.path / file) == sha256_file(resumed.path / file)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_a_student_learns_from_its_own_text(tmp_path, short, name):
    """Half of attar:tiny's layers: the held-out loss falls, of policies the reverse KL."""
    options = {**SMALL, **METHODS[name], "layers": 0, "steps": 40, "batch_size": 4, "sequence_length": 64}
    student = distill("attar:tiny", tmp_path / name, distill_settings(**options, evaluate_every=5))
    losses = [row["held_out"] for row in student.card.details["curve"] if "held_out" in row]
    assert losses[-1] < 0.8 * losses[0], losses


@pytest.mark.slow
def test_rows_of_the_teacher_are_labels_of_sequence_level_distillation(tmp_path, short):
    """On its rows the cross-entropy falls, and no teacher is run in the loss."""
    options = {**SMALL, "layers": 0, "steps": 40, "batch_size": 4, "sequence_length": 64}
    settings = distill_settings(**options, teacher_generated=1.0, objective="hard", num_rollouts=16)
    student = distill("attar:tiny", tmp_path / "student", settings)
    losses = [row["loss"] for row in student.card.details["curve"] if "loss" in row]
    assert sum(losses[-4:]) < 0.6 * sum(losses[:4]) and not settings.runs_teacher, losses


@pytest.mark.slow
def test_adapters_learn_from_their_own_text(teacher, short, tmp_path):
    """peft's model runs through the modules, adapters included."""
    options = {name: value for name, value in SMALL.items() if name != "layers"}
    options.pop("prompt_tokens")
    settings = recover_settings(**options, objective="reverse-kl", student_generated=1.0, adapter_rank=2)
    damaged = tiny_models.save(tiny_models.build("llama3", seed=1), tmp_path / "damaged")
    result = recover(damaged, tmp_path / "out", settings, teacher=teacher)
    assert result.card.details["steps"] == 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": "minillm", "student_generated": 0.5}, "student_generated"),
        ({"objective": "hard", "student_generated": 0.5}, "no label"),
        ({"alpha": 0.5, "student_generated": 0.5}, "no label"),
        ({"teacher_top": 8, "student_generated": 0.5}, "new each time"),
        ({"objective": "policy-gradient", "rollout_temperature": 2.0}, "that of the loss"),
        ({"student_generated": 1.5}, "between 0 and 1"),
        ({"objective": "sft", "student_generated": 0.5}, "no label"),
        ({"rollout_every": 0}, "at least 1"),
    ],
)
def test_what_makes_no_sense_is_refused(options, message):
    with pytest.raises(SettingsError, match=message):
        distill_settings(**options)
