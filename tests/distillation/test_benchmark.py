"""benchmarks/drafting.py, from flags to its table: what runs, for how long, and what it does not do twice."""

import json
import shlex
import sys
from pathlib import Path

import pytest

from attar.distillation.rollouts import teacher as rollouts
from tests import tiny_models

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
if BENCHMARKS not in sys.path:
    sys.path.append(BENCHMARKS)

import drafting  # noqa: E402

FLAGS = shlex.split("--steps 4 --num-rollouts 4 --sequence-length 24 --batch-size 2 --layers 1 --seeds 0 1")


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rollouts, "HELD_OUT_TOKENS", 64)
    monkeypatch.setattr(rollouts.RolloutWriter, "prompt", 4)
    monkeypatch.setattr(drafting.torch, "set_num_threads", lambda count: None)  # other tests want theirs
    teacher = str(tiny_models.save(tiny_models.build("llama3"), tmp_path / "teacher"))
    data = str(Path(json.__file__).parent)

    def call(*more):
        words = ["drafting.py", str(tmp_path / "work"), "--teacher", teacher, "--data", data, *FLAGS, *more]
        monkeypatch.setattr(sys, "argv", words)
        drafting.main()
        return capsys.readouterr().out

    return call


@pytest.mark.slow
def test_a_table_of_all_that_ran(run, tmp_path):
    text = run("--methods", "plain", "kl", "longer")
    rows = {line.split()[0]: line.split() for line in text.splitlines()[-3:]}
    assert list(rows) == ["plain", "kl", "longer"] and rows["plain"][1] == "4"
    for name in rows:
        results = [json.loads((tmp_path / f"work/{name}-{seed}.json").read_text()) for seed in (0, 1)]
        assert all(item["tokens"] > 0 and 0 < item["acceptance"] < 1 for item in results)
    again = run("--methods", "plain", "kl", "longer")
    assert again.splitlines()[-3:] and "acceptance 0." not in again.splitlines()[0]  # nothing was trained


@pytest.mark.slow
def test_the_longer_run_has_the_time_of_the_slowest_and_its_rows(run, tmp_path):
    run("--methods", "plain")
    arguments = drafting.parse()
    times = {"name": "kl", "seconds": 30.0, "writing": 10.0}
    (tmp_path / "work/kl-0.json").write_text(json.dumps(times))
    plain = {"name": "plain", "seconds": 8.0, "writing": 0.0}
    (tmp_path / "work/plain-0.json").write_text(json.dumps(plain))
    settings = drafting.settings_of("longer", 0, arguments)
    assert (settings.steps, settings.alpha, settings.teacher_share) == (20, 0.0, 0.0)


def test_cuts_are_listed_best_first_and_other_flags_are_refused(run):
    lines = run("--cuts", "2").splitlines()
    ways = {tuple(map(int, line.split()[0].split(","))) for line in lines}
    assert ways == {(0, 1), (0, 2), (1, 2)}
    values = [float(line.split()[1]) for line in lines]
    assert values == sorted(values, reverse=True)
    with pytest.raises(SystemExit, match="holds runs of other flags"):
        run("--cuts", "2", "--teacher-generated", "0.9")
