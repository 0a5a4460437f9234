"""One reference for several evaluations: kept or computed again, same tokens, same tokenizer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attar.data.packing import PackedRows
from attar.errors import UsageError
from attar.measure.evaluate import measure_quality
from attar.measure.held_out import held_out
from attar.measure.reference import check_same_text, check_same_tokens, make_reference
from attar.measure.settings import EvaluateSettings
from attar.measure.subject import Subject
from tests.measure.measure_models import llama, words

SETTINGS = EvaluateSettings(tokens=96, sequence_length=16, batch_size=2, answers=0)


def text(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(64, (2, 16), generator=generator) for _ in range(3)]


def test_kept_and_computed_again_agree(subject: Subject) -> None:
    kept = make_reference(subject, SETTINGS, batches=text())
    again = make_reference(subject, SETTINGS, batches=text(), memory_limit=0)
    assert (kept.kept, again.kept) == (True, False)
    assert kept.nbytes == 3 * 2 * 15 * 64 * 4
    assert again.nbytes == 0
    assert kept.subject.model is None, "the weights are let go"
    other = Subject(llama(1), words(), None, "other")
    assert measure_quality(other, SETTINGS, kept) == measure_quality(other, SETTINGS, again)


def test_limit_is_the_size_of_the_logits(subject: Subject) -> None:
    size = 3 * 2 * 15 * 64 * 4
    assert make_reference(subject, SETTINGS, batches=text(), memory_limit=size).kept
    assert not make_reference(subject, SETTINGS, batches=text(), memory_limit=size - 1).kept


def test_same_tokenizers_pass(subject: Subject) -> None:
    check_same_tokens(subject, Subject(None, words()))
    check_same_tokens(subject, Subject(None, None))


@pytest.mark.parametrize(
    ("vocabulary", "sentence"),
    [
        (["a", "b", "d"], "token 'c' is 2 in one, 'missing' in the other"),
        (["b", "a", "c"], "token 'a' is 0 in one, 1 in the other"),
    ],
)
def test_other_tokenizer_is_one_line(vocabulary: list[str], sentence: str) -> None:
    ours, theirs = (
        Subject(None, words("a", "b", "c"), None, "ours"),
        Subject(None, words(*vocabulary), None, "theirs"),
    )
    with pytest.raises(UsageError) as caught:
        check_same_tokens(ours, theirs)
    assert caught.value.message.startswith("ours and theirs have different tokenizers")
    assert sentence in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    "change", [{"tokens": 128}, {"sequence_length": 8}, {"data": "text.txt"}, {"seed": 1}]
)
def test_other_text_is_refused(subject: Subject, change: dict[str, Any]) -> None:
    result = make_reference(subject, SETTINGS, batches=text())
    check_same_text(result, replace(SETTINGS, batch_size=1, speed=False))
    with pytest.raises(UsageError, match=next(iter(change))):
        check_same_text(result, replace(SETTINGS, **change))


def test_sequences_fit_the_context(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    packed = PackedRows(torch.cat(text()))
    monkeypatch.setattr(
        "attar.measure.held_out.evaluation_rows", lambda *_, **more: asked.update(more) or packed
    )
    held_out(subject, replace(SETTINGS, sequence_length=65))
    assert asked["sequence_length"] == 64


def test_text_comes_from_the_data_package(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def rows(tokenizer: Any, data: str, **more: Any) -> PackedRows:
        asked.update(more, data=data)
        return PackedRows(torch.cat(text()), "too short")

    monkeypatch.setattr("attar.measure.held_out.evaluation_rows", rows)
    result = make_reference(subject, replace(SETTINGS, data="python-stdlib"))
    assert len(result.batches) == 3 and result.shared == "too short"
    assert asked == {"data": "python-stdlib", "tokens": 96, "sequence_length": 16, "seed": 0, "bos": "auto"}
