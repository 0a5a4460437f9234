"""Tasks: order, retries, what a failure stops; worker processes that die; the journal."""

import os
from pathlib import Path

import pytest

from attar.cluster.journal import FILE, Appender, TaskJournal, read_lines, statuses
from attar.cluster.settings import ClusterSettings
from attar.cluster.tasks import DONE, FAILED, LOST, SKIPPED, ClusterTask, TaskOutcome, run_tasks
from attar.cluster.workers import WorkerProcesses
from attar.errors import DataError, OutputError, SettingsError


class Scripted:
    """Workers whose outcomes are given: one task at a time."""

    def __init__(self, states, width=1):
        self.states, self.width = {name: list(each) for name, each in states.items()}, width
        self.running, self.order, self.most = [], [], 0

    def free(self):
        return len(self.running) < self.width

    def submit(self, task):
        self.running.append(task.id)
        self.order.append(task.id)
        self.most = max(self.most, len(self.running))

    def wait(self):
        task = self.running.pop(0)
        states = self.states.get(task, [DONE])
        return TaskOutcome(task, states.pop(0) if len(states) > 1 else states[0], message="why")

    def close(self):
        pass


def task(name, *needs):
    return ClusterTask(name, "os:getcwd", {}, needs)


def run(tasks, workers, path):
    journal = TaskJournal(path / FILE)
    try:
        return run_tasks(tasks, workers, journal)
    finally:
        journal.close()


def test_a_task_waits_for_what_it_needs_and_others_do_not(tmp_path):
    workers = Scripted({}, width=2)
    outcomes = run([task("c", "a"), task("a"), task("b")], workers, tmp_path)
    assert workers.order == ["a", "b", "c"] and workers.most == 2
    assert [outcomes[name].state for name in "abc"] == [DONE] * 3


def test_a_failure_skips_what_needs_it_and_nothing_else(tmp_path):
    workers = Scripted({"a": [FAILED]})
    outcomes = run([task("a"), task("b", "a"), task("c", "b"), task("d")], workers, tmp_path)
    assert {name: outcome.state for name, outcome in outcomes.items()} == {
        "a": FAILED,
        "b": SKIPPED,
        "c": SKIPPED,
        "d": DONE,
    }
    assert workers.order == ["a", "d"]


def test_a_lost_task_starts_again_three_times_at_most(tmp_path):
    workers = Scripted({"a": [LOST, LOST, DONE], "b": [LOST]})
    outcomes = run([task("a"), task("b")], workers, tmp_path)
    assert workers.order.count("a") == workers.order.count("b") == 3
    assert outcomes["a"].state == DONE and outcomes["b"].state == LOST
    a, b = statuses(read_lines(tmp_path / FILE))
    assert (a.state, a.attempts, b.state, b.attempts, b.message) == ("done", 3, "lost", 3, "why")


def test_a_lost_task_starts_again_before_those_that_wait(tmp_path):
    workers = Scripted({"a": [LOST, DONE], "c": [LOST, LOST, DONE]})
    run([task("a"), task("b"), task("c"), task("d")], workers, tmp_path)
    assert workers.order == ["a", "a", "b", "c", "c", "c", "d"]


def test_needs_in_a_circle_are_a_bug_of_the_caller(tmp_path):
    with pytest.raises(ValueError, match="never start"):
        run([task("a", "b"), task("b", "a")], Scripted({}), tmp_path)


def test_a_torn_line_of_the_journal_is_closed_and_ignored(tmp_path):
    path = tmp_path / FILE
    path.write_bytes(b'{"task": "a", "state": "started", "time": 1}\n{"task": "a", "st')
    lines = Appender(path)
    lines.write({"task": "b", "state": "started", "time": 2})
    lines.close()
    assert [status.task for status in statuses(read_lines(path))] == ["a", "b"]


def test_each_line_is_on_the_disk_when_it_is_written(tmp_path, monkeypatch):
    path = tmp_path / FILE
    sizes = []

    def fsync(descriptor):
        assert os.path.samestat(os.fstat(descriptor), path.stat())
        sizes.append(path.stat().st_size)

    monkeypatch.setattr(os, "fsync", fsync)
    lines = Appender(path)
    for number in range(3):
        lines.write({"task": "a" * number})
        assert len(sizes) == number + 1 and sizes[-1] == path.stat().st_size
    lines.close()


@pytest.mark.parametrize("content", ["keep\n", "keep", "[1]\n"])
def test_a_foreign_file_is_no_journal(tmp_path, content):
    path = tmp_path / FILE
    path.write_text(content)
    with pytest.raises(DataError, match="is no journal of attar's"):
        Appender(path)
    assert path.read_text() == content
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OutputError, match="is no file of attar's"):
        Appender(tmp_path / "link")


MODULE = """
import os
from pathlib import Path
from attar.errors import DataError

def die_once(marker):
    if not Path(marker).exists():
        Path(marker).touch()
        os.kill(os.getpid(), 9)
    print("what a library says")
    return [marker, os.environ["OMP_NUM_THREADS"]]

def refuse():
    raise DataError("no such text", hint="another one")
"""


def test_a_killed_process_loses_its_task_alone(tmp_path, monkeypatch):
    (tmp_path / "cluster_functions.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    marker = str(tmp_path / "marker")
    tasks = [
        ClusterTask("dies", "cluster_functions:die_once", {"marker": marker}),
        ClusterTask("refuses", "cluster_functions:refuse", {}),
        ClusterTask("cwd", "os:getcwd", {}),
        ClusterTask("wrong", "os:getcwd", {"wrong": 1}),
    ]
    workers = WorkerProcesses(1, threads=3)
    try:
        outcomes = run(tasks, workers, tmp_path)
    finally:
        workers.close()
    assert outcomes["dies"].result == [marker, "3"]
    assert statuses(read_lines(tmp_path / FILE))[0].attempts == 2
    assert (outcomes["refuses"].message, outcomes["refuses"].hint) == ("no such text", "another one")
    assert outcomes["cwd"].result == str(Path.cwd())
    assert "TypeError" in outcomes["wrong"].message
    assert outcomes["cwd"].worker == outcomes["refuses"].worker  # one process for many tasks


@pytest.mark.parametrize(
    "name, wrong", [("on", "ray://"), ("on", "host"), ("jobs", 0), ("cpus", 0), ("gpus", -1.0)]
)
def test_settings_that_no_cluster_can_have(name, wrong):
    with pytest.raises(SettingsError, match=name):
        ClusterSettings(**{name: wrong})
