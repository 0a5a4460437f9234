"""The loop against transformers' own generate, and what ends a completion."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch

from attar.errors import DataError, NumericsError, SettingsError
from attar.measure.generation import complete, end_tokens, generate, greedy, sampler, steps
from attar.measure.subject import Subject
from tests import tiny_models
from tests.measure.measure_models import llama, words


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
    ours = list(steps(model, prompt[0].tolist(), 12, greedy, model.config.vocab_size))
    assert ours == theirs[0, 11:].tolist()


def test_same_seed_same_tokens(subject: Subject) -> None:
    call = {"max_tokens": 12, "temperature": 1.0}
    first = generate(subject, ["w1 w2", "w1 w2"], seed=3, **call)
    assert first == generate(subject, ["w1 w2", "w1 w2"], seed=3, **call)
    assert first != generate(subject, ["w1 w2", "w1 w2"], seed=4, **call)
    one, two = first.completions
    assert one.token_ids != two.token_ids, "prompt i is sampled with seed + i"
    assert generate(subject, "w1 w2", seed=4, **call).completions[0] == two, (
        "a completion depends on no neighbour"
    )


def test_temperature_zero_ignores_the_seed(subject: Subject) -> None:
    assert generate(subject, "w5", max_tokens=8, seed=1) == generate(subject, "w5", max_tokens=8, seed=2)


def test_tiny_temperature_is_greedy(subject: Subject) -> None:
    assert (
        generate(subject, "w5", max_tokens=8, temperature=1e-30).completions
        == generate(subject, "w5", max_tokens=8).completions
    )


def test_sampler_draws_from_the_softmax() -> None:
    logits, temperature = torch.tensor([0.0, 1.0, 2.0, -math.inf]), 2.0
    choose = sampler(temperature, seed=0)
    counts = Counter(choose(logits) for _ in range(4000))
    expected = (logits / temperature).softmax(-1).tolist()
    assert counts[3] == 0
    assert [counts[token] / 4000 for token in range(4)] == pytest.approx(expected, abs=0.03)


def test_usage_and_length(subject: Subject) -> None:
    result = generate(subject, ["w1 w2 w3", "w4"], max_tokens=5).to_dict()
    assert [len(each["token_ids"]) for each in result["completions"]] == [5, 5]
    assert {each["finish_reason"] for each in result["completions"]} == {"length"}
    assert result["usage"] == {"prompt_tokens": 4, "completion_tokens": 10, "total_tokens": 14}


def test_text_is_that_of_the_tokens(subject: Subject) -> None:
    completion = generate(subject, "w1", max_tokens=4).completions[0]
    assert completion.text.split() == [f"w{token}" for token in completion.token_ids]


def test_end_of_text_stops(subject: Subject) -> None:
    ids = complete(subject, [1, 2], 10, greedy).token_ids
    model = llama(0, eos_token_id=ids[3])
    again = complete(Subject(model, subject.tokenizer), [1, 2], 10, greedy)
    assert again.finish_reason == "stop"
    assert again.token_ids == ids[: ids.index(ids[3]) + 1]


def test_end_tokens_may_be_several() -> None:
    model = llama(0, eos_token_id=[3, 5])
    assert end_tokens(Subject(model, words())) == (3, 5)
    assert end_tokens(Subject(llama(0), words())) == ()


def test_stop_string_is_cut(subject: Subject) -> None:
    whole = generate(subject, "w1 w2", max_tokens=10).completions[0]
    third = whole.text.split()[2]
    stopped = generate(subject, "w1 w2", max_tokens=10, stop=["nowhere", third]).completions[0]
    assert stopped.finish_reason == "stop"
    assert stopped.text == whole.text[: whole.text.index(third)]
    assert len(stopped.token_ids) <= 3


def test_context_bounds_the_answer(subject: Subject) -> None:
    prompt = " ".join(["w1"] * 60)
    completion = generate(subject, prompt, max_tokens=100).completions[0]
    assert (len(completion.token_ids), completion.finish_reason) == (4, "length")


@pytest.mark.parametrize("length", [64, 65, 200])
def test_long_prompt_names_both_lengths(subject: Subject, length: int) -> None:
    with pytest.raises(DataError, match=rf"prompt 2 has {length} tokens, .* tiny is 64") as caught:
        generate(subject, ["w1", " ".join(["w1"] * length)])
    assert "\n" not in caught.value.message


def test_empty_prompt(subject: Subject) -> None:
    with pytest.raises(DataError, match="prompt 1 is empty"):
        generate(subject, "")


@pytest.mark.parametrize(
    ("field", "value"), [("max_tokens", 0), ("temperature", -0.1), ("temperature", math.nan), ("stop", [""])]
)
def test_settings_out_of_range(subject: Subject, field: str, value: Any) -> None:
    with pytest.raises(SettingsError) as caught:
        generate(subject, "w1", **{field: value})
    assert caught.value.field == field


def test_nan_logits_are_named() -> None:
    model = llama(1)
    model.lm_head.weight.data[3, 4] = math.nan
    with pytest.raises(NumericsError, match="NaN"):
        generate(Subject(model, words()), "w1", max_tokens=2)


def test_no_prompts(subject: Subject) -> None:
    assert generate(subject, []).completions == []


def test_padded_rows_are_never_chosen() -> None:
    model = llama(2, vocabulary=80)
    model.lm_head.weight.data[64:] *= 100.0  # rows that no token has would win
    completion = generate(Subject(model, words(size=64)), "w1", max_tokens=8).completions[0]
    assert max(completion.token_ids) < 64
