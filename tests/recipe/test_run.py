"""A run: what it writes, skips, does again, resumes, removes and refuses."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from attar.errors import DataError, NumericsError, OutputError, RecipeError, SettingsError
from attar.recipe.plan_history import read_records
from attar.recipe.run import run_recipe
from attar.recipe.runfolder import read_receipt
from attar.recipe.schema import load_recipe
from tests.recipe.recipe_fakes import TOOLS

FOLDERS = ["01-prune", "02-prune-2", "03-recover", "04-side"]


def weights(run_dir: Path) -> dict[str, str]:
    """Hash of the weights of every stage."""
    return {f: hashlib.sha256((run_dir / f / "model.safetensors").read_bytes()).hexdigest() for f in FOLDERS}


def stage_calls(fakes: Any) -> list[str]:
    """Folder of every stage that was called."""
    return [call.split()[1] for call in fakes.CALLS if call.split()[0] in ("add", "learn")]


def test_a_run_makes_every_checkpoint_and_measures_it(run: Any, fakes: Any, tmp_path: Path) -> None:
    result = run()
    assert fakes.CALLS == [
        "reference base",
        "evaluate base",
        "add 01-prune from step 0",
        "evaluate 01-prune",
        "add 02-prune-2 from step 0",
        "evaluate 02-prune-2",
        "learn 03-recover from step 0",
        "evaluate 03-recover",
        "add 04-side from step 0",
        "evaluate 04-side",
        "report",
    ]
    # 1 at the start; steps 2: +2, +4, +6; the branch starts from the first: 3 + 8
    means = [entry["measurements"]["perplexity"] for entry in result.content["stages"]]
    assert means == [1.0, 3.0, 7.0, 13.0, 11.0]
    tensors = load_file(tmp_path / "run" / "04-side" / "model.safetensors")
    assert all((value == 11.0).all() for value in tensors.values())


def test_run_json_says_what_was_done(run: Any, tmp_path: Path) -> None:
    run()
    content = json.loads((tmp_path / "run" / "run.json").read_text())
    assert content["finished"] is True
    assert [entry["name"] for entry in content["stages"]] == [
        "original",
        "prune",
        "prune-2",
        "recover",
        "side",
    ]
    recover = content["stages"][3]
    assert recover["stage"] == "recover"
    assert recover["parents"] == ["prune-2", "original"]
    assert recover["title"] == "amount 3, steps 2"
    assert recover["settings"]["amount"] == 3.0
    assert recover["details"] == {"note": "added 3.0"}
    assert recover["path"] == "03-recover"
    assert recover["seconds"] >= 0 and recover["peak_rss_bytes"] == 7 - 2
    assert recover["measurements"]["kl_p99"] is None  # infinity is no JSON
    assert content["stages"][4]["parents"] == ["prune"]
    assert content["machine"]["cores"] >= 1 and content["versions"]["python"]


def test_measurements_reach_the_card(run: Any, tmp_path: Path) -> None:
    run()
    card = json.loads((tmp_path / "run" / "01-prune" / "attar.json").read_text())
    assert card["measurements"]["perplexity"] == 3.0


@pytest.mark.slow
def test_the_resolved_recipe_runs_the_same(run: Any, fakes: Any, tmp_path: Path) -> None:
    run()
    fakes.CALLS.clear()
    again = load_recipe(tmp_path / "run" / "recipe.yaml")
    run_recipe(again, tmp_path / "run", tools=fakes.TOOLS)
    assert fakes.CALLS == ["report"]


def test_what_is_done_is_skipped(run: Any, fakes: Any, tmp_path: Path) -> None:
    first = run().content
    before = weights(tmp_path / "run")
    fakes.CALLS.clear()
    second = run().content
    assert fakes.CALLS == ["report"]
    assert second["stages"] == first["stages"]
    assert weights(tmp_path / "run") == before


def test_a_changed_setting_does_its_stage_and_those_after_it_again(
    run: Any, fakes: Any, tmp_path: Path
) -> None:
    run()
    fakes.CALLS.clear()
    result = run("stages.1.amount=5")
    assert stage_calls(fakes) == ["02-prune-2", "03-recover"]  # the branch hangs on the first stage
    assert [entry["measurements"]["perplexity"] for entry in result.content["stages"]] == [
        1.0,
        3.0,
        13.0,
        19.0,
        11.0,
    ]


def test_edited_text_is_noticed(run: Any, fakes: Any, tmp_path: Path) -> None:
    run()
    fakes.CALLS.clear()
    (tmp_path / "text.txt").write_text("another text")
    run()
    assert stage_calls(fakes) == FOLDERS


def test_a_changed_evaluation_measures_again_and_makes_nothing(run: Any, fakes: Any) -> None:
    run()
    fakes.CALLS.clear()
    run("evaluate.tokens=128")
    assert stage_calls(fakes) == []
    assert [call for call in fakes.CALLS if call.startswith("evaluate")] == [
        "evaluate base", *(f"evaluate {folder}" for folder in FOLDERS)
    ]  # fmt: skip


def test_no_evaluation(run: Any, fakes: Any) -> None:
    result = run("evaluate=false")
    assert not [call for call in fakes.CALLS if call.startswith(("evaluate", "reference"))]
    assert all(entry["measurements"] == {} for entry in result.content["stages"])
    assert result.content["stages"][1]["bytes"] > 0


@pytest.mark.few(1)
@pytest.mark.parametrize("damage", ["remove", "truncate", "remove the card"])
def test_a_damaged_checkpoint_is_made_again(run: Any, fakes: Any, tmp_path: Path, damage: str) -> None:
    run()
    before = weights(tmp_path / "run")
    fakes.CALLS.clear()
    folder = tmp_path / "run" / "02-prune-2"
    if damage == "remove":
        shutil.rmtree(folder)
    elif damage == "truncate":
        (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-8])
    else:
        (folder / "attar.json").unlink()
    run()
    assert stage_calls(fakes) == ["02-prune-2"]  # its children have the same key still
    assert weights(tmp_path / "run") == before


def test_an_interrupted_stage_goes_on(run: Any, fakes: Any, tmp_path: Path) -> None:
    run("stages.recover.steps=5")
    undisturbed = weights(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    fakes.FAULTS["03-recover"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        run("stages.recover.steps=5")
    content = json.loads((tmp_path / "run" / "run.json").read_text())
    assert content["finished"] is False and len(content["stages"]) == 3
    fakes.CALLS.clear()
    run("stages.recover.steps=5")
    assert [call for call in fakes.CALLS if not call.startswith("evaluate")] == [
        "learn 03-recover from step 1", "reference base", "add 04-side from step 0", "report",
    ]  # fmt: skip
    assert weights(tmp_path / "run") == undisturbed


def test_the_time_of_all_attempts_is_kept(run: Any, fakes: Any, tmp_path: Path) -> None:
    fakes.FAULTS["01-prune"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        run()
    first = read_receipt(tmp_path / "run", "01-prune")
    assert first is not None and not first.finished and first.seconds > 0
    run()
    second = read_receipt(tmp_path / "run", "01-prune")
    assert second is not None and second.finished and second.seconds > first.seconds


def test_an_interrupted_evaluation_is_done_again_as_a_whole(run: Any, fakes: Any) -> None:
    fakes.FAULTS["evaluate 02-prune-2"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        run()
    fakes.CALLS.clear()
    run()
    assert fakes.CALLS[:2] == ["reference base", "evaluate 02-prune-2"]
    assert stage_calls(fakes) == ["03-recover", "04-side"]


def test_killed_between_the_checkpoint_and_its_receipt(run: Any, fakes: Any, tmp_path: Path) -> None:
    run()
    fakes.CALLS.clear()
    (tmp_path / "run" / "receipts" / "02-prune-2.json").unlink()
    run()
    assert stage_calls(fakes) == []
    assert "evaluate 02-prune-2" in fakes.CALLS
    receipt = read_receipt(tmp_path / "run", "02-prune-2")
    assert receipt is not None and receipt.finished


@pytest.mark.slow
def test_a_receipt_that_cannot_be_read_counts_as_none(run: Any, fakes: Any, tmp_path: Path) -> None:
    run()
    (tmp_path / "run" / "receipts" / "01-prune.json").write_text("{")
    (tmp_path / "run" / "01-prune" / "attar.json").unlink()
    fakes.CALLS.clear()
    run()
    assert stage_calls(fakes) == ["01-prune"]


def test_fresh_starts_over_and_touches_only_its_own(run: Any, fakes: Any, tmp_path: Path) -> None:
    run()
    out = tmp_path / "run"
    (out / "notes.txt").write_text("mine")
    (out / "05-mine").mkdir()
    (out / "05-mine" / "file").write_text("mine")
    fakes.CALLS.clear()
    run(fresh=True)
    assert stage_calls(fakes) == FOLDERS
    assert (out / "notes.txt").read_text() == "mine"
    assert (out / "05-mine" / "file").read_text() == "mine"


@pytest.mark.slow
def test_fresh_removes_stages_of_an_earlier_recipe(run: Any, fakes: Any, tmp_path: Path) -> None:
    run()
    run("stages.side.name=other", fresh=True)
    assert (tmp_path / "run" / "04-other").is_dir()
    assert not (tmp_path / "run" / "04-side").exists()


def test_a_stranger_in_the_place_of_a_stage(run: Any, fakes: Any, tmp_path: Path) -> None:
    run()
    fakes.make_model(tmp_path / "run" / "04-other")
    with pytest.raises(OutputError, match="04-other: exists, but this run did not make it"):
        run("stages.side.name=other")
    assert (tmp_path / "run" / "04-other" / "config.json").exists()


def test_a_folder_that_is_not_a_run(run: Any, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text("mine")
    for fresh in (False, True):
        with pytest.raises(OutputError, match="is not the folder of a run"):
            run(fresh=fresh)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["recipe.yaml"]
    assert (tmp_path / "run" / "recipe.yaml").read_text() == "mine"


def test_a_file_in_the_place_of_the_run(run: Any, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    with pytest.raises(OutputError, match="is not a folder"):
        run()


@pytest.mark.slow
def test_the_run_of_another_model(run: Any, fakes: Any, tmp_path: Path) -> None:
    run()
    other = fakes.make_model(tmp_path / "other", 2.0)
    with pytest.raises(OutputError, match="holds a run of another model") as caught:
        run(f"model={other}")
    assert "--fresh" in str(caught.value.hint)
    result = run(f"model={other}", fresh=True)
    assert result.content["stages"][1]["measurements"]["perplexity"] == 4.0


@pytest.mark.slow
def test_the_same_model_with_other_weights_runs_again(run: Any, fakes: Any, model: Path) -> None:
    run()
    shutil.rmtree(model)
    fakes.make_model(model, 5.0)
    fakes.CALLS.clear()
    result = run()
    assert stage_calls(fakes) == FOLDERS
    assert result.content["stages"][0]["measurements"]["perplexity"] == 5.0


@pytest.mark.parametrize("fault", [NumericsError("tensor 'x' holds NaN"), DataError("empty")])
def test_a_failure_in_a_new_run_leaves_nothing_behind(
    run: Any, fakes: Any, tmp_path: Path, fault: Exception
) -> None:
    fakes.FAULTS["evaluate base"] = fault
    with pytest.raises(type(fault)):
        run()
    assert not (tmp_path / "run").exists()


def test_a_missing_model_leaves_nothing_behind(run: Any, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="no such model folder"):
        run(f"model={tmp_path}/nowhere")
    assert not (tmp_path / "run").exists()


def test_a_failure_keeps_what_was_finished(run: Any, fakes: Any, tmp_path: Path) -> None:
    fakes.FAULTS["02-prune-2"] = NumericsError("NaN")
    with pytest.raises(NumericsError):
        run()
    fakes.CALLS.clear()
    run()
    assert stage_calls(fakes) == FOLDERS[1:]


def test_a_setting_that_does_not_fit_the_model_names_the_line(run: Any) -> None:
    with pytest.raises(
        RecipeError, match=r"recipe.yaml:6: amount is 13.0, but must be a number that this model"
    ):
        run("stages.1.amount=13")


def test_an_evaluation_that_does_not_fit_the_model_names_the_recipe(run: Any, fakes: Any) -> None:
    fakes.FAULTS["evaluate base"] = SettingsError("tokens", 64, "at most 32")
    with pytest.raises(RecipeError, match=r"recipe.yaml: in evaluate, tokens is 64, but must be at most 32"):
        run()


def test_a_large_reference_is_let_go_before_a_stage(
    run: Any, fakes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fakes.FakeReference, "kept", False)
    monkeypatch.setattr(fakes.FakeReference, "__init__", lambda self: None)
    run()
    assert fakes.CALLS.count("reference base") == 5


def crash_at(count: int, action: Any) -> bool:
    """Do something in a forked child that dies, uncleaned, at its n-th fsync; True where it did."""
    child = os.fork()
    if child == 0:
        left = iter(range(count - 1, -1, -1))
        os.fsync = lambda descriptor: next(left) or os._exit(9)  # type: ignore[assignment, func-returns-value]
        action()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


@pytest.mark.slow
def test_a_crash_anywhere_ends_in_the_same_bytes(run: Any, tmp_path: Path) -> None:
    """fsync is called before and after every rename, so this dies on both sides of each."""
    run()
    undisturbed = weights(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    count = 1
    while crash_at(count, run):
        run()
        assert weights(tmp_path / "run") == undisturbed, count
        content = json.loads((tmp_path / "run" / "run.json").read_text())
        assert content["finished"] and len(content["stages"]) == 5
        assert all(entry["measurements"] for entry in content["stages"])
        left = [path.name for path in (tmp_path / "run").rglob(".*") if path.name != ".lock"]
        assert left == [], count
        shutil.rmtree(tmp_path / "run")
        count += 5
    assert count > 60


def test_a_plan_is_measured_beside_what_it_predicted(
    recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTAR_CACHE", str(tmp_path / "history"))
    predicted = {"kl": 0.4, "kl_low": 0.3, "kl_high": 0.6, "bytes": 1, "loss": 0.5}
    plan = replace(recipe(), predicted=predicted)
    for _ in range(2):  # a run that is called again adds nothing
        result = run_recipe(plan, tmp_path / "run", tools=TOOLS)
    files = (tmp_path / "run" / "04-side" / "model.safetensors").stat().st_size
    written = load_recipe(tmp_path / "run" / "recipe.yaml")
    assert written.predicted == predicted
    assert written.measured == {"bytes": files, "kl": 0.5}
    assert result.outcome().startswith(
        "predicted KL 0.4 (0.3 to 0.6), measured 0.5: inside; predicted 1 bytes"
    )
    (record,) = read_records()
    assert (record.predicted, record.measured, record.inside) == (predicted, dict(written.measured), True)
    assert (tmp_path / "history" / "plans.jsonl").read_text().count("\n") == 1
