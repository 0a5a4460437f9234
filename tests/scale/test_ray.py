"""Stages as tasks on a Ray cluster of two nodes on this machine: equality, and what dies.

Ray is an optional extra; a cluster takes about ten seconds to start.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from attar.checkpoint.open import open_checkpoint
from attar.cluster.journal import FILE, TaskJournal, read_lines, statuses
from attar.cluster.rows import run_rows
from attar.cluster.settings import ClusterSettings
from attar.cluster.tasks import DONE, FAILED, ClusterTask, Resources, run_tasks
from attar.cluster.workers import actors_of, workers_of
from attar.errors import EndpointError

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

MODULE = """
import os, time
from pathlib import Path
from attar.errors import DataError

def note(folder, name, seconds=0.0):
    path = Path(folder)
    with (path / "calls").open("a") as file:
        file.write(f"{name} {os.getpid()} {os.environ.get('OMP_NUM_THREADS')}\\n")
    time.sleep(seconds)
    return name

def die_once(folder):
    if not (Path(folder) / "died").exists():
        (Path(folder) / "died").touch()
        os.kill(os.getpid(), 9)
    return note(folder, "died once")

def measure_rows(rows, folder):
    if any(record["row"] == "poison" for record in rows):
        os._exit(7)
    return [{"id": record["id"], "result": len(record["row"])} for record in rows]

def refuse():
    raise DataError("no such text", hint="another one")
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    folder = tmp_path_factory.mktemp("functions")
    (folder / "scale_functions.py").write_text(MODULE)
    return folder


@pytest.fixture(scope="module")
def cluster(functions):
    """Two nodes of two processors each; the second can be removed."""
    from ray.cluster_utils import Cluster

    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = f"{functions}:{before}"
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    nodes.add_node(num_cpus=2, resources={"second": 1})
    os.environ["RAY_ADDRESS"] = nodes.address
    yield nodes
    ray.shutdown()
    nodes.shutdown()
    os.environ["PYTHONPATH"] = before
    del os.environ["RAY_ADDRESS"]


def run(tasks, folder):
    journal = TaskJournal(folder / FILE)
    workers = workers_of(ClusterSettings(on="auto"))
    try:
        return run_tasks(tasks, workers, journal)
    finally:
        workers.close()
        journal.close()


def call(task, function, *needs, **arguments):
    return ClusterTask(task, f"scale_functions:{function}", arguments, needs)


def attempts(folder):
    return {status.task: (status.state, status.attempts) for status in statuses(read_lines(folder / FILE))}


def test_tasks_run_and_errors_are_outcomes(cluster, tmp_path):
    folder = str(tmp_path)
    outcomes = run(
        [
            call("a", "note", folder=folder, name="a"),
            call("b", "note", "a", folder=folder, name="b"),
            call("no", "refuse"),
        ],
        tmp_path,
    )
    assert [outcomes[name].result for name in "ab"] == ["a", "b"]
    assert (outcomes["no"].state, outcomes["no"].message) == (FAILED, "no such text")
    assert [line.split()[0] for line in (tmp_path / "calls").read_text().splitlines()] == ["a", "b"]


def test_a_worker_that_kills_itself_is_started_again(cluster, tmp_path):
    outcomes = run([call("dies", "die_once", folder=str(tmp_path))], tmp_path)
    assert outcomes["dies"].result == "died once"
    assert attempts(tmp_path)["dies"] == ("done", 2)


