"""Several processes of a run: only the first one writes the output."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from attar.checkpoint import processes
from attar.checkpoint.card import Card
from attar.checkpoint.output import produce
from attar.errors import OutputError


@pytest.fixture
def second(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("attar.checkpoint.output.wait_for_claim", lambda *given: None)


def test_the_rank_is_the_launchers(monkeypatch):
    assert processes.rank() == 0
    for value, world, wanted in (("1", "2", 1), ("0", "2", 0), ("1", "1", 0), ("x", "2", 0), ("3", "", 0)):
        monkeypatch.setenv("RANK", value)
        monkeypatch.setenv("WORLD_SIZE", world)
        assert processes.rank() == wanted


def test_the_second_process_leaves_the_output_to_the_first(tmp_path, second, monkeypatch):
    waited = []
    monkeypatch.setattr("attar.checkpoint.output.wait_for_first", lambda *given: waited.append(given))
    with produce(tmp_path / "out", "distill", {"seed": 0}, 1, []) as output:
        assert output.folder.parent == tmp_path and output.work.is_dir()
        (output.folder / "config.json").write_text("{}")
    assert list(tmp_path.iterdir()) == []
    (given,) = waited
    assert given == (tmp_path / "out", output.key, tmp_path / ".out.work" / "lock")


def test_what_is_left_to_the_first_process_leaves_nothing(tmp_path, second, monkeypatch):
    monkeypatch.setattr("attar.checkpoint.output.wait_for_first", lambda *given: None)
    with produce(tmp_path / "out", "distill", {"seed": 0}, 1, []) as output:
        (output.work / "rows").touch()
        output.exit_unless_rank0()
        raise AssertionError("the block went on")
    assert list(tmp_path.iterdir()) == []


def test_the_first_process_alone_goes_on_and_removes_what_others_left(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for number in (1, 2, 3):  # of a run of four that was killed
        (tmp_path / f"..out.rank-{number}.work").mkdir()
    (tmp_path / "..out.rank-3.partial").mkdir()
    with produce(tmp_path / "out", "distill", {"seed": 0}, 1, []) as output:
        assert output.processes.count == 2 and output.shared == output.work
        output.exit_unless_rank0()
        assert output.processes is processes.SINGLE_PROCESS
    assert sorted(path.name for path in tmp_path.iterdir()) == ["..out.rank-1.work", "out"]


def test_it_waits_until_the_first_process_has_claimed_its_work(tmp_path, monkeypatch):
    naps = []

    def nap(seconds):
        naps.append(seconds)
        if len(naps) == 2:
            (tmp_path / "key.json").write_text(json.dumps({"key": "other"}))
        if len(naps) == 4:
            (tmp_path / "key.json").write_text(json.dumps({"key": "key"}))

    monkeypatch.setattr(processes.time, "sleep", nap)
    processes.wait_for_claim(tmp_path / "out", "key", tmp_path)
    assert len(naps) == 4


def test_one_process_is_all():
    alone = processes.SINGLE_PROCESS
    assert alone.of_first("a") == "a" and alone.of_all("a") == ["a"]
    assert alone.agreed(True) and not alone.agreed(False) and alone.first
    assert float(alone.total(torch.tensor(2.0))) == 2.0


def test_the_largest_piece_goes_to_the_process_with_least_to_do():
    two = processes.Processes(0, 2)
    assert two.partition_by_size([4, 1, 1, 2]) == [0, 1, 1, 1]
    assert two.partition_by_size([1, 10, 2]) == [1, 0, 1]


def test_it_waits_until_the_output_is_there(tmp_path, monkeypatch):
    folder = tmp_path / "out"
    work = tmp_path / ".out.work"
    work.mkdir()
    code = (
        "import fcntl, sys, time; lock = open(sys.argv[1], 'w'); fcntl.lockf(lock, fcntl.LOCK_EX); "
        "print('held', flush=True); sys.stdin.readline()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(work / "lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    holder.stdout.readline()
    naps = []

    def nap(seconds):
        naps.append(seconds)
        if len(naps) == 2:
            folder.mkdir()
            Card(name="out", stage="distill", key="other").write(folder)
        if len(naps) == 4:
            Card(name="out", stage="distill", key="key").write(folder)

    monkeypatch.setattr(processes.time, "sleep", nap)
    processes.wait_for_first(folder, "key", work / "lock")
    monkeypatch.undo()
    holder.communicate("\n")
    assert len(naps) == 4


def test_a_first_process_that_ended_without_is_named(tmp_path):
    (tmp_path / "lock").touch()
    for lock in (tmp_path / "lock", tmp_path / "gone"):
        with pytest.raises(OutputError, match="did not finish"):
            processes.wait_for_first(tmp_path / "out", "key", lock)
