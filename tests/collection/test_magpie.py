"""Text of a model's own: where its question begins, what ends it, and a whole collection."""

import json
from pathlib import Path

import pytest
import torch

import attar
from attar.collection.magpie import MOST_TOKENS, opening
from attar.errors import DataError, UsageError
from attar.runtime.sampling.params import SamplingParams
from tests import tiny_models

USER = ({"role": "user", "content": ""},)
MARKED = (  # ChatML's form: a special token behind each message
    "{% for m in messages %}<mask>{{ m.role }}\n{{ m.content | trim }}<pad>\n{% endfor %}"
    "{% if add_generation_prompt %}<mask>assistant\n{% endif %}"
)
BRACKETS = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
)
SYSTEM = "{% if messages[0].role != 'system' %}<mask>system\nhelpful<pad>\n{% endif %}" + MARKED


def words(template):
    tokenizer = tiny_models.tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (MARKED, "<mask>user\n"),
        (SYSTEM, "<mask>system\nhelpful<pad>\n<mask>user\n"),
        (BRACKETS, "[INST] "),
        ("{{ messages[-1].content }} =>", "<|endoftext|>"),
    ],
)
def test_a_question_begins_where_the_template_writes_the_users_words(template, text):
    tokenizer = words(template)
    assert tokenizer.decode(opening(tokenizer, USER).tokens) == text


def test_a_special_token_or_the_templates_text_ends_a_question():
    marked, brackets = opening(words(MARKED), USER), opening(words(BRACKETS), USER)
    params = SamplingParams(max_tokens=5_000, stop=("never",), seed=3)
    pad = tiny_models.tokenizer().pad_token_id
    assert marked.ended(params) == SamplingParams(max_tokens=MOST_TOKENS, stop_ids=(pad,), seed=3)
    assert brackets.ended(params) == SamplingParams(max_tokens=MOST_TOKENS, stop=("[/INST]",), seed=3)


def test_the_template_sees_the_system_prompt():
    system = {"role": "system", "content": "You know all about bees."}
    tokenizer = words(SYSTEM)
    text = tokenizer.decode(opening(tokenizer, (system, *USER)).tokens)
    assert text == "<mask>system\nYou know all about bees.<pad>\n<mask>user\n"


def test_without_a_template_a_text_begins_with_bos_or_else_eos():
    tokenizer = tiny_models.tokenizer()
    assert opening(tokenizer, ()).tokens == [tokenizer.bos_token_id]
    tokenizer.bos_token, tokenizer.eos_token = None, "<pad>"
    assert opening(tokenizer, ()).tokens == [tokenizer.pad_token_id]
    tokenizer.eos_token = None
    with pytest.raises(DataError, match="neither BOS nor EOS"):
        opening(tokenizer, ())


def test_a_template_that_refuses_or_writes_no_user_is_a_data_error():
    for template in ("{{ raise_exception('no') }}", "nothing"):
        with pytest.raises(DataError, match="the chat template"):
            opening(words(template), USER)


def rows_of(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


@pytest.fixture(scope="module")
def chatty(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "chatty"
    model = tiny_models.build("smollm", max_position_embeddings=512).to(torch.bfloat16)
    tiny_models.save(model, folder)
    (folder / "chat_template.jinja").write_text(MARKED)
    return folder


OPTIONS = {"samples": 6, "max_tokens": 16, "filters": "none", "concurrency": 4}


def test_a_model_asks_and_answers_itself_and_a_killed_run_ends_in_the_same_bytes(tmp_path, chatty):
    plain, out = tmp_path / "plain.jsonl", tmp_path / "own.jsonl"
    result = attar.collect("magpie", plain, teacher=chatty, **OPTIONS)
    rows = rows_of(plain)
    assert result.answers == len(rows) == 6
    assert all([m["role"] for m in row["messages"]] == ["user", "assistant"] for row in rows)
    assert len({row["messages"][0]["content"] for row in rows} - {""}) == 6, "each sample asks another"
    lines = (tmp_path / "plain.jsonl.journal").read_bytes().splitlines(keepends=True)
    (tmp_path / "own.jsonl.journal").write_bytes(b"".join(lines[:2]) + lines[2][:30])
    assert attar.collect("magpie", out, teacher=chatty, **OPTIONS).sent == 4
    assert out.read_bytes() == plain.read_bytes()


def test_the_answer_is_to_the_question_that_was_written(tmp_path, chatty):
    greedy = {**OPTIONS, "samples": 1, "temperature": 0.0}
    attar.collect("magpie", tmp_path / "own.jsonl", teacher=chatty, **greedy)
    (own,) = rows_of(tmp_path / "own.jsonl")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"messages": own["messages"][:1]}))
    attar.collect(prompts, tmp_path / "asked.jsonl", teacher=chatty, **greedy)
    (asked,) = rows_of(tmp_path / "asked.jsonl")
    assert own["messages"] == asked["messages"]
    assert own["usage"] == asked["usage"]


def test_its_text_calibrates_it(tmp_path, chatty):
    own = tmp_path / "own.jsonl"
    attar.collect("magpie", own, teacher=chatty, **{**OPTIONS, "samples": 120})
    small = attar.quantize(
        chatty, tmp_path / "w4", data=own, samples=4, sequence_length=32, group_size=16, check_tokens=0
    )
    assert small.card.settings["data"] == str(own)


def test_a_model_without_a_template_writes_texts(tmp_path):
    out = tmp_path / "own.jsonl"
    attar.collect("magpie", out, teacher="attar:tiny", **OPTIONS)
    rows = rows_of(out)
    assert all(row["messages"][0] == {"role": "user", "content": ""} for row in rows)
    assert len({row["messages"][1]["content"] for row in rows}) == 6
    with pytest.raises(DataError, match="no chat template"):  # of every request, so that there is no answer
        attar.collect("magpie", tmp_path / "x.jsonl", teacher="attar:tiny", systems=("steps",), **OPTIONS)


def test_an_endpoint_is_refused_and_a_file_of_that_name_is_read(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="magpie needs a model"):
        attar.collect("magpie", tmp_path / "x.jsonl", teacher="http://localhost:1/v1", model="m")
    monkeypatch.chdir(tmp_path)
    Path("magpie").write_text("def add(a, b):\n")
    attar.collect("magpie", "x.jsonl", teacher="attar:tiny", **{**OPTIONS, "samples": 1})
    assert rows_of("x.jsonl")[0]["messages"][0]["content"] == "def add(a, b):"
