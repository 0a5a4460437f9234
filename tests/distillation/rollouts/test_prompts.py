"""Prompts of every kind of source."""

import json

import pytest

from attar.data.packing import pack
from attar.distillation.rollouts.prompts import read_prompts
from attar.errors import DataError
from tests import tiny_models

TEMPLATE = """{% for m in messages %}<{{ m.role }}>{{ m.content }}
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""


@pytest.fixture
def tokenizer():
    result = tiny_models.tokenizer()
    result.chat_template = TEMPLATE
    return result


def read(tokenizer, tmp_path, rows, split="train", **changes):
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"length": 64, "count": 8, "seed": 0, "tokens": 4} | changes
    read = read_prompts(tokenizer, f"whole:{file}", split, **options)
    return [tokenizer.decode(prompt) for prompt in read.prompts], read


def user(text):
    return {"role": "user", "content": text}


def test_a_conversation_is_rendered_up_to_its_first_answer(tokenizer, tmp_path):
    answer = {"role": "assistant", "content": "yes"}
    rows = [{"messages": [{"role": "system", "content": "be kind"}, user("is it?"), answer, user("sure?")]}]
    texts, _ = read(tokenizer, tmp_path, rows)
    assert texts == ["<system>be kind\n<user>is it?\n<assistant>"]


def test_a_conversation_without_an_answer_is_a_prompt(tokenizer, tmp_path):
    texts, _ = read(tokenizer, tmp_path, [{"messages": [user("is it?")]}])
    assert texts == ["<user>is it?\n<assistant>"]


def test_a_prompt_with_its_completion_stays_plain(tokenizer, tmp_path):
    texts, _ = read(tokenizer, tmp_path, [{"prompt": "def f(", "completion": "x): pass"}])
    assert texts == ["def f("]


def test_a_model_without_a_template_continues_a_single_message(tokenizer, tmp_path):
    tokenizer.chat_template = None
    texts, _ = read(tokenizer, tmp_path, [{"messages": [user("is it?")]}])
    assert texts == ["is it?"]
    with pytest.raises(DataError, match="no chat template"):
        read(tokenizer, tmp_path, [{"messages": [{"role": "system", "content": "s"}, user("d")]}])


def test_text_gives_the_first_tokens_of_packed_rows(tokenizer, tmp_path):
    _, found = read(tokenizer, tmp_path, [{"text": "one two three four " * 20}], count=3)
    rows = pack(tokenizer, f"whole:{tmp_path / 'data.jsonl'}", "train", length=64, rows=3, seed=0).rows
    assert found.prompts == rows[:, :4].tolist() and (found.rows == rows).all()


def test_a_prompt_that_leaves_no_room_is_counted_and_left_out(tokenizer, tmp_path):
    rows = [{"messages": [user("x y z " * 40)]}, {"messages": [user("short")]}]
    texts, found = read(tokenizer, tmp_path, rows)
    assert texts == ["<user>short\n<assistant>"] and found.dropped == 1
    assert found.record("distill", tokenizer, "d", "train")["too_long"] == 1
    with pytest.raises(DataError, match="no prompt of the train split leaves room"):
        read(tokenizer, tmp_path, rows[:1])


def test_the_tokens_in_front_of_a_row_are_in_front_of_a_prompt_once(tokenizer, tmp_path):
    _, found = read(tokenizer, tmp_path, [{"messages": [user("a")]}], bos="always")
    assert found.prompts[0][0] == tokenizer.bos_token_id
    tokenizer.chat_template = "{{ bos_token }}" + TEMPLATE
    _, again = read(tokenizer, tmp_path, [{"messages": [user("a")]}], bos="always")
    assert again.prompts == found.prompts
