"""Sweeps: variants, stages made once, a failed run, resuming, the front, the status."""

import json
from pathlib import Path

import pytest

from attar.cluster.settings import ClusterSettings
from attar.cluster.tasks import LOST, TaskOutcome, perform
from attar.errors import DataError, OutputError, RecipeError
from attar.measure.run_folder import StageRecord
from attar.measure.sweep import pareto_front
from attar.recipe import step_task
from attar.recipe.status import read_status
from attar.recipe.sweep import run_sweep, split_values, variants_of
from attar.recipe.variants import run_on_cluster
from tests.recipe import recipe_fakes
from tests.recipe.conftest import TEXT, calls_of


class InThisProcess:
    """Workers that are this process; ``dies`` loses the first call of a task after its work."""

    def __init__(self, dies=()):
        self.ended, self.dies = [], set(dies)

    def free(self):
        return not self.ended

    def submit(self, task):
        outcome = perform(task.id, task.function, json.loads(json.dumps(task.arguments)))
        if task.id in self.dies:
            self.dies.remove(task.id)
            outcome = TaskOutcome(task.id, LOST, message="its process died")
        self.ended.append(outcome)

    def wait(self):
        return self.ended.pop()

    def close(self):
        pass


@pytest.fixture
def sweep(fakes, model, tmp_path, monkeypatch):
    monkeypatch.setattr(step_task, "TOOLS", recipe_fakes.TOOLS)
    monkeypatch.chdir(tmp_path)
    step_task._kept.cache_clear()
    (tmp_path / "text.txt").write_text("some text")
    path = tmp_path / "recipe.yaml"
    path.write_text(TEXT.format(model=model, data=tmp_path / "text.txt"))

    def call(*changes, out="sweep", dies=(), **options):
        return run_sweep(
            path,
            tmp_path / out,
            changes,
            ClusterSettings(),
            workers=InThisProcess(dies),
            tools=recipe_fakes.TOOLS,
            **options,
        )

    return call


def added():
    return [call.split()[1] for call in calls_of(("add", "learn"))]


def test_values_are_split_at_commas_outside_brackets_and_quotes():
    assert split_values("3,4, 5") == ["3", "4", "5"]
    assert split_values('[1,2],{a: [3,4]},"x,y"') == ["[1,2]", "{a: [3,4]}", '"x,y"']


def test_variants_are_the_product_and_keep_their_names():
    two = variants_of(["stages.q.bits=3,4", "seed=1", "stages.p.ratio=0.1,0.2"])
    assert list(two) == [
        "q.bits=3+p.ratio=0.1",
        "q.bits=3+p.ratio=0.2",
        "q.bits=4+p.ratio=0.1",
        "q.bits=4+p.ratio=0.2",
    ]
    assert two["q.bits=4+p.ratio=0.1"] == ("stages.q.bits=4", "seed=1", "stages.p.ratio=0.1")
    names = [*variants_of(["model=a/b,a_b"]), *variants_of([f"model={'x' * 300},y"])]
    assert len(set(names)) == 4 and all("/" not in name and len(name) <= 120 for name in names)


@pytest.mark.parametrize(
    "changes, message",
    [
        (["bits"], "not of the form"),
        (["bits=3,,4"], "not of the form"),
        (["bits=3,3"], "twice"),
        (["bits=3"], "several values"),
        (["a=1,2,3,4,5,6,7,8,9,10,11", "b=1,2,3,4,5,6,7,8,9,10", "c=1,2,3,4,5,6,7,8,9,10"], "1100 runs"),
    ],
)
def test_what_is_no_sweep_is_refused(changes, message):
    with pytest.raises(RecipeError, match=message):
        variants_of(changes)


def test_common_stages_are_made_once(sweep, tmp_path):
    result = sweep("stages.recover.amount=3,5", "stages.side.steps=2,4")
    # 01 and 02 once; 03 for each amount; 04 (from 01) for each number of steps
    assert sorted(added()) == ["01-prune", "02-prune-2", *["03-recover"] * 2, *["04-side"] * 2]
    assert calls_of(["reference"]) == ["reference base"]
    assert len(calls_of(["evaluate"])) == 1 + 6
    assert len(read_status(tmp_path / "sweep").tasks) == 7  # side by side, too
    runs = sorted((tmp_path / "sweep" / "runs").iterdir())
    assert len(runs) == 4 and result.failed == 0
    first, last = (run / "01-prune" / "model.safetensors" for run in (runs[0], runs[-1]))
    assert first.stat().st_ino == last.stat().st_ino
    means = {run.name: run.last.measurements["perplexity"] for run in result.record.runs}
    # 1 + 2 + 2 * 4 or 1 + 2 + 4 * 4
    assert [means[name] for name in sorted(means)] == [11.0, 19.0, 11.0, 19.0]
    contents = [json.loads((run / "run.json").read_text()) for run in runs]
    assert all(content["finished"] and len(content["stages"]) == 5 for content in contents)
    assert all((tmp_path / "sweep" / name).is_file() for name in ("report.html", "pareto.svg", "sweep.json"))


def test_again_nothing_is_done_and_a_new_value_costs_its_own_stages(sweep):
    sweep("stages.side.steps=2,4")
    recipe_fakes.CALLS.clear()
    sweep("stages.side.steps=2,4")
    assert added() == [] and calls_of(["evaluate", "reference"]) == []
    sweep("stages.side.steps=2,4,6")
    assert added() == ["04-side"] and calls_of(["evaluate"]) == ["evaluate 04-side"]


