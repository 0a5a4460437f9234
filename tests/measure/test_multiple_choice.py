"""Multiple choice: against a slow loop in plain torch, over odd rows, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attar.errors import DataError
from attar.measure.evaluate import evaluate
from attar.measure.multiple_choice import (
    TaskAnswers,
    answer_task,
    encode_pair,
    log_likelihoods,
    read_questions,
    task_score,
)
from attar.measure.reference import make_reference
from attar.measure.settings import EvaluateSettings
from attar.measure.subject import Subject, load_subject
from tests import tiny_models
from tests.measure.measure_models import llama, words

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
    task = task_score(file, answer_task(subject, questions))
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
    task = task_score(file, answer_task(exact, read_questions(file)))
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
        task_score(file, answer_task(exact, read_questions(file)))
    assert caught.value.message.startswith(f"{file}:2: ")


def test_a_difference_has_the_error_of_its_pairs() -> None:
    """Ten questions, of which three changed: against the sample deviation of the changes."""
    ours = TaskAnswers((1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0), (1.0,) * 10)
    theirs = TaskAnswers((1.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0), (1.0,) * 10)
    task = task_score("arc.jsonl", ours, theirs)
    assert (task.name, task.acc, task.acc_lost, task.acc_won) == ("arc", 0.6, 0.2, 0.1)
    assert task.acc_difference == pytest.approx(-0.1)
    assert task.acc_difference_stderr == pytest.approx(((3 - 10 * 0.01) / 9 / 10) ** 0.5)
    assert (task.acc_norm_difference, task.acc_norm_difference_stderr, task.acc_norm_lost) == (0.0, 0.0, 0.0)
    assert task_score("arc.jsonl", ours).acc_difference is None
    assert task_score("one.jsonl", TaskAnswers((1.0,), (1.0,)), TaskAnswers((0.0,), (1.0,))).acc_won == 1.0


def test_an_evaluation_pairs_its_answers_with_the_reference_s(tmp_path: Path, subject: Subject) -> None:
    file = write(
        tmp_path / "some.jsonl",
        [{"q": f"w{n}", "choices": ["w1", "w2 w3"], "label": n % 2} for n in range(8)],
    )
    text = tmp_path / "text.txt"
    text.write_text("w1 w2 w3 w4 " * 500)
    settings = EvaluateSettings(
        data=str(text), tokens=32, sequence_length=16, tasks=(str(file),), speed=False, sample=""
    )
    reference = make_reference(subject, settings)
    other = Subject(llama(5), words(), None, "other")
    task = evaluate(other, settings, reference=reference).tasks[0]
    right, before = (answer_task(model, read_questions(file)).acc for model in (other, subject))
    assert task.acc_lost == sum(b > a for a, b in zip(right, before, strict=True)) / 8
    assert task.acc_won == sum(a > b for a, b in zip(right, before, strict=True)) / 8
    assert task.acc_difference == pytest.approx(task.acc_won - task.acc_lost) and task.acc_lost + task.acc_won
    fewer = evaluate(other, replace(settings, tasks_limit=4), reference=reference).tasks[0]
    assert fewer.questions == 4 and fewer.acc_difference is None
