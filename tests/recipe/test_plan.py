"""The plan: keys, states, estimates, and that showing it imports nothing heavy."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attar.checkpoint.open import open_checkpoint
from attar.checkpoint.units import range_text
from attar.recipe.plan import CHANGED, DONE, HALF, NEW, RecipePlan, make_plan
from attar.recipe.schema import Recipe
from attar.recipe.show import plan_dict, plan_text


@pytest.fixture
def plan(recipe: Callable[..., Recipe], model: Path, tmp_path: Path) -> Callable[..., RecipePlan]:
    """The plan of the recipe in ``tmp_path / "run"``."""

    def make(*overrides: str, fresh: bool = False) -> RecipePlan:
        return make_plan(recipe(*overrides), tmp_path / "run", open_checkpoint(model), fresh=fresh)

    return make


def states(plan: RecipePlan) -> list[str]:
    """State of every step."""
    return [step.state for step in plan.steps]


def keys(plan: RecipePlan) -> list[str]:
    """Key of every step."""
    return [step.key for step in plan.steps]


def test_nothing_is_written(plan: Callable[..., RecipePlan], tmp_path: Path) -> None:
    assert states(plan()) == [NEW] * 4
    assert not (tmp_path / "run").exists()


def test_keys_follow_the_chain(
    plan: Callable[..., RecipePlan], fakes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = keys(plan())
    assert keys(plan()) == base and len(set(base)) == 4

    def changed(*overrides: str) -> list[bool]:
        return [here != there for here, there in zip(keys(plan(*overrides)), base, strict=True)]

    assert changed("stages.0.amount=9") == [True, True, True, True]
    assert changed("stages.1.amount=9") == [False, True, True, False]
    assert changed("stages.3.amount=9") == [False, False, False, True]
    assert changed("stages.2.teacher=prune") == [False, False, True, False]
    assert changed("seed=1") == [True] * 4
    assert changed("evaluate=false") == [False] * 4
    assert changed("stages.side.name=other") == [False] * 4  # a name is no part of the work
    monkeypatch.setattr(fakes, "VERSION", 2)
    assert changed() == [True] * 4


def test_states(plan: Callable[..., RecipePlan], run: Callable[..., Any], fakes: Any) -> None:
    fakes.FAULTS["03-recover"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        run()
    assert states(plan()) == [DONE, DONE, HALF, NEW]
    assert states(plan("stages.2.amount=9")) == [DONE, DONE, NEW, NEW]  # other work does not go on with this
    run()
    assert states(plan()) == [DONE] * 4
    assert states(plan("stages.1.amount=9")) == [DONE, CHANGED, CHANGED, DONE]
    assert states(plan(fresh=True)) == [NEW] * 4


def test_the_text_and_the_dict(
    plan: Callable[..., RecipePlan], run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    before = plan()
    text = plan_text(before)
    lines = text.splitlines()
    assert lines[2].startswith("0  original")
    assert "prune amount 2, steps 2" in lines[4] and "new" in lines[4]
    assert "prune-2, taught by original" in lines[5]
    assert lines[-1].startswith("About ")
    content = plan_dict(before)
    json.dumps(content)
    assert [entry["state"] for entry in content["stages"]] == [NEW] * 4
    assert content["seconds"] > 0 and content["stages"][0]["disk_bytes"] > 0
    run()
    assert plan_text(plan()).splitlines()[-1].startswith("Everything is done in ")


def test_the_table_fits_the_terminal(
    plan: Callable[..., RecipePlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = plan("stages.1.names=" + str([f"name-{n}" for n in range(30)]))
    monkeypatch.setenv("COLUMNS", "90")
    lines = plan_text(result).splitlines()[:-1]
    assert max(map(len, lines)) <= 90
    assert all(entry.entry.name in text for entry, text in zip(result.steps, lines[3:], strict=True))


def test_other_work_on_the_machine_is_told(
    plan: Callable[..., RecipePlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "load" not in plan_text(plan())
    monkeypatch.setattr("attar.recipe.show.free_share", lambda wanted: 0.3)
    monkeypatch.setattr("attar.recipe.show.load", lambda: 6.25)
    assert plan_text(plan()).endswith("(load 6.2), which the times count.")


def test_a_full_disk_is_foreseen(plan: Callable[..., RecipePlan], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attar.recipe.show.free_bytes", lambda path: 10)
    assert plan_text(plan()).splitlines()[-1] == "Warning: only 10 B are free there."


def rewrite(receipt: Path, **changes: object) -> None:
    receipt.write_text(json.dumps(json.loads(receipt.read_text()) | changes))


def test_earlier_work_tells_the_speed(
    plan: Callable[..., RecipePlan], run: Callable[..., Any], tmp_path: Path
) -> None:
    changed = ("stages.1.amount=5", "stages.0.amount=5")
    first = plan(*changed)
    assert first.steps[0].time.most == pytest.approx(4 * first.steps[0].time.least), "known within a factor 2"
    run()
    before = plan(*changed)
    for name in ("01-prune", "02-prune-2", "04-side"):
        rewrite(tmp_path / "run" / "receipts" / f"{name}.json", estimated=10.0, seconds=70.0)
    after = plan(*changed)
    time = after.steps[0].estimate.time
    assert time.plain == pytest.approx(before.steps[0].estimate.time.plain)
    assert time.seconds == pytest.approx(7 * time.plain)
    assert time.least == time.most == time.seconds, "stages of its kind were timed"


def test_runs_beside_it_tell_the_speed_of_stages_that_the_run_has_not_done(
    plan: Callable[..., RecipePlan], run: Callable[..., Any], tmp_path: Path
) -> None:
    run()
    for receipt in (tmp_path / "run" / "receipts").glob("*.json"):
        rewrite(receipt, estimated=10.0, seconds=30.0, evaluation_estimated=4.0, evaluation_seconds=20.0)
    (tmp_path / "run").rename(tmp_path / "earlier")
    step = plan().steps[0]
    assert step.estimate.time.seconds == pytest.approx(3 * step.estimate.time.plain)
    assert step.evaluation_time.seconds == pytest.approx(5 * step.evaluation_time.plain)
    assert step.time.least == step.time.most


@pytest.mark.few(1)
@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), -1.0, 0, 1e308])
def test_a_time_that_cannot_be_corrects_nothing(
    plan: Callable[..., RecipePlan], run: Callable[..., Any], tmp_path: Path, seconds: float
) -> None:
    run()
    for receipt in (tmp_path / "run" / "receipts").glob("*.json"):
        rewrite(receipt, estimated=10.0, seconds=seconds, evaluation_seconds=seconds)
    (tmp_path / "run").rename(tmp_path / "earlier")
    time = plan().time
    assert time.seconds == time.plain and "About" in plan_text(plan())


def test_an_unsure_plan_shows_a_range(plan: Callable[..., RecipePlan]) -> None:
    result = plan()
    low, high = plan_dict(result)["seconds_range"]
    assert low < result.time.seconds < high
    assert f"About {range_text(result.time.least, result.time.most)} and" in plan_text(result)


def test_a_receipt_of_before_is_still_believed(
    plan: Callable[..., RecipePlan], run: Callable[..., Any], tmp_path: Path
) -> None:
    """It had the operations of the work in place of the estimate."""
    run()
    path = tmp_path / "run" / "receipts" / "01-prune.json"
    content = json.loads(path.read_text())
    del content["estimated"]
    path.write_text(json.dumps(content | {"work": 1e9}))
    assert states(plan()) == [DONE] * 4


@pytest.mark.slow
def test_planning_imports_no_torch(tmp_path: Path, model: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"model: {model}\nstages: [{{stage: prune}}, {{stage: quantize}}]\n")
    program = (
        "import sys\nfrom attar.cli.main import call\n"
        f"code = call(['run', {str(recipe)!r}, '--dry-run', '-o', {str(tmp_path / 'out')!r}])\n"
        "heavy = {'torch', 'transformers', 'datasets', 'rich', 'matplotlib'} & set(sys.modules)\n"
        "print(code, heavy)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 set()"
    assert not (tmp_path / "out").exists()
