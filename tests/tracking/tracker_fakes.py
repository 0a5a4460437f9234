"""Stand-ins for mlflow, wandb and trackio: what attar calls of them, by their public signatures.

They keep what they are told by run, so that a run that goes on is seen to be the same one.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any


class FakeRun:
    """What a tracker knows of a run; ``state`` as the tracker names it."""

    def __init__(self, name: str, settings: dict[str, Any], group: str | None = None) -> None:
        self.name, self.settings, self.group = name, settings, group
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.summary: dict[str, float] = {}
        self.state = ""
        self.starts = 1


def module(name: str, **members: Any) -> ModuleType:
    """A module that ``find_spec`` knows."""
    fake = ModuleType(name)
    fake.__spec__ = ModuleSpec(name, None, origin=f"{name}.py")
    vars(fake).update(members)
    return fake


def fake_mlflow(runs: dict[str, FakeRun]) -> dict[str, ModuleType]:
    """mlflow 3: MlflowClient, Metric, Param."""

    class Metric:
        def __init__(self, key: str, value: float, timestamp: int, step: int) -> None:
            self.key, self.value, self.step = key, value, step

    class Param:
        def __init__(self, key: str, value: str) -> None:
            assert isinstance(value, str) and len(value) <= 6000
            self.key, self.value = key, value

    class MlflowClient:
        def get_experiment_by_name(self, name: str) -> Any:
            return None

        def create_experiment(self, name, artifact_location=None, tags=None) -> str:
            return "1"

        def search_runs(self, experiment_ids, filter_string="", run_view_type=1, max_results=1000):
            (_, number, _) = filter_string.split("'")
            return [SimpleNamespace(info=SimpleNamespace(run_id=key)) for key in runs if key == number]

        def create_run(self, experiment_id, start_time=None, tags=None, run_name=None) -> Any:
            runs[tags["attar.run"]] = FakeRun(run_name, {}, tags["attar.group"])
            return SimpleNamespace(info=SimpleNamespace(run_id=tags["attar.run"]))

        def update_run(self, run_id, status=None, name=None) -> None:
            assert status == "RUNNING"
            runs[run_id].starts += 1

        def log_batch(self, run_id, metrics=(), params=(), tags=(), synchronous=None) -> None:
            assert len(metrics) <= 1000 and len(params) <= 100
            runs[run_id].settings |= {param.key: param.value for param in params}
            if metrics:
                runs[run_id].rows.append((metrics[0].step, {metric.key: metric.value for metric in metrics}))

        def set_terminated(self, run_id, status=None, end_time=None) -> None:
            runs[run_id].state = status

    return {
        "mlflow": module("mlflow"),
        "mlflow.tracking": module("mlflow.tracking", MlflowClient=MlflowClient),
        "mlflow.entities": module("mlflow.entities", Metric=Metric, Param=Param),
    }


def fake_wandb(runs: dict[str, FakeRun]) -> dict[str, ModuleType]:
    """wandb: init, Settings; a run's log, define_metric, summary and finish."""

    class Settings:
        def __init__(self, login_timeout: float | None = None) -> None:
            pass

    class Run:
        def __init__(self, run: FakeRun) -> None:
            self.run, self.summary = run, run.summary

        def define_metric(self, name, step_metric=None, step_sync=None, hidden=None, summary=None) -> None:
            assert (name, step_metric) == ("*", "step")

        def log(self, data, step=None, commit=None) -> None:
            self.run.rows.append((data["step"], {key: data[key] for key in data if key != "step"}))

        def finish(self, exit_code=None, quiet=None) -> None:
            self.run.state = "finished" if exit_code == 0 else "failed"

    def init(
        entity=None,
        project=None,
        dir=None,
        id=None,
        name=None,
        notes=None,
        tags=None,
        config=None,
        group=None,
        job_type=None,
        mode=None,
        resume=None,
        settings=None,
    ) -> Run:
        if id in runs:
            assert resume == "allow"
            runs[id].starts += 1
        else:
            runs[id] = FakeRun(name, config, group)
        return Run(runs[id])

    return {"wandb": module("wandb", init=init, Settings=Settings)}


def fake_trackio(runs: dict[str, FakeRun]) -> dict[str, ModuleType]:
    """trackio: init, a run's log and finish; a run is resumed by its name."""

    class Run:
        def __init__(self, run: FakeRun) -> None:
            self.run = run

        def log(self, metrics: dict, step: int | None = None) -> None:
            self.run.rows.append((step or 0, metrics))

        def finish(self) -> None:
            self.run.state = "finished"

    def init(
        project: str,
        name: str | None = None,
        group: str | None = None,
        space_id: str | None = None,
        config: dict | None = None,
        resume: str = "never",
        private: bool | None = None,
        embed: bool = True,
    ) -> Run:
        print("* Trackio project initialized")  # on stdout, as the real one
        key = name.split()[-1]
        if key in runs and resume == "allow":
            runs[key].starts += 1
        else:
            runs[key] = FakeRun(name, config, group)
        return Run(runs[key])

    return {"trackio": module("trackio", init=init)}


FAKES = {"mlflow": fake_mlflow, "wandb": fake_wandb, "trackio": fake_trackio}


def install(name: str, monkeypatch: Any) -> dict[str, FakeRun]:
    """Put a stand-in in a tracker's place; the runs that it will be told of, by their ids."""
    runs: dict[str, FakeRun] = {}
    for key, fake in FAKES[name](runs).items():
        monkeypatch.setitem(sys.modules, key, fake)
    return runs
