"""Multiple choice: against a slow loop in plain torch, over odd rows, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from attar.errors import DataError
from attar.measure.multiple_choice import encode_pair, log_likelihoods, measure_task, read_questions
from attar.measure.subject import Subject, load_subject
from tests import tiny_models

ROWS: list[dict[str, Any]] = [
    {"q": "def add(a, b): what?", "choices": ["return a + b", "pass", "yes"], "label": 0},
    {"q": "Which is größer, 1 or 2?", "choices": ["zwei ✓ 🙂", "1"], "label": 1},
    {"q": "A long one. " * 30, "choices": ["x", "a longer answer", "no", "maybe", "é"], "label": "C"},
    {"q": "spaces  ", "choices": [" lead", "trail ", "both"], "label": 2},
    {"q": "tie", "choices": ["same", "same"], "label": 1},
]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    return tiny_models.save(tiny_models.build("llama3"), tmp_path_factory.mktemp("choices") / "model")


@pytest.fixture(scope="module")
def exact(folder: Path) -> Subject:
    return load_subject(folder)


def slow(subject: Subject, row: dict[str, Any]) -> tuple[list[float], list[float], list[bool]]:
    """Sums of log-probabilities one choice, one token at a time; the same over characters; greedy or not."""
    sums, normed, greedy = [], [], []
    for choice in row["choices"]:
        context = f"Question: {row['q']}\nAnswer:"
        whole = subject.tokenizer(f"{context} {choice}")["input_ids"]
        start = len(subject.tokenizer(context)["input_ids"])
        total, likeliest = 0.0, True
        for index in range(start, len(whole)):
            cut = max(0, len(whole) - 1 - 128)  # the window of the last token is that of all
            with torch.no_grad():
                row_logits = subject.model(torch.tensor([whole[cut:index]])).logits[0, -1]
            total += float(row_logits.double().log_softmax(-1)[whole[index]])
            likeliest &= int(row_logits.argmax()) == whole[index]
        sums.append(total)
        normed.append(total / len(choice))
        greedy.append(likeliest)
    return sums, normed, greedy


@pytest.mark.few(1)
@pytest.mark.parametrize("runner", ["transformers", "modules"])
def test_scores_are_those_of_a_slow_loop(folder: Path, exact: Subject, tmp_path: Path, runner: str) -> None:
    subject = load_subject(folder, runner=runner, dtype="float32")
    file = write(tmp_path / "some.jsonl", ROWS)
    questions = read_questions(file)
    wanted = [slow(exact, row) for row in ROWS]
    pairs = [
        encode_pair(subject.tokenizer, f"Question: {question.text}\nAnswer:", f" {choice}")
        for question in questions
        for choice in question.choices
    ]
    assert any(len(a) + len(b) > 129 for a, b in pairs), "one row is longer than the context"
    actual = log_likelihoods(subject, pairs)
    sums = [total for row in wanted for total in row[0]]
    assert [total for total, _ in actual] == pytest.approx(sums, abs=1e-3)
    assert [greedy for _, greedy in actual] == [question for row in wanted for question in row[2]]
    task = measure_task(subject, file, questions)
    labels = [0, 1, 2, 2, 1]
    acc = [row[0].index(max(row[0])) == label for row, label in zip(wanted, labels, strict=True)]
    norm = [row[1].index(max(row[1])) == label for row, label in zip(wanted, labels, strict=True)]
    assert (task.name, task.questions) == ("some", 5)
    assert task.acc == pytest.approx(sum(acc) / 5)
    assert task.acc_norm == pytest.approx(sum(norm) / 5)
    p = task.acc
    assert task.acc_stderr == pytest.approx((p * (1 - p) / 4) ** 0.5)  # sample variance over n


def test_characters_decide_acc_norm(exact: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """-6 over 2 characters is worse than -8 over 10."""
    file = write(tmp_path / "t.jsonl", [{"q": "q", "choices": ["no", "0123456789"], "label": 1}])
    monkeypatch.setattr(
        "attar.measure.multiple_choice.log_likelihoods", lambda *_, **__: [(-6.0, False), (-8.0, False)]
    )
    task = measure_task(exact, file, read_questions(file))
    assert (task.acc, task.acc_norm, task.acc_stderr) == (0.0, 1.0, None)


def test_spaces_of_the_context_go_over(exact: Subject) -> None:
    one, other = encode_pair(exact.tokenizer, "ab  ", "c"), encode_pair(exact.tokenizer, "ab", "  c")
    assert one == other
    assert exact.tokenizer.decode(one[1]).endswith("c")


def test_limit_takes_the_first(tmp_path: Path) -> None:
    file = write(tmp_path / "t.jsonl", ROWS)
    assert [read_question.where for read_question in read_questions(file, 2)] == [f"{file}:1", f"{file}:2"]
    assert len(read_questions(file, 99)) == 5
    assert [read_question.label for read_question in read_questions(file)] == [0, 1, 2, 2, 1]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{", "not JSON"),
        ("[1]", "a list, not an object"),
        ('{"choices": ["a", "b"], "label": 0}', "'q' must be"),
        ('{"q": " ", "choices": ["a", "b"], "label": 0}', "'q' must be"),
        ('{"q": "a", "choices": ["a"], "label": 0}', "'choices' must be"),
        ('{"q": "a", "choices": ["a", ""], "label": 0}', "'choices' must be"),
        ('{"q": "a", "choices": "ab", "label": 0}', "'choices' must be"),
        ('{"q": "a", "choices": ["a", "b"], "label": 2}', "'label' is 2"),
        ('{"q": "a", "choices": ["a", "b"], "label": -1}', "'label' is -1"),
        ('{"q": "a", "choices": ["a", "b"], "label": "C"}', "'label' is"),
        ('{"q": "a", "choices": ["a", "b"], "label": true}', "'label' is True"),
        ('{"q": "a", "choices": ["a", "b"]}', "'label' is None"),
    ],
)
def test_a_bad_row_is_one_line_with_its_place(tmp_path: Path, line: str, expected: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(json.dumps(ROWS[0]) + "\n\n" + line + "\n")
    with pytest.raises(DataError, match=expected) as caught:
        read_questions(file)
    assert caught.value.message.startswith(f"{file}:3: ")
    assert "\n" not in caught.value.message


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_questions(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match="no questions"):
        read_questions(tmp_path / "empty.jsonl")


def test_a_choice_longer_than_the_context_names_its_row(exact: Subject, tmp_path: Path) -> None:
    file = write(tmp_path / "t.jsonl", [ROWS[0], {"q": "a", "choices": ["b", "c d " * 200], "label": 0}])
    with pytest.raises(DataError, match=r"choice 1 has .* tokens, but the context of model is 128") as caught:
        measure_task(exact, file, read_questions(file))
    assert caught.value.message.startswith(f"{file}:2: ")
