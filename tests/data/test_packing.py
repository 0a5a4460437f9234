"""Packing: nothing lost, nothing leaked, masks where padding is."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attar.data.calibration import calibration_batches
from attar.data.chat import render
from attar.data.packing import PADDING, evaluation_batches, pack, pack_separate, pack_stream
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
    held = evaluation_batches(
        tokenizer, "python-stdlib", tokens=640, sequence_length=64, batch_size=4, seed=3
    )
    rows = {tuple(row.tolist()) for batch in kept for row in batch}
    assert sum(map(len, held)) == 10 and not any(
        tuple(row.tolist()) in rows for batch in held for row in batch
    )


def test_too_little_text_is_an_error_with_the_mend(tmp_path):
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(DataError, match="less than one row of 512 tokens") as raised:
        pack(tiny_models.tokenizer(), str(tmp_path / "a.txt"), "train", length=512, rows=None, seed=0)
    assert "--sequence-length" in raised.value.hint


def test_conversations_go_through_the_models_template():
    tokenizer = tiny_models.tokenizer()
    messages = [{"role": "user", "content": "hello"}]
    with pytest.raises(DataError, match="no chat template"):
        render(messages, tokenizer)
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    assert render(messages, tokenizer) == "<user>hello"
    assert render("plain", tokenizer) == "plain"
