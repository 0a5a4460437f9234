"""Recall: what the cases are, for any tokenizer, and that chance is a tenth."""

import pytest
import torch

import attar
from attar.errors import DataError, SettingsError
from attar.measure import recall
from attar.measure.recall import CHOICES, answer_recall, recall_cases, recall_length
from attar.measure.settings import EvaluateSettings
from attar.measure.subject import load_subject
from tests import tiny_models

SETTINGS = EvaluateSettings(tasks_limit=12, data="python-stdlib")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_models.save(tiny_models.build("llama3"), tmp_path_factory.mktemp("recall") / "model")


@pytest.mark.parametrize("source", ["attar:tiny", ""], ids=["pieces of words", "bytes"])
def test_a_case_is_as_long_as_asked_and_tells_the_word_once(source, folder):
    subject = load_subject(source or folder)
    cases = recall_cases(subject, "recall:128", SETTINGS)
    assert len(cases) == 12 and cases == recall_cases(subject, "recall:128", SETTINGS)
    for case in cases:
        assert len(case.prompt) == 128 and len(set(case.words)) == CHOICES
        text = subject.tokenizer.decode(case.prompt, clean_up_tokenization_spaces=False)
        told, asked = text.split("The word of ")[1:]
        name, rest = told.split(" is", 1)
        assert asked.startswith(f"{name} is")
        answer = subject.tokenizer.decode([*case.prompt, case.words[case.label]])[len(text) :].strip()
        assert rest.strip().startswith(answer)
    assert len({case.label for case in cases}) > 3


def test_a_model_that_reads_the_sentence_recalls_all_and_one_that_does_not_a_tenth(folder, monkeypatch):
    subject = load_subject(folder)

    def told(subject, rows, counts):
        text = rows[0][:-1]
        ends = [at for at in range(4, len(text)) if text[at - 4 : at] == text[-4:]]
        logits = torch.zeros(1, subject.vocabulary)
        logits[0, text[ends[0]]] = 1.0
        yield logits

    monkeypatch.setattr(recall, "last_logits", told)
    assert set(answer_recall(subject, "recall:128", SETTINGS).acc) == {1.0}
    monkeypatch.setattr(recall, "last_logits", lambda *_: iter([torch.zeros(1, subject.vocabulary)]))
    assert 0 <= sum(answer_recall(subject, "recall:128", SETTINGS).acc) <= 5


def test_the_verb_measures_it_beside_the_original(folder, tmp_path):
    settings = {"tasks": ("recall:64",), "tasks_limit": 6, "tokens": 256, "data": "python-stdlib"}
    measured = attar.evaluate(folder, reference=folder, speed=False, sample="", progress=False, **settings)
    (score,) = measured.tasks
    assert score.name == "recall:64" and score.questions == 6 and score.acc_difference == 0


def test_what_cannot_be_asked_is_refused(folder):
    subject = load_subject(folder)
    assert recall_length("recall") == 0 and recall_length("arc.jsonl") is None
    for wrong in ("recall:", "recall:12", "recall:long"):
        with pytest.raises(SettingsError, match="recall:TOKENS"):
            recall_length(wrong)
    with pytest.raises(DataError, match="context"):
        recall_cases(subject, "recall:10000000", SETTINGS)
    with pytest.raises(SettingsError, match="recall:TOKENS"):
        attar.evaluate(folder, tasks=("recall:x",), progress=False)
