"""Packing: nothing lost, nothing leaked, masks where padding is."""

import json
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from attar.data.packing import (
    PADDING,
    Batches,
    calibration_batches,
    evaluation_rows,
    front_tokens,
    pack,
    pack_separate,
    pack_stream,
    render,
)
from attar.errors import DataError
from tests import tiny_models

DOCUMENTS = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=20), min_size=1, max_size=8)


@given(documents=DOCUMENTS, length=st.integers(2, 9))
def test_stream_keeps_every_token_but_the_tail(documents, length):
    flat = [token for document in documents for token in [*document, 0]]
    packed = pack_stream(documents, length, [0])
    assert packed.flatten().tolist() == flat[: len(flat) // length * length]


@given(documents=DOCUMENTS, length=st.integers(2, 9))
def test_separate_rows_hold_one_document_each(documents, length):
    rows = pack_separate(documents, length, [0])
    pieces = [row[row != PADDING].tolist() for row in rows]
    assert all(((row == PADDING).diff().int() >= 0).all() for row in rows), "padding stands at the end"
    position = 0
    for document in documents:
        whole = [*document, 0]
        wanted = [whole[start : start + length] for start in range(0, len(whole), length)]
        wanted = [piece for piece in wanted if len(piece) > 1]
        assert pieces[position : position + len(wanted)] == wanted
        position += len(wanted)
    assert position == len(pieces)


def test_rows_limit_stops_reading():
    def endless():
        while True:
            yield [1, 2, 3]

    assert pack_stream(endless(), 4, [], rows=5).shape == (5, 4)
    assert len(pack_separate(endless(), 2, [], rows=5)) == 5


@pytest.mark.parametrize(("rows", "counts"), [(5, [3, 2]), (None, [4, 2])])
def test_a_mixture_has_as_many_rows_of_each_source(rows, counts, tmp_path):
    for name, lines in (("a", 4), ("b", 2)):
        (tmp_path / f"{name}.txt").write_text(f" {name}" * 8 * lines)
    tokenizer = tiny_models.tokenizer()
    mixed = f"whole:{tmp_path}/a.txt + whole:{tmp_path}/b.txt"
    found = pack(tokenizer, mixed, "compression", length=8, rows=rows, seed=0).rows
    apart = [tokenizer(f" {name}")["input_ids"][0] for name in "ab"]
    kinds = [0 if apart[0] in row else 1 for row in found.tolist()]
    assert kinds[:4] == [0, 1, 0, 1]
    assert [kinds.count(kind) for kind in (0, 1)] == counts


def test_calibration_and_evaluation_do_not_share_rows():
    tokenizer = tiny_models.tokenizer()
    kept = calibration_batches(
        tokenizer, "python-stdlib", samples=6, sequence_length=64, batch_size=4, seed=3
    )
    again = calibration_batches(
        tokenizer, "python-stdlib", samples=6, sequence_length=64, batch_size=4, seed=3
    )
    assert [tuple(batch.shape) for batch in kept] == [(4, 64), (2, 64)]
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))
    held = evaluation_rows(tokenizer, "python-stdlib", tokens=640, sequence_length=64, seed=3).rows
    rows = {tuple(row.tolist()) for batch in kept for row in batch}
    assert len(held) == 10 and not any(tuple(row.tolist()) in rows for row in held)


def test_too_little_text_is_an_error_with_the_mend(tmp_path):
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(DataError, match="less than one row of 512 tokens") as raised:
        pack(tiny_models.tokenizer(), str(tmp_path / "a.txt"), "train", length=512, rows=None, seed=0)
    assert "--sequence-length" in raised.value.hint


def test_conversations_go_through_the_models_template():
    tokenizer = tiny_models.tokenizer()
    messages = [{"role": "user", "content": "hello"}]
    answered = [*messages, {"role": "assistant", "content": " you"}]
    with pytest.raises(DataError, match="no chat template"):
        render(messages, tokenizer)
    with pytest.raises(DataError, match="no chat template"):
        render([*answered, *messages], tokenizer)
    assert render(answered, tokenizer) == "hello you"  # as the checkpoint continues the prompt
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    assert render(messages, tokenizer) == "<user>hello"
    assert render("plain", tokenizer) == "plain"


def with_bos(template="<mask> $A", **more):
    """The tiny tokenizer with <mask> (token 2) as BOS, which it puts in front of a text."""
    tokenizer = tiny_models.tokenizer()
    tokenizer.bos_token = "<mask>"
    for name, value in more.items():
        setattr(tokenizer, name, value)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=template, special_tokens=[("<mask>", 2), ("<pad>", 1)]
    )
    return tokenizer


