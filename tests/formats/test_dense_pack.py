"""dense_pack against its definition, bit by bit."""

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attar.formats import dense_pack as module
from attar.formats.dense_pack import dense_pack, dense_unpack


def words_of(codes, bits):
    """The description itself: one long number, cut into words."""
    number = sum(int(code) << (index * bits) for index, code in enumerate(codes))
    return [number >> (32 * word) & 0xFFFFFFFF for word in range(-(-len(codes) * bits // 32))]


def unsigned(packed):
    return [word & 0xFFFFFFFF for word in packed.tolist()]


def random_codes(shape, bits, dtype=torch.uint8):
    g = torch.Generator().manual_seed(bits)
    return torch.randint(0, 2**bits, shape, generator=g).to(dtype)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("length", [1, 7, 31, 32, 33, 96])
def test_is_the_little_endian_bit_string(bits, length):
    codes = random_codes((3, length), bits)
    packed = dense_pack(codes, bits)
    assert packed.dtype == torch.int32 and packed.shape == (3, -(-length * bits // 32))
    for row in range(3):
        assert unsigned(packed[row]) == words_of(codes[row], bits)


@given(bits=st.integers(1, 8), codes=st.lists(st.integers(0, 255), min_size=1, max_size=140))
def test_any_codes_of_any_width_and_length(bits, codes):
    tensor = torch.tensor([code % 2**bits for code in codes], dtype=torch.uint8)
    packed = dense_pack(tensor, bits)
    assert unsigned(packed) == words_of(tensor.tolist(), bits)
    assert torch.equal(dense_unpack(packed, bits, len(codes)), tensor)


@given(
    bits=st.integers(1, 8),
    words=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=24),
    data=st.data(),
)
def test_any_words_are_read_by_the_description(bits, words, data):
    """Unpacking depends on the words alone; padding bits at the end are ignored."""
    length = data.draw(st.integers(1, len(words) * 32 // bits))
    number = sum((word & 0xFFFFFFFF) << (32 * index) for index, word in enumerate(words))
    wanted = [number >> (index * bits) & (2**bits - 1) for index in range(length)]
    assert dense_unpack(torch.tensor(words, dtype=torch.int32), bits, length).tolist() == wanted


@settings(max_examples=20, deadline=None)
@given(bits=st.integers(1, 8), rows=st.integers(1, 5), columns=st.integers(1, 70))
def test_pieces_leave_no_seam(bits, rows, columns):
    codes = random_codes((2, rows, columns), bits)
    whole = dense_pack(codes, bits), dense_unpack(dense_pack(codes, bits), bits, columns)
    before = module.PIECE
    module.PIECE = 32
    try:
        small = dense_pack(codes, bits), dense_unpack(whole[0], bits, columns)
    finally:
        module.PIECE = before
    assert all(torch.equal(a, b) for a, b in zip(whole, small, strict=True))
    assert torch.equal(small[1], codes)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_any_type_of_whole_numbers_and_any_strides(dtype):
    codes = random_codes((40, 33), 5, dtype)
    before = codes.clone()
    packed = dense_pack(codes.T, 5)
    assert packed.shape == (33, 7) and packed.is_contiguous()
    assert unsigned(packed[4]) == words_of(codes[:, 4], 5)
    assert torch.equal(dense_unpack(packed.T.contiguous().T, 5, 40), codes.T.to(torch.uint8))
    assert torch.equal(codes, before)


def test_nothing_packs_to_nothing():
    assert dense_pack(torch.zeros(0, 32, dtype=torch.uint8), 3).shape == (0, 3)
    assert dense_pack(torch.zeros(2, 0, dtype=torch.uint8), 3).shape == (2, 0)
    assert dense_unpack(torch.zeros(2, 0, dtype=torch.int32), 3, 0).shape == (2, 0)


def test_known_words():
    # all ones: the constants by which GPTQ's first format is off
    assert dense_pack(torch.ones(8, dtype=torch.uint8), 4).tolist() == [0x11111111]
    three = dense_pack(torch.ones(32, dtype=torch.uint8), 3)
    assert unsigned(three) == [0x49249249, 0x92492492, 0x24924924]
    assert unsigned(dense_pack(torch.arange(8, dtype=torch.uint8), 4)) == [0x76543210]
    assert unsigned(dense_pack(torch.full((4,), 255, dtype=torch.uint8), 8)) == [0xFFFFFFFF]


def test_a_billion_codes_would_take_seconds():
    codes = random_codes((1024, 8192), 4)
    begin = time.process_time()
    packed = dense_pack(codes, 4)
    middle = time.process_time()
    dense_unpack(packed, 4, 8192)
    share = codes.numel() / 1e9
    assert (middle - begin) / share < 60 and (
        time.process_time() - middle
    ) / share < 60  # seconds of one core
