"""The sample, of transformers' generate or of attar.LLM, what ends it, and its speed."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from attar.checkpoint import open_checkpoint
from attar.data.python_text import CHAT
from attar.errors import DataError
from attar.measure.generation import (
    PROMPTS,
    answer_prompts,
    decode_tokens,
    encode_prompt,
    generate_answers,
    generate_greedily,
    measure_speed,
    sample_prompt,
)
from attar.measure.subject import Subject, load_subject
from attar.models.loading.plain_config import end_tokens
from attar.runtime.llm import LLM
from attar.runtime.sampling.params import SamplingParams
from tests import tiny_models
from tests.measure.measure_models import llama, words


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    return tiny_models.save(tiny_models.build("llama3"), tmp_path_factory.mktemp("speed") / "model")


@pytest.mark.few(2)
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
    bare = Subject(model)
    bare.model.generation_config.eos_token_id = bare.model.config.eos_token_id = None
    assert generate_greedily(bare, prompt[0].tolist(), 12) == theirs[0, 11:].tolist()


@pytest.mark.parametrize("family", ["llama3", "gpt2"])
def test_a_batch_answers_as_one_by_one(family: str) -> None:
    """Prompts of other lengths, and an end token that some answers reach before others."""
    model = tiny_models.build(family)
    subject, prompts = Subject(model), [[5, 6, 7], [8], [9, 10, 11, 12, 13]]
    answers = [generate_greedily(subject, prompt, 8) for prompt in prompts]
    assert generate_answers(subject, prompts, 8) == answers
    model.generation_config.eos_token_id = model.config.eos_token_id = end = answers[0][2]
    stopped = generate_answers(subject, prompts, 8)
    assert stopped == [generate_greedily(subject, prompt, 8) for prompt in prompts]
    assert stopped[0] == answers[0][: answers[0].index(end) + 1] and max(map(len, stopped)) == 8


def test_text_is_that_of_the_tokens(subject: Subject) -> None:
    ids = generate_greedily(subject, encode_prompt(subject, "w1"), 4)
    assert decode_tokens(subject, ids).split() == [f"w{token}" for token in ids]


def test_end_of_text_stops(subject: Subject) -> None:
    ids = generate_greedily(subject, [1, 2], 10)
    model = llama(0, eos_token_id=ids[3])
    again = generate_greedily(Subject(model, subject.tokenizer), [1, 2], 10)
    assert again == ids[: ids.index(ids[3]) + 1]


def test_end_tokens_may_be_several() -> None:
    model = llama(0, eos_token_id=[3, 5])
    assert end_tokens(model.generation_config, model.config, words()) == (3, 5)
    model = llama(0)
    assert end_tokens(model.generation_config, model.config, words()) == ()


def test_context_bounds_the_answer(subject: Subject) -> None:
    assert len(generate_greedily(subject, encode_prompt(subject, " ".join(["w1"] * 60)), 100)) == 4


@pytest.mark.parametrize("length", [64, 65, 200])
def test_long_prompt_names_both_lengths(subject: Subject, length: int) -> None:
    with pytest.raises(DataError, match=rf"prompt has {length} tokens, .* tiny is 64") as caught:
        encode_prompt(subject, " ".join(["w1"] * length))
    assert "\n" not in caught.value.message


def test_empty_prompt(subject: Subject) -> None:
    with pytest.raises(DataError, match="prompt is empty"):
        encode_prompt(subject, "")


@pytest.mark.few(1)
@pytest.mark.parametrize("runner", ["auto", "modules"])
def test_what_is_served_speaks(tmp_path: Path, runner: str) -> None:
    """The sample is that of attar.LLM, and in float32 that of transformers."""
    folder = tiny_models.save(tiny_models.build("llama3"), tmp_path / "model")
    exact = load_subject(folder)
    served = load_subject(folder, runner=runner)
    assert served.loaded is not None
    prompt = encode_prompt(exact, "def add")
    assert generate_greedily(served, prompt, 8) == generate_greedily(exact, prompt, 8)
    assert generate_greedily(served, prompt, 8) == list(
        LLM(folder, runner=runner)
        .generate(prompt, SamplingParams(temperature=0.0, max_tokens=8))[0]
        .token_ids
    )


def test_padded_rows_are_never_chosen() -> None:
    model = llama(2, vocabulary=80)
    model.lm_head.weight.data[64:] *= 100.0  # rows that no token has would win
    assert max(generate_greedily(Subject(model, words(size=64)), [1], 8)) < 64


def test_a_sample_s_prompt_fits_the_model(tmp_path: Path) -> None:
    code = load_subject("attar:tiny")
    assert sample_prompt(code, "auto")[0] == "def __init__(self"
    assert sample_prompt(code, "x = ") == ("x = ", encode_prompt(code, "x = "))
    for name, file in (("prose", None), ("chat", "chat_template.jinja")):
        folder = tmp_path / name
        shutil.copytree(open_checkpoint("attar:tiny").path, folder)
        (folder / "attar.json").unlink()
        if file:
            (folder / file).write_text("<{{ messages[0].role }}>{{ messages[0].content }}")
    assert sample_prompt(load_subject(tmp_path / "prose"), "auto")[0] == "Once upon a time"
    chat = load_subject(tmp_path / "chat")
    text, ids = sample_prompt(chat, "auto")
    assert text.strip() == PROMPTS[CHAT][0] and text.endswith("\n")
    assert answer_prompts(chat, 3)[0] == ids and len(answer_prompts(chat, 3)) == 3
    assert answer_prompts(code, 1) == [encode_prompt(code, "def __init__(self")]
    assert chat.tokenizer.decode(ids) == f"<user>{text.strip()}"


@pytest.mark.parametrize("runner", ["auto", "transformers"])
def test_speed_counts_tokens_and_rounds(folder: Path, runner: str) -> None:
    subject = load_subject(folder, runner=runner)
    start = time.perf_counter()
    speed = measure_speed(subject, prompt_tokens=16, decode_tokens=4, rounds=3, budget=60.0)
    seconds = time.perf_counter() - start
    assert (speed.prompt_tokens, speed.decode_tokens, speed.rounds) == (16, 4, 3)
    assert speed.prefill_tokens_per_s > 16 / seconds
    assert speed.decode_tokens_per_s > 4 / seconds
    assert speed.prefill_spread is not None and speed.decode_spread is not None


def test_speed_of_a_known_delay(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose every pass takes 2 ms decodes at most 500 tokens/s, and one round has no spread."""
    model = llama(0)
    forward = model.forward

    def slow(*inputs: Any, **options: Any) -> Any:
        time.sleep(0.002)
        return forward(*inputs, **options)

    monkeypatch.setattr(model, "forward", slow)
    speed = measure_speed(Subject(model, words()), prompt_tokens=10, decode_tokens=5, budget=0.0)
    assert 0 < speed.decode_tokens_per_s <= 500
    assert 0 < speed.prefill_tokens_per_s <= 5000
    assert (speed.rounds, speed.prefill_spread, speed.decode_spread) == (1, None, None)


def test_speed_fits_the_context(tiny_model: Any) -> None:
    speed = measure_speed(Subject(tiny_model, words()), prompt_tokens=500, decode_tokens=500, rounds=1)
    assert (speed.prompt_tokens, speed.decode_tokens) == (31, 32)


def test_every_kind_has_as_many_prompts_as_may_be_asked_for() -> None:
    assert {len(dict.fromkeys(prompts)) for prompts in PROMPTS.values()} == {8}
    assert answer_prompts(Subject(llama(0)), 8) == []