def test_a_worker_killed_by_its_pid(cluster, tmp_path):
    def kill():
        path = tmp_path / "calls"
        while not path.exists() or not path.read_text().strip():
            time.sleep(0.1)
        os.kill(int(path.read_text().split()[1]), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    outcomes = run([call("long", "note", folder=str(tmp_path), name="long", seconds=5.0)], tmp_path)
    killer.join()
    assert outcomes["long"].state == DONE and attempts(tmp_path)["long"] == ("done", 2)


def test_resources_that_no_machine_has_are_refused(cluster):
    with pytest.raises(EndpointError, match=r"no machine .* GPU 7"):
        workers_of(ClusterSettings(on="auto", gpus=7))
    with pytest.raises(EndpointError, match="CPU 1000"):
        workers_of(ClusterSettings(on="auto", cpus=1000))
    assert Resources(cpus=2).cpus == 2


RECIPE = """
model: attar:tiny
evaluate: {{tokens: 1024, speed: false, sample: ""}}
stages:
  - {{stage: quantize, name: w4, method: rtn, check_tokens: 0}}
  - {{stage: export, name: dense, format: dense, from: w4}}
  - {{stage: quantize, name: w8, method: rtn, scheme: W8A16, check_tokens: 0, from: original}}
"""


def attar(*words, cwd, **options):
    return subprocess.run(
        [sys.executable, "-m", "attar", *words], cwd=cwd, capture_output=True, text=True, **options
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run of one process."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "recipe.yaml").write_text(RECIPE.format())
    done = attar("run", "recipe.yaml", "-o", "run", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


STAGES = ("01-w4", "02-dense", "03-w8")


def same_bytes(one, other):
    for stage in STAGES:
        files = sorted(path.name for path in (one / stage).glob("*.safetensors"))
        assert files
        for name in files:
            assert (one / stage / name).read_bytes() == (other / stage / name).read_bytes()


def test_a_recipe_on_ray_gives_the_bytes_of_one_process(cluster, alone):
    done = attar("run", "recipe.yaml", "-o", "on-ray", "--on", "auto", cwd=alone)
    assert done.returncode == 0, done.stderr
    same_bytes(alone / "run", alone / "on-ray")
    records = [json.loads((alone / run / "run.json").read_text())["stages"] for run in ("run", "on-ray")]
    kl = [[stage["measurements"].get("kl_mean") for stage in stages] for stages in records]
    assert kl[0] == pytest.approx(kl[1], abs=1e-6)


def test_a_driver_killed_and_started_again(cluster, alone):
    """kill -9 of the driver in the middle: the same command goes on, with the same bytes."""
    out = alone / "killed"
    words = [sys.executable, "-m", "attar", "run", "recipe.yaml", "-o", "killed", "--on", "auto"]
    driver = subprocess.Popen(words, cwd=alone, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    journal, limit = out / FILE, time.monotonic() + 500
    while '"done"' not in (journal.read_text() if journal.exists() else "") and time.monotonic() < limit:
        time.sleep(0.1)
    driver.kill()
    driver.wait()
    finished = {task for task, (state, _) in attempts(out).items() if state == DONE}
    assert finished and finished != {"00-original", *STAGES}
    status = json.loads(attar("status", "killed", "--json", cwd=alone).stdout)
    assert status["process"] is None and "interrupted" in {task["state"] for task in status["tasks"]}
    done = attar("run", "recipe.yaml", "-o", "killed", "--on", "auto", cwd=alone)
    assert done.returncode == 0, done.stderr
    same_bytes(alone / "run", out)
    again = attempts(out)
    assert all(again[task][1] == 1 for task in finished)


def rows_on(tmp_path, function, jobs=2):
    rows = {name: name for name in ("a", "b", "poison", "c", "d")}

    def task_of(name, batch):
        return ClusterTask(name, f"scale_functions:{function}", {"rows": batch, "folder": str(tmp_path)})

    settings = ClusterSettings(on="auto", jobs=jobs)
    return run_rows(rows, task_of, lambda: actors_of(settings), tmp_path / "rows.journal", batch=2)


def test_a_poison_row_is_one_error_of_an_actor_pool(cluster, tmp_path):
    results = rows_on(tmp_path, "measure_rows")
    assert [results[name].get("result") for name in "abcd"] == [1, 1, 1, 1]
    assert "actor died" in results["poison"]["error"]
    again = rows_on(tmp_path, "no_such_function")  # only the poison row is asked for again
    assert [again[name].get("result") for name in "abcd"] == [1, 1, 1, 1] and "error" in again["poison"]


def test_more_actors_than_the_cluster_holds_are_refused(cluster):
    with pytest.raises(EndpointError, match="9 times CPU 1"):
        actors_of(ClusterSettings(on="auto", jobs=9))


def test_prompts_on_an_actor_pool_are_answered_as_in_one_process(cluster, tmp_path):
    (tmp_path / "prompts.txt").write_text("def f\nimport \nclass A\nwhile \n")
    words = ("generate", "attar:tiny", "--file", "prompts.txt", "--max-tokens", "4", "--batch-rows", "2")
    for out, rest in (("one.jsonl", ()), ("ray.jsonl", ("--on", "auto", "--jobs", "2"))):
        done = attar(*words, "-o", out, *rest, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    lines = [(tmp_path / name).read_text().splitlines() for name in ("one.jsonl", "ray.jsonl")]
    one, on_ray = ([(row["prompt"], row["samples"]) for row in map(json.loads, rows)] for rows in lines)
    assert one == on_ray and len(one) == 4


def test_answers_of_a_teacher_on_actors_are_those_of_one_process(cluster, tmp_path):
    """The journals are compared: the filters drop answers that six tokens cut off."""
    (tmp_path / "prompts.txt").write_text("def f\nimport os\nclass A\n")
    words = ("collect", "prompts.txt", "--teacher", "attar:tiny", "--max-tokens", "6")
    answers = []
    for out, rest in (("one.jsonl", ()), ("ray.jsonl", ("--on", "auto", "--jobs", "2"))):
        done = attar(*words, "-o", out, *rest, cwd=tmp_path)
        assert "the filters keep no row" in done.stderr, done.stderr
        rows = read_lines(tmp_path / f"{out}.journal")
        answers.append({row["id"]: row["messages"] for row in rows if "messages" in row})
    assert answers[0] == answers[1] and len(answers[0]) == 3


def test_a_request_that_kills_actors_is_refused_and_others_are_answered(cluster, monkeypatch):
    from attar.collection.requests import TeacherRequest
    from attar.collection.retry import TeacherFailure
    from attar.collection.settings import CollectSettings
    from attar.collection.teachers import TeacherAnswer
    from attar.collection.teachers import cluster as teachers

    class Deadly:
        def __init__(self, *words):
            pass

        async def ask(self, request):
            if request.id == "poison":
                os._exit(7)
            return TeacherAnswer(request.id, "stop")

    monkeypatch.setattr(teachers, "_TeacherActor", Deadly)
    teacher = teachers.ClusterTeacher(
        open_checkpoint("attar:tiny"), CollectSettings(), ClusterSettings(on="auto", jobs=2)
    )
    teacher.prepare()
    requests = [TeacherRequest(name, (), {}, 0, "") for name in ("a", "poison", "b", "c")]

    async def ask():
        replies = await asyncio.gather(*(teacher.ask(request) for request in requests))
        await teacher.close()
        return replies

    replies = asyncio.run(ask())
    assert [getattr(reply, "content", None) for reply in replies] == ["a", None, "b", "c"]
    assert isinstance(replies[1], TeacherFailure) and replies[1].effect == "refuse"


def test_an_evaluation_on_a_worker_has_the_numbers_of_one_process(cluster, tmp_path):
    words = ("evaluate", "attar:tiny", "--tokens", "1024", "--no-speed", "--sample", "", "--json")
    here, there = (json.loads(attar(*words, *rest, cwd=tmp_path).stdout) for rest in ((), ("--on", "auto")))
    assert here["perplexity"] == pytest.approx(there["perplexity"], rel=1e-6)


def test_a_node_is_removed_while_it_works(cluster, tmp_path):
    """Last, since the node does not come back: its tasks are done on the other one."""
    second = cluster.worker_nodes and next(iter(cluster.worker_nodes))
    tasks = [call(f"t{n}", "note", folder=str(tmp_path), name=f"t{n}", seconds=6.0) for n in range(4)]

    def remove():
        path = tmp_path / "calls"
        while not path.exists() or len(path.read_text().splitlines()) < 4:
            time.sleep(0.1)
        cluster.remove_node(second, allow_graceful=False)

    remover = threading.Thread(target=remove)
    remover.start()
    outcomes = run(tasks, tmp_path)
    remover.join()
    assert [outcome.state for outcome in outcomes.values()] == [DONE] * 4
    starts = [count for _, count in attempts(tmp_path).values()]
    assert sum(starts) > 4 and max(starts) <= 3
