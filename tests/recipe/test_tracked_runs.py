"""Tracked recipes and sweeps: a run a stage, one group, results at the end, nothing twice."""

import pytest

from attar.cluster.settings import ClusterSettings
from attar.errors import UsageError
from attar.recipe import step_task
from attar.recipe.run import run_recipe
from attar.recipe.sweep import run_sweep
from attar.tracking.track import track
from tests.recipe import recipe_fakes
from tests.recipe.test_sweep import TEXT, InThisProcess
from tests.tracking.tracker_fakes import install


def ends(events):
    return [(event.name, event.state) for event in events if event.kind == "end"]


def test_the_stages_of_a_recipe_are_runs_of_one_group(recipe, tmp_path):
    events = []
    progress = track(events.append, progress=False)
    out = tmp_path / "study"
    recipe_fakes.FAULTS["03-recover"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        run_recipe(recipe(), out, progress=progress, tools=recipe_fakes.TOOLS)
    run_recipe(recipe(), out, progress=progress, tools=recipe_fakes.TOOLS)
    names = ["00-original", "01-prune", "02-prune-2", "03-recover", "04-side"]
    stopped = [("03-recover", "stopped")]
    assert ends(events) == [(name, "finished") for name in names[:3]] + stopped + [
        (name, "finished") for name in names[3:]
    ]
    assert {event.group for event in events} == {"study"}
    assert len({event.run for event in events}) == len(names)
    steps = [(event.step, dict(event.numbers)) for event in events if event.name == "03-recover"]
    assert [step for step, numbers in steps if "learn/loss" in numbers] == [1, 2]
    final = events[-1].numbers
    assert (final["kl_mean"], final["top1_agreement"]) == (0.5, 0.9)
    assert "seconds" in final and "kl_p99" not in final  # infinite
    start = next(event for event in events if event.name == "03-recover")
    assert start.settings["amount"] == 3 and start.settings["source"]
    before = len(events)
    run_recipe(recipe(), out, progress=progress, tools=recipe_fakes.TOOLS)
    assert len(events) == before  # nothing is done, nothing is told
    assert not list(out.glob(".*.track*"))


def test_a_stage_that_was_killed_before_its_evaluation_goes_on_in_its_run(recipe, tmp_path):
    events = []
    progress = track(events.append, progress=False)
    recipe_fakes.FAULTS["evaluate 01-prune"] = KeyboardInterrupt()
    for attempt in (1, 2):
        try:
            run_recipe(recipe(), tmp_path / "study", progress=progress, tools=recipe_fakes.TOOLS)
        except KeyboardInterrupt:
            assert attempt == 1
    of_stage = [event for event in events if event.name == "01-prune"]
    assert len({event.run for event in of_stage}) == 1
    assert [event.kind for event in of_stage] == ["start", "step", "step", "end", "start", "end"]
    assert of_stage[-1].numbers["perplexity"] > 0


@pytest.fixture
def sweep(fakes, model, tmp_path, monkeypatch):
    monkeypatch.setattr(step_task, "TOOLS", recipe_fakes.TOOLS)
    monkeypatch.chdir(tmp_path)
    step_task._kept.cache_clear()
    (tmp_path / "text.txt").write_text("some text")
    path = tmp_path / "recipe.yaml"
    path.write_text(TEXT.format(model=model, data=tmp_path / "text.txt"))

    def call(progress):
        changes = ["stages.recover.amount=3,5"]
        workers = InThisProcess()
        return run_sweep(
            path,
            tmp_path / "grid",
            changes,
            ClusterSettings(),
            workers=workers,
            tools=recipe_fakes.TOOLS,
            progress=progress,
        )

    return call


def test_a_sweeps_workers_track_their_stages_in_its_group(sweep, monkeypatch):
    runs = install("wandb", monkeypatch)
    sweep(track("wandb", progress=False))
    assert {run.group for run in runs.values()} == {"grid"}
    recovered = {run.name: run.settings["amount"] for run in runs.values() if "03-" in run.name}
    assert recovered == {"recover.amount=3/03-recover": 3, "recover.amount=5/03-recover": 5}
    assert len(runs) == 6  # stages that both variants share are made once
    assert all(run.state == "finished" and run.summary["kl_mean"] == 0.5 for run in runs.values())


def test_a_function_cannot_follow_a_sweep(sweep, tmp_path):
    with pytest.raises(UsageError, match="a function cannot follow work in other processes"):
        sweep(track(print, progress=False))
