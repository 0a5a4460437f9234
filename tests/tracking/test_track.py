"""Trackers get settings, steps and results; a killed run goes on without a step twice; none stops work."""

import json
import threading
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

import attar
from attar.errors import DataError, MissingExtraError, UsageError
from attar.tracking import background
from attar.tracking.events import numbers_of
from attar.tracking.track import stage_run, track
from attar.walks.settings import TrainSettings
from attar.walks.train import train
from tests.killed import Killed
from tests.log_lines import LogLines
from tests.tracking.tracker_fakes import FAKES, install

SETTINGS = TrainSettings(steps=8, batch_size=2, sequence_length=8, checkpoint_every=3, precision="fp32")
ROWS = torch.randint(0, 16, (8, 8), generator=torch.Generator().manual_seed(0))


def toy():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(16, 4), nn.Linear(4, 16))


def dying(step):
    """A loss that ends the process in a step; 0: never."""
    calls = 0

    def loss(model, tokens):
        nonlocal calls
        calls += 1
        if calls == step:
            raise Killed
        return nn.functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    return loss


def work(out, progress, *, dies=0, settings=SETTINGS, measurements=None):
    """A training as a stage that is tracked: its states in ``.OUT.work``."""
    folder = out.with_name(f".{out.name}.work")
    with stage_run(progress, "distill", {"model": "m", "steps": settings.steps}, out) as finish:
        folder.mkdir(exist_ok=True)
        train(toy(), dying(dies), ROWS, settings, work=folder / "train", progress=progress, what="distill")
        finish(measurements or {"kl_mean": 0.5, "head": {"tokens": 2.0}, "curve": [1], "name": "x"})


def quiet(*trackers, **options):
    return track(*trackers, progress=False, **options)


def test_a_run_is_its_settings_its_steps_and_its_measurements(tmp_path):
    events = []
    work(tmp_path / "out", quiet(events.append, group="study"))
    first, *steps, last = events
    assert (first.kind, first.name, first.verb, first.group) == ("start", "out", "distill", "study")
    assert first.settings == {"model": "m", "steps": 8}
    assert [event.step for event in steps] == list(range(1, 9))
    assert {"distill/loss", "distill/learning rate"} <= set(steps[0].numbers)
    assert (last.kind, last.state, last.numbers) == ("end", "finished", {"kl_mean": 0.5, "head/tokens": 2.0})
    assert len({event.run for event in events}) == 1
    assert not [path for path in tmp_path.iterdir() if "track" in path.name]


@pytest.mark.parametrize("name", sorted(FAKES))
def test_a_killed_run_goes_on_in_the_same_run_without_a_step_twice(name, tmp_path, monkeypatch, capsys):
    runs = install(name, monkeypatch)
    with pytest.raises(Killed):
        work(tmp_path / "out", quiet(name), dies=6)  # after the state of step 3
    work(tmp_path / "out", quiet(name))
    (run,) = runs.values()
    steps = [step for step, numbers in run.rows if "distill/loss" in numbers]
    assert steps == list(range(1, 9))
    assert run.starts == 2
    assert str(run.settings["steps"]) == "8"
    final = {**dict(run.rows[-1][1]), **run.summary}
    assert final["kl_mean"] == 0.5
    assert run.state in ("finished", "FINISHED")
    assert capsys.readouterr().out == ""  # stdout is for data


def test_other_work_in_the_same_place_is_another_run(tmp_path):
    events = []
    with pytest.raises(Killed):
        work(tmp_path / "out", quiet(events.append), dies=4)
    work(tmp_path / "out", quiet(events.append), settings=replace(SETTINGS, steps=2))
    assert len({event.run for event in events}) == 2
    assert [event.state for event in events if event.kind == "end"] == ["stopped", "finished"]


def test_a_run_that_cannot_go_on_leaves_nothing(tmp_path):
    events = []
    with pytest.raises(DataError), stage_run(quiet(events.append), "prune", {}, tmp_path / "out"):
        raise DataError("bad text")
    assert (events, list(tmp_path.iterdir())) == ([], [])


@pytest.mark.parametrize("content", ["", "[]", "{", '{"key": 1}', '{"steps": [], "run": "zz", "key": "K"}'])
def test_a_damaged_record_begins_another_run(content, tmp_path):
    events = []
    key = "K"
    (tmp_path / ".out.track").write_text(content)
    progress = quiet(events.append)
    with stage_run(progress, "prune", {}, tmp_path / "out", key=key), progress.task("scan", 2) as task:
        task.advance(kl=1.0)
        assert json.loads((tmp_path / ".out.track").read_text())["steps"] == {"scan": 1}
    assert [event.step for event in events] == [0, 1, 1]


def test_a_record_is_not_written_through_a_link(tmp_path):
    target = tmp_path / "precious"
    target.write_text("mine")
    (tmp_path / ".out.track.partial").symlink_to(target)
    work(tmp_path / "out", quiet(lambda event: None))
    assert target.read_text() == "mine"


def failing(event):
    raise SystemExit("no server\nat all")


def test_a_tracker_that_fails_is_a_line(tmp_path):
    log, calls = LogLines(), []

    def broken(event):
        calls.append(event)
        raise OSError("disk full")

    progress = track(broken, progress=log)
    tracker = background.BackgroundTracker("nowhere", lambda: failing, log.log)
    progress._trackers.append(tracker)
    work(tmp_path / "out", progress)
    assert len(calls) == 1
    lines = sorted(log.lines)
    assert lines[0] == "--track broken: OSError: disk full; the work goes on without it"
    assert lines[1].startswith("--track nowhere: SystemExit: no server")
    assert len(lines) == 2 and "\n" not in "".join(lines)


def test_a_tracker_that_hangs_ends_with_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(background, "PATIENCE_S", 0.05)
    free, log = threading.Event(), LogLines()
    progress = track(progress=log)
    progress._trackers.append(background.BackgroundTracker("slow", lambda: lambda _: free.wait(9), log.log))
    start = time.monotonic()
    work(tmp_path / "out", progress)
    assert time.monotonic() - start < 8
    assert log.lines == ["--track slow: did not take all records in 0.05 s; the work goes on without it"]
    free.set()


def test_what_is_no_tracker_is_refused(monkeypatch):
    with pytest.raises(UsageError, match="--track wanbd: is no tracker; did you mean 'wandb'"):
        attar.track("wanbd")
    with pytest.raises(UsageError, match="is no tracker"):
        attar.track(["mlflow"])
    monkeypatch.setattr("attar.tracking.track.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError) as error:
        attar.track("mlflow")
    assert error.value.hint == "pip install mlflow"


def test_a_folder_of_a_trackers_files_is_not_its_package(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MissingExtraError):
        attar.track("wandb")


def test_numbers_of_a_record():
    record = {"a": 1, "b": {"c/s": 2.5, "d": [1]}, "e": True, "f": float("nan"), "g%": None, "h%": 3}
    assert numbers_of(record) == {"a": 1.0, "b/c/s": 2.5, "h_": 3.0}
