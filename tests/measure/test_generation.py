"""The loop against transformers' own generate, and what ends a text."""

from __future__ import annotations

import math

import pytest
import torch

from attar.errors import DataError, NumericsError
from attar.measure.generation import complete, encode, end_tokens, steps, words
from attar.measure.subject import Subject
from tests import tiny_models
from tests.measure.measure_models import llama
from tests.measure.measure_models import words as tokenizer


@pytest.mark.parametrize("family", ["llama3", "mistral", "gemma2", "gpt2", "opt", "gpt_neox"])
def test_greedy_equals_transformers(family: str) -> None:
    model = tiny_models.build(family)
    prompt = tiny_models.tokens(model, batch=1, length=11)
    theirs = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=1,
    )
    ours = list(steps(model, prompt[0].tolist(), 12, model.config.vocab_size))
    assert ours == theirs[0, 11:].tolist()


def test_text_is_that_of_the_tokens(subject: Subject) -> None:
    ids = complete(subject, encode(subject, "w1"), 4)
    assert words(subject, ids).split() == [f"w{token}" for token in ids]


def test_end_of_text_stops(subject: Subject) -> None:
    ids = complete(subject, [1, 2], 10)
    model = llama(0, eos_token_id=ids[3])
    again = complete(Subject(model, subject.tokenizer), [1, 2], 10)
    assert again == ids[: ids.index(ids[3]) + 1]


def test_end_tokens_may_be_several() -> None:
    model = llama(0, eos_token_id=[3, 5])
    assert end_tokens(Subject(model, tokenizer())) == (3, 5)
    assert end_tokens(Subject(llama(0), tokenizer())) == ()


def test_context_bounds_the_answer(subject: Subject) -> None:
    assert len(complete(subject, encode(subject, " ".join(["w1"] * 60)), 100)) == 4


@pytest.mark.parametrize("length", [64, 65, 200])
def test_long_prompt_names_both_lengths(subject: Subject, length: int) -> None:
    with pytest.raises(DataError, match=rf"prompt has {length} tokens, .* tiny is 64") as caught:
        encode(subject, " ".join(["w1"] * length))
    assert "\n" not in caught.value.message


def test_empty_prompt(subject: Subject) -> None:
    with pytest.raises(DataError, match="prompt is empty"):
        encode(subject, "")


def test_nan_logits_are_named() -> None:
    model = llama(1)
    model.lm_head.weight.data[3, 4] = math.nan
    with pytest.raises(NumericsError, match="NaN"):
        complete(Subject(model, tokenizer()), [1], 2)


def test_padded_rows_are_never_chosen() -> None:
    model = llama(2, vocabulary=80)
    model.lm_head.weight.data[64:] *= 100.0  # rows that no token has would win
    assert max(complete(Subject(model, tokenizer(size=64)), [1], 8)) < 64
