"""Rows in batches: which are tried again, how often, and what the journal has of them."""

import json

import pytest

from attar.cluster.rows import run_rows
from attar.cluster.tasks import DONE, FAILED, LOST, ClusterTask, TaskOutcome

ROWS = {name: name for name in "abcde"}


class Batches:
    """Workers that lose or fail the tasks with certain rows, as often as a script says."""

    def __init__(self, **troubles):
        self.troubles = {name: list(states) for name, states in troubles.items()}
        self.running, self.asked, self.closed = [], [], False

    def free(self):
        return not self.running

    def submit(self, task):
        self.running.append(task)

    def wait(self):
        task = self.running.pop()
        ids = [record["id"] for record in task.arguments["rows"]]
        self.asked.append("".join(ids))
        for id in ids:
            if self.troubles.get(id):
                state = self.troubles[id].pop(0)
                if state == "error":
                    continue
                return TaskOutcome(task.id, state, message="why")
        errors = [id for id in ids if self.troubles.get(id) == [] and id == "e"]
        results = [{"id": id, "error": "no"} if id in errors else {"id": id, "result": id * 2} for id in ids]
        return TaskOutcome(task.id, DONE, results)

    def close(self):
        self.closed = True


def run(tmp_path, workers, batch=3):
    def task(name, rows):
        return ClusterTask(name, "os:getcwd", {"rows": rows})

    return run_rows(ROWS, task, lambda: workers, tmp_path / "j", batch=batch)


def in_journal(tmp_path):
    return [json.loads(line)["id"] for line in (tmp_path / "j").read_text().splitlines()]


def test_a_lost_batch_is_dealt_row_by_row_and_only_it(tmp_path):
    workers = Batches(b=[LOST])
    results = run(tmp_path, workers)
    assert workers.asked == ["abc", "de", "a", "b", "c"] and workers.closed
    assert results == {id: {"id": id, "result": id * 2} for id in ROWS}
    assert in_journal(tmp_path) == list("deabc")


@pytest.mark.parametrize(("losses", "tries"), [(2, 2), (3, 2), (5, 2)])
def test_a_row_that_kills_its_worker_is_tried_twice_alone(tmp_path, losses, tries):
    workers = Batches(b=[LOST] * losses)
    results = run(tmp_path, workers)
    assert workers.asked == ["abc", "de", "a", *"b" * tries, "c"]
    assert results["b"] == ({"id": "b", "result": "bb"} if losses == 2 else {"id": "b", "error": "why"})
    assert ("b" in in_journal(tmp_path)) == (losses == 2)


def test_a_row_that_fails_is_tried_once_more_alone(tmp_path):
    workers = Batches(b=[FAILED, FAILED, FAILED])
    results = run(tmp_path, workers)
    assert workers.asked == ["abc", "de", "a", "b", "c"] and results["b"]["error"] == "why"


def test_rows_with_errors_are_no_results_and_are_tried_again_by_the_next_run(tmp_path):
    assert run(tmp_path, Batches(e=["error"]))["e"] == {"id": "e", "error": "no"}
    assert in_journal(tmp_path) == list("abcd")
    workers = Batches()
    assert run(tmp_path, workers)["e"]["result"] == "ee" and workers.asked == ["e"]
    assert run(tmp_path, None)["e"]["result"] == "ee"
