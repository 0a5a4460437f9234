"""The benchmark of heads: its steps, its cells, its tables. Nothing is trained that takes long."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

BENCHMARKS = str(Path(__file__).parents[1] / "benchmarks")
if BENCHMARKS not in sys.path:
    sys.path.append(BENCHMARKS)

import heads  # noqa: E402
import heads_drafting  # noqa: E402
import heads_oracle  # noqa: E402
import heads_training  # noqa: E402

from attar.distillation.head_settings import HEAD_SETTINGS  # noqa: E402
from attar.distillation.rollouts import teacher  # noqa: E402
from attar.errors import AttarError  # noqa: E402
from attar.runtime.speculate.draft import Draft  # noqa: E402
from attar.runtime.speculate.proposer import DraftRequest  # noqa: E402

SMALL = ["--samples", "8", "--batch-size", "4", "--length", "48", "--prompts", "1", "--tokens", "12"]


def arguments(work, *more):
    return heads.arguments().parse_args([str(work), *SMALL, "--rounds", "1", "--threads", "1", *more])


@pytest.mark.parametrize("name", heads.PARTS)
def test_every_part_is_a_function(name):
    assert callable(heads.part(name))


def test_every_kind_of_head_is_in_the_table():
    assert set(heads_training.HEADS) >= set(HEAD_SETTINGS)


@pytest.mark.parametrize(
    ("histogram", "expected"), [((2, 1, 1), [0.5, 0.5]), ((0, 0, 4), [1.0, 1.0]), ((5,), []), ((), [])]
)
def test_acceptance_of_a_position_is_of_those_that_reached_it(histogram, expected):
    assert heads_drafting.by_position(histogram) == expected


def test_positions_of_simulated_chains():
    """Each draft is right with a chance of its own."""
    import random

    draws, chances = random.Random(0), (0.9, 0.6, 0.8)
    counts: Counter[int] = Counter()
    for _ in range(20_000):
        accepted = next((k for k, a in enumerate(chances) if draws.random() >= a), len(chances))
        counts[accepted] += 1
    measured = heads_drafting.by_position([counts[k] for k in range(4)])
    assert measured == pytest.approx(chances, abs=0.02)


def test_the_clock_stops_a_probe_and_times_the_training_alone():
    clock = heads_training.StepClock(most=3)
    with clock.task("rollouts", 2) as task:
        task.advance()
        task.advance()
    assert clock.seconds == [] and clock.spent == 0.0
    with pytest.raises(heads_training.ProbedError), clock.task("train-head", 9) as task:
        for _ in range(9):
            task.advance()
    assert len(clock.seconds) == 3


def test_the_held_out_loss_is_not_counted():
    clock = heads_training.StepClock()
    clock.seconds = [3.0, 1.0, 1.0, 1.0, 50.0]
    assert clock.spent == 7.0


def test_minutes_become_steps_and_are_kept(tmp_path, monkeypatch):
    args = arguments(tmp_path)
    folder = tmp_path / "medusa"
    monkeypatch.setattr(heads_training, "seconds_of_a_step", lambda *_: 0.5)
    assert heads_training.steps_of("medusa", 2.0, folder, args) == 240
    monkeypatch.setattr(heads_training, "seconds_of_a_step", lambda *_: 9.0)
    assert heads_training.steps_of("medusa", 2.0, folder, args) == 240
    assert heads_training.steps_of("medusa", 2.0, folder, arguments(tmp_path, "--steps", "2")) == 2


def test_drafters_that_are_not_there_are_skipped_by_name(tmp_path, monkeypatch, capsys):
    without = {name: options for name, options in HEAD_SETTINGS.items() if name != "eagle"}
    monkeypatch.setattr(heads_training, "HEAD_SETTINGS", without)
    assert heads_training.all_trained(("eagle",), 1.0, arguments(tmp_path)) == []
    assert "skipped: eagle" in capsys.readouterr().out
    assert heads_drafting.measured("x", {"speculate": "unheard"}, {}, 0.0, arguments(tmp_path)) == []
    assert "skipped: x" in capsys.readouterr().out


def test_the_table_has_a_line_for_each_text(tmp_path, monkeypatch):
    common = {"low": 1.1, "high": 1.3, "positions": [0.75, 0.5], "draft_ms": 0.25, "texts": 2, "same": 2}
    rows = [
        {"set": kind, "method": way, "speedup": 1.2, "tokens_per_s": 1000.0, "tokens_per_pass": tokens}
        | common
        for kind in ("code", "prose")
        for way, tokens in (("plain", 1.0), ("K 7", 2.5), (heads_drafting.CHOSEN, 2.25))
    ]
    monkeypatch.setattr(heads_drafting, "measured", lambda *_, **__: rows)
    args = arguments(tmp_path)
    lines = heads_drafting._lines("medusa", {}, {"code": [], "prose": []}, args)
    columns = "2.50 | 2.50 | 0.75 0.50 | 0.75 0.50 | 0.25 | 1000 | 1000 | 1.20 (1.10 to 1.30) | 2/2 |"
    assert lines == [f"| medusa | {kind} | {columns}" for kind in ("code", "prose")]
    assert len(heads_drafting._table_head(args)[0].split("|")) == len(lines[0].split("|"))


@pytest.mark.slow
def test_a_drafter_is_trained_once_and_measured_once(tmp_path, monkeypatch):
    monkeypatch.setattr(teacher, "HELD_OUT_TOKENS", 64)
    args = arguments(tmp_path, "--steps", "2", "--drafters", "medusa", "--drafts", "3")
    table = heads_drafting.tiny(args)
    assert "| medusa |" in table and "| medusa + suffix |" in table

    def nothing(*_, **__):
        raise AssertionError("again")

    monkeypatch.setattr(heads_training, "train_drafter", nothing)
    monkeypatch.setattr(heads_drafting, "_profiled", nothing)
    assert heads_drafting.tiny(args) == table
    assert heads_drafting.tiny(arguments(tmp_path, "--cached", "--drafters", "dspark")).count("dspark") == 0
    cell = json.loads(next(tmp_path.glob("medusa-*.json")).read_text())
    assert cell["steps"] == 2 and cell["parameters"] > 0 and Path(cell["folder"]).is_dir()


def test_chosen_is_compared_with_the_best_fixed(tmp_path, monkeypatch):
    speeds = {"plain": None, "K 1": 1.2, "K 4": 1.6, heads_drafting.CHOSEN: 1.44}
    rows = [
        {"set": kind, "method": way, "speedup": speed, "low": 1.4, "high": 1.5}
        for kind in ("code", "prose")
        for way, speed in speeds.items()
    ]
    monkeypatch.setattr(heads_drafting, "measured", lambda *_, **__: rows)
    monkeypatch.setattr(heads_drafting, "_texts", lambda *_: {"code": [], "prose": []})
    args = arguments(tmp_path, "--drafters", "ngram", "--fixed", "1", "4")
    lines = heads_drafting.chosen(args).splitlines()
    assert lines[2:] == [
        f"| ngram | {kind} | 1.440 | 1.400 to 1.500 | K 4 | 0.900 |" for kind in ("code", "prose")
    ]


def test_questions_are_needed(tmp_path):
    with pytest.raises(AttarError, match="questions"):
        heads_drafting._questions(arguments(tmp_path))


class Counting:
    """A head that counts its rounds."""

    name = "head"

    def __init__(self):
        self.rounds, self.forgotten = 0, []

    def propose(self, requests):
        self.rounds += 1
        return [Draft.chain([1]) for _ in requests]

    def forget(self, sequence):
        self.forgotten.append(sequence)


def test_the_oracle_runs_the_head_and_drafts_right_tokens():
    head, text = Counting(), list(range(40))
    oracle = heads_oracle.HeadOracle(head, [text], 1.0, 100)
    (draft,) = oracle.propose([DraftRequest(3, text[:10], 4)])
    oracle.forget(3)
    assert draft.tokens == (10, 11, 12, 13)
    assert head.rounds == 1 and head.forgotten == [3]
    always_wrong = heads_oracle.HeadOracle(head, [text], 0.0, 100)
    assert always_wrong.propose([DraftRequest(3, text[:10], 1)])[0].tokens != (10,)


def test_oracle_takes_heads_as_they_are_loaded(tmp_path, monkeypatch):
    from decode_cases import llama_config
    from transformers import LlamaConfig

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 128}
    heads_count = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    monkeypatch.setattr(heads_oracle, "llama_config", lambda shape: LlamaConfig(**sizes, **heads_count))
    assert llama_config("S").vocab_size  # the real one
    args = arguments(tmp_path, "--vocabulary", "64", "--drafts", "3", "--chances", "0.5", "1.0")
    args.drafters, args.fixed = ["dspark", "medusa"], [2]
    table = heads_oracle.oracle(args)
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| dspark")]
    assert [row[1:3] for row in rows] == [[a, K] for a in ("0.5", "1.0") for K in ("2", "chosen")]
    assert float(rows[2][3]) > float(rows[0][3]), "tokens a pass"
    assert "| medusa |" in table


@pytest.mark.slow
def test_a_drafter_that_is_there_is_measured_as_it_is(tmp_path):
    args = arguments(tmp_path, "--drafters", "attar:head", "suffix", "--sets", "code", "--fixed", "2")
    rows = [line.split(" | ")[:2] for line in heads_drafting.chosen(args).splitlines()[2:]]
    assert rows == [[f"| {name}", "code"] for name in ("suffix", "attar:head", "attar:head + suffix")]
