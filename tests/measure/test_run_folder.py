"""Reading ``run.json``: what is there, what is absent, and what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from attar.errors import DataError
from attar.measure.run_folder import RunRecord, read_run, run_from_dict


def test_reads_a_run(run_folder: Path) -> None:
    run = read_run(run_folder)
    assert [stage.name for stage in run.stages] == [
        "original", "distill", "heads", "neurons", "recover", "rtn", "quantize",
    ]  # fmt: skip
    assert run.original.verb == "original"
    assert run.last.name == "quantize"
    parent = run.parent(run.stages[4])
    assert parent is not None and parent.name == "neurons", "the first parent gave the weights"
    assert [child.name for child in run.children(run.stages[4])] == ["rtn", "quantize"]
    assert run.times_smaller(run.last) == pytest.approx(14.68 / 1.83, rel=1e-3)


def test_what_was_not_measured_stays_absent() -> None:
    run = run_from_dict(
        {"stages": [{"name": "a", "bytes": 10, "measurements": None}, {"name": "b", "parents": ["gone"]}]}
    )
    first, second = run.stages
    assert first.number("bytes") == 10
    assert second.number("bytes") is None
    assert run.times_smaller(second) is None
    assert run.parent(second) is None
    assert run.last is second, "nothing was measured, so the last stage stands for the run"
    assert first.rows("curve") == []


def test_numbers_are_numbers() -> None:
    values = {"a": True, "b": "3", "c": float("nan"), "d": 2}
    stage = run_from_dict({"stages": [{"name": "x", "measurements": values}]}).stages[0]
    assert [stage.number(key) for key in "abcd"] == [None, None, None, 2.0]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "does not exist"),
        ("{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        ("[]", "is not a run"),
        ("{}", "'stages' must be"),
        ('{"stages": []}', "'stages' must be"),
        ('{"stages": [3]}', "stage 0 has no 'name'"),
        ('{"stages": [{"name": "a", "parents": "b"}]}', "'parents' of stage 'a'"),
    ],
)
def test_damage_is_one_line_that_names_the_file(tmp_path: Path, content: Any, sentence: str) -> None:
    if content is not None:
        (tmp_path / "run.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError) as caught:
        read_run(tmp_path)
    assert str(tmp_path / "run.json") in caught.value.message
    assert sentence in caught.value.message
    assert "\n" not in caught.value.message


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="does not exist"):
        read_run(tmp_path / "file")


def test_round_trip_keeps_the_run(run: RunRecord, run_folder: Path) -> None:
    assert run.stages == read_run(run_folder).stages
    assert json.loads((run_folder / "run.json").read_text())["finished"] is True