def test_what_the_tokenizer_puts_in_front_is_asked_of_it():
    plain = tiny_models.tokenizer()
    assert front_tokens(plain) == [] and front_tokens(plain, "always") == [plain.bos_token_id]
    assert front_tokens(with_bos()) == [2] and front_tokens(with_bos(), "never") == []
    assert front_tokens(with_bos("<mask> <pad> $A")) == [2, 1]
    assert front_tokens(with_bos("$A <pad>")) == []
    assert front_tokens(with_bos("<mask> $A <pad>", cls_token="<mask>")) == [], "an encoder's [CLS]"
    plain.bos_token = None
    with pytest.raises(DataError, match="no BOS token"):
        front_tokens(plain, "always")


@given(documents=DOCUMENTS, length=st.integers(3, 9))
def test_rows_begin_with_bos_and_lose_no_token(documents, length):
    rows = pack_stream([[77, *document] for document in documents], length, [0], front=[77])
    flat = [token for document in documents for token in [*document, 0]]
    assert (rows[:, 0] == 77).all() and not (rows[:, 1:] == 77).any(), "one in front, none of the template's"
    assert rows[:, 1:].flatten().tolist() == flat[: len(flat) // (length - 1) * (length - 1)]
    rows = pack_separate(documents, length, [0], front=[77])
    assert (rows[:, 0] == 77).all()
    assert rows[:, 1:][rows[:, 1:] != PADDING].tolist() == flat


def test_every_kind_of_rows_begins_with_bos(tmp_path):
    tokenizer, data = with_bos(), str(tmp_path / "a.txt")
    (tmp_path / "a.txt").write_text("".join(f"line {number}\n" for number in range(400)))
    sizes = {"sequence_length": 16, "seed": 0}
    (calibrated,) = calibration_batches(tokenizer, data, samples=4, batch_size=4, **sizes)
    evaluated = evaluation_rows(tokenizer, data, tokens=64, **sizes).rows
    bare = evaluation_rows(tokenizer, data, tokens=64, bos="never", **sizes).rows
    assert (calibrated[:, 0] == 2).all() and (evaluated[:, 0] == 2).all() and not (bare == 2).any()
    assert evaluated[:, 1:].flatten().tolist()[:60] == bare.flatten().tolist()[:60]


def test_a_template_that_writes_bos_itself_gives_one(tmp_path):
    tokenizer = with_bos()
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    rows = [{"messages": [{"role": "user", "content": f"question {n} " * 40}]} for n in range(30)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    packed = pack(tokenizer, str(tmp_path / "a.jsonl"), "train", length=32, rows=8, seed=0).rows
    assert (packed[:, 0] == 2).all() and not (packed[:, 1:] == 2).any()


def test_any_seed_gives_batches():
    rows = torch.arange(12).reshape(6, 2)
    for seed in (0, 1, 2**63 - 1, 10**23, -1):
        batches = Batches(rows, 4, seed)
        assert batches[0].shape == (4, 2) and torch.equal(batches[5], Batches(rows, 4, seed)[5])
    order = torch.randperm(6, generator=torch.Generator().manual_seed(3 * 1_000_003))
    assert torch.equal(Batches(rows, 6, 3)[0], rows[order]), "small seeds draw what they drew"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ messages[0].name.first }}", "has no attribute"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "can only concatenate"),
        ("{% for", "unexpected"),
    ],
)
def test_a_template_that_refuses_is_one_line_with_the_place(tmp_path, template, reason):
    tokenizer = tiny_models.tokenizer()
    tokenizer.chat_template = template
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}))
    with pytest.raises(DataError, match="chat template refuses") as raised:
        pack(tokenizer, str(tmp_path / "a.jsonl"), "train", length=8, rows=1, seed=0)
    assert f"{tmp_path}/a.jsonl:1" in raised.value.message and "\n" not in raised.value.message
    assert reason in raised.value.message.lower() or reason in raised.value.message


def test_a_compression_reads_the_seed_s_choice_of_all_text_but_the_evaluation_s(tmp_path):
    """Of one file too, whose calibration split is a tenth at one place; more rows begin with the same."""
    tokenizer, file = tiny_models.tokenizer(), tmp_path / "a.txt"
    file.write_text("\n\n".join(f"Passage {i}: {'of no meaning ' * 6}" for i in range(300)))

    def rows(split, count, seed=0):
        return pack(tokenizer, str(file), split, length=16, rows=count, seed=seed).rows.tolist()

    chosen = rows("compression", 64)
    numbers = [int(match) for match in re.findall(r"Passage (\d+)", " ".join(map(tokenizer.decode, chosen)))]
    assert max(numbers) < 275 and min(numbers) < 60 and max(numbers) > 200
    assert len(rows("compression", None)) > 5 * len(rows("calibration", None))
    assert rows("compression", 20) == chosen[:20] != rows("compression", 20, seed=1)
