"""dense_pack against its definition, bit by bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attar.formats.dense_pack import dense_pack, dense_unpack


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("length", [1, 7, 31, 32, 33, 96])
def test_is_the_little_endian_bit_string(bits, length):
    codes = torch.randint(
        0, 2**bits, (3, length), generator=torch.Generator().manual_seed(bits), dtype=torch.uint8
    )
    packed = dense_pack(codes, bits)
    assert packed.dtype == torch.int32 and packed.shape == (3, -(-length * bits // 32))
    for row in range(3):
        number = sum(int(code) << (i * bits) for i, code in enumerate(codes[row]))
        words = [number >> (32 * w) & 0xFFFFFFFF for w in range(packed.shape[1])]
        assert [int(word) & 0xFFFFFFFF for word in packed[row]] == words


@given(bits=st.integers(1, 8), codes=st.lists(st.integers(0, 255), min_size=1, max_size=70))
def test_round_trip(bits, codes):
    tensor = torch.tensor([code % 2**bits for code in codes], dtype=torch.uint8)
    assert torch.equal(dense_unpack(dense_pack(tensor, bits), bits, len(codes)), tensor)


def test_known_words():
    # all ones: the constants by which GPTQ's first format is off
    assert dense_pack(torch.ones(8, dtype=torch.uint8), 4).tolist() == [0x11111111]
    three = dense_pack(torch.ones(32, dtype=torch.uint8), 3)
    assert [int(w) & 0xFFFFFFFF for w in three] == [0x49249249, 0x92492492, 0x24924924]
