"""Prompt sets are the same each time and are what they say; Spec-Bench's lines are read or refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attar.errors import DataError, SettingsError
from attar.measure.speculation.prompts import (
    LENGTH,
    SETS,
    SpecBenchQuestion,
    prompt_sets,
    question_sets,
    read_questions,
)
from attar.runtime.speculate.settings import SETS as NAMES


@pytest.fixture(scope="module")
def sets_of_prompts() -> dict[str, list[str]]:
    return prompt_sets(NAMES, 3)


def test_the_settings_name_every_set() -> None:
    assert tuple(SETS) == NAMES


@pytest.mark.slow
def test_the_same_prompts_each_time_and_others_with_another_seed(
    sets_of_prompts: dict[str, list[str]],
) -> None:
    assert prompt_sets(("json", "code"), 3) == {name: sets_of_prompts[name] for name in ("json", "code")}
    assert prompt_sets(("code",), 3, seed=1)["code"] != sets_of_prompts["code"]
    for prompts in sets_of_prompts.values():
        assert len(set(prompts)) == 3 and all(0 < len(prompt) <= 2 * LENGTH for prompt in prompts)


def test_sets_are_what_they_say(sets_of_prompts: dict[str, list[str]]) -> None:
    assert all(prompt.endswith("\n") for prompt in sets_of_prompts["code"])
    assert all(prompt.endswith(" ") for prompt in sets_of_prompts["prose"])
    for prompt in sets_of_prompts["json"]:
        first = prompt[prompt.index("{") : prompt.index("},\n  {") + 1]
        assert set(json.loads(first)) == {"id", "name", "tags", "size", "active"}
    for prompt in sets_of_prompts["repetition"]:
        size = next(size for size in range(len(prompt)) if 2 * size + size // 3 == len(prompt))
        assert prompt[:size] == prompt[size : 2 * size] and prompt.startswith(prompt[2 * size :])
    grams = [
        sets_of_prompts["random"][0][index : index + 3]
        for index in range(len(sets_of_prompts["random"][0]) - 2)
    ]
    assert len(set(grams)) > 0.98 * len(grams)


def test_an_unknown_set_is_refused() -> None:
    with pytest.raises(SettingsError, match="poems"):
        prompt_sets(("poems",), 1)


def test_questions_of_spec_bench(tmp_path: Path) -> None:
    file = tmp_path / "question.jsonl"
    lines = [
        {"question_id": 81, "category": "writing", "turns": ["Compose.", "Rewrite."]},
        {"question_id": "x", "category": "qa", "turns": ["Who?"], "reference": ["nobody"]},
        {"question_id": 82, "category": "writing", "turns": ["Draft."]},
    ]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    actual = read_questions(file)
    assert actual[0] == SpecBenchQuestion(81, "writing", ("Compose.", "Rewrite.")) and len(actual) == 3
    assert question_sets(actual, 1) == {"writing": ["Compose."], "qa": ["Who?"]}
    assert question_sets(actual, 2)["writing"] == ["Compose.", "Draft."]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "not a JSON object"),
        ('{"question_id": 1, "category": "a"}', "turns"),
        ('{"question_id": 1, "category": "a", "turns": []}', "turns"),
        ('{"question_id": 1, "category": "a", "turns": [""]}', "turns"),
        ('{"question_id": 1, "category": 2, "turns": ["a"]}', "category"),
        ('{"question_id": true, "category": "a", "turns": ["a"]}', "question_id"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text('{"question_id": 1, "category": "a", "turns": ["a"]}\n' + line)
    with pytest.raises(DataError, match=f"q.jsonl:2: .*{message}"):
        read_questions(file)


def test_files_that_are_missing_or_empty(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_questions(tmp_path / "none")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(DataError, match="no questions"):
        read_questions(tmp_path / "empty")