def test_a_failed_run_does_not_end_the_others(sweep, tmp_path):
    result = sweep("stages.prune-2.amount=13,2", "stages.side.steps=2,4")  # 13 is refused by the stage
    assert result.failed == 2
    for run in result.record.runs:
        assert (run.last is None) == ("13" in run.name)
        assert not run.message or ("01-prune" not in run.message and "13" in run.message)
    content = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    assert [entry["finished"] for entry in content["variants"]] == [False, False, True, True]
    states = {task.task: task.state for task in read_status(tmp_path / "sweep").tasks}
    assert states["prune-2.amount=13+side.steps=2/02-prune-2"] == "failed"
    assert states["prune-2.amount=13+side.steps=2/03-recover"] == "skipped"
    assert states["prune-2.amount=13+side.steps=4/04-side"] == "done"


@pytest.mark.slow
def test_a_worker_that_dies_after_its_work_changes_nothing(sweep, tmp_path):
    """At least once: the second call finds the checkpoint with its key."""
    sweep("stages.side.steps=2,4", dies=["side.steps=2/01-prune"])
    assert added().count("01-prune") == 1
    (lost,) = [task for task in read_status(tmp_path / "sweep").tasks if task.task.endswith("=2/01-prune")]
    assert (lost.attempts, lost.state) == (2, "done")


@pytest.mark.slow
def test_values_that_differ_in_the_evaluation_alone_share_every_stage(sweep):
    result = sweep("evaluate.tokens=64,128")
    assert added() == ["01-prune", "02-prune-2", "03-recover", "04-side"]
    assert len(calls_of(["evaluate"])) == 2 * 5 and result.failed == 0


def test_a_wrong_value_is_refused_before_anything_runs(sweep, tmp_path):
    with pytest.raises(RecipeError, match="amount"):
        sweep("stages.side.amount=1,-1")
    assert not (tmp_path / "sweep").exists()


def test_a_folder_with_other_files_is_refused(sweep, tmp_path):
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "thesis.txt").touch()
    with pytest.raises(OutputError, match="thesis"):
        sweep("stages.side.steps=2,4")


@pytest.mark.slow
def test_a_recipe_whose_stages_are_tasks_gives_the_run_of_one_process(sweep, recipe, run, tmp_path):
    run()
    recipe_fakes.CALLS.clear()
    workers = InThisProcess(["02-prune-2"])
    result = run_on_cluster(
        recipe(), tmp_path / "tasks", ClusterSettings(), workers=workers, tools=recipe_fakes.TOOLS
    )
    for name in ("01-prune", "02-prune-2", "03-recover", "04-side"):
        one, other = (tmp_path / folder / name / "model.safetensors" for folder in ("run", "tasks"))
        assert one.read_bytes() == other.read_bytes()
    before = json.loads((tmp_path / "run" / "run.json").read_text())["stages"]
    assert [stage["measurements"] for stage in result.content["stages"]] == [
        stage["measurements"] for stage in before
    ]
    with pytest.raises(RecipeError, match="prune-2"):
        run_on_cluster(
            recipe("stages.prune-2.amount=13"),
            tmp_path / "tasks",
            ClusterSettings(),
            workers=InThisProcess(),
            tools=recipe_fakes.TOOLS,
        )


def test_a_worker_with_another_model_or_without_the_folder_refuses(sweep, model, tmp_path):
    sweep("stages.side.steps=2,4")
    name = tmp_path / "sweep" / "runs" / "side.steps=2"
    call = {
        "recipe": (name / "recipe.yaml").read_text(),
        "name": "recipe.yaml",
        "out": str(name),
        "stage": "side",
        "key": "another",
        "folder": str(Path.cwd()),
        "quiet": True,
    }
    with pytest.raises(OutputError, match="another checkpoint"):
        step_task.make_step(**call)
    with pytest.raises(OutputError, match="does not see"):
        step_task.make_step(**call | {"out": "/nowhere/at/all"})


def test_the_status_of_a_run_without_a_journal(run, tmp_path):
    run()
    status = read_status(tmp_path / "run")
    assert [task.state for task in status.tasks] == ["done"] * 5 and status.process == ""
    assert "5 done; no process is at work" in status.text()
    with pytest.raises(DataError, match="neither"):
        read_status(tmp_path)


def stage(name, size, **measurements):
    return StageRecord(name, measurements={"bytes": size, **measurements})


def test_the_front_is_what_no_other_beats():
    stages = [
        stage("large", 8, kl_mean=0.1),
        stage("worse", 8, kl_mean=0.2),
        stage("small", 2, kl_mean=0.5),
        stage("same", 2, kl_mean=0.5),
        stage("middle", 4, kl_mean=0.6),
        stage("unknown", 1),
    ]
    assert sorted(pareto_front(stages)) == ["large", "same", "small"]
    assert pareto_front([stage("a", 1, perplexity=3), stage("b", 2, perplexity=2)]) == ["a", "b"]


def test_a_larger_model_inside_the_errors_is_not_on_the_front():
    error = {"kl_mean_row_stderr": 0.001}
    stages = [
        stage("small", 2, kl_mean=0.012, **error),
        stage("tied", 2, kl_mean=0.013, **error),
        stage("worse", 2, kl_mean=0.016, **error),
        stage("larger", 4, kl_mean=0.011, **error),
        stage("better", 8, kl_mean=0.008, **error),
    ]
    assert pareto_front(stages) == ["small", "tied", "better"]
