"""Types of tensors against the gguf package's own tables."""

import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType

from attar.errors import CheckpointError, ModelError
from attar.formats.gguf.types import FILE_TYPES, TYPES, UNREAD, by_id, row_bytes


@pytest.mark.parametrize("name", TYPES)
def test_number_block_and_bytes(name):
    kind = TYPES[name]
    theirs = GGMLQuantizationType[name]
    assert kind.name == name and kind.id == int(theirs)
    assert (kind.block, kind.size) == GGML_QUANT_SIZES[theirs]
    assert by_id(kind.id) is kind


def test_types_are_in_the_order_of_their_numbers():
    numbers = [kind.id for kind in TYPES.values()]
    assert numbers == sorted(numbers)


def test_bits_of_a_weight():
    assert {name: TYPES[name].bits for name in ("BF16", "Q4_0", "Q4_K", "Q6_K", "IQ4_XS", "MXFP4")} == {
        "BF16": 16, "Q4_0": 4.5, "Q4_K": 4.5, "Q6_K": 6.5625, "IQ4_XS": 4.25, "MXFP4": 4.25,
    }  # fmt: skip


def test_every_other_type_is_named_when_it_is_refused():
    known = {int(kind): kind.name for kind in GGMLQuantizationType}
    assert not set(UNREAD) & {kind.id for kind in TYPES.values()}
    for number, name in known.items():
        if name in TYPES:
            continue
        assert UNREAD[number] == name
        with pytest.raises(CheckpointError, match=rf"type {number} \({name}\)") as caught:
            by_id(number)
        assert "Q4_K" in caught.value.hint
    with pytest.raises(CheckpointError, match=r"type 999 \(unknown\)"):
        by_id(999)


@pytest.mark.parametrize("name", FILE_TYPES)
def test_numbers_of_file_types(name):
    theirs = LlamaFileType["ALL_F32" if name == "F32" else f"MOSTLY_{name}"]
    assert FILE_TYPES[name] == int(theirs)


def test_bytes_of_a_row():
    assert row_bytes("F32", 7) == 28
    assert row_bytes("BF16", 7) == 14
    assert row_bytes("Q8_0", 96) == 3 * 34
    assert row_bytes("Q6_K", 512) == 420
    with pytest.raises(ModelError, match=r"rows of 300 weights cannot be stored as Q4_K.* 256"):
        row_bytes("Q4_K", 300)
