"""Blocks of ggml's types: bytes written and read back, against the gguf package, decoders that go bit by bit,
and bytes set by hand."""

import struct

import gguf
import numpy as np
import pytest
import torch

from attar.errors import CheckpointError, ModelError, NumericsError
from attar.formats.gguf import blocks as module
from attar.formats.gguf.blocks import FLOATS, IQ4_LEVELS, LAYOUTS, check_blocks, dequantize, pack, unpack
from attar.formats.gguf.types import TYPES, row_bytes
from attar.quantization.grids import GGML, MXFP4Grid
from attar.quantization.grids import ggml as grids
from attar.quantization.methods.rtn import rtn

KINDS = list(LAYOUTS)
N, K = 5, 512
BITS = {
    "Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q5_1": 5, "Q8_0": 8, "Q2_K": 2, "Q3_K": 3, "Q4_K": 4, "Q5_K": 5,
    "Q6_K": 6, "IQ4_NL": 4, "IQ4_XS": 4, "MXFP4": 4, "NVFP4": 4,
}  # fmt: skip
# name: tiles of a block, smallest, largest
WHOLE = {
    "Q2_K": {"scale_codes": (16, 0, 15), "minimum_codes": (16, 0, 15)},
    "Q3_K": {"scale_codes": (16, 0, 63)},
    "Q4_K": {"scale_codes": (8, 0, 63), "minimum_codes": (8, 0, 63)},
    "Q5_K": {"scale_codes": (8, 0, 63), "minimum_codes": (8, 0, 63)},
    "Q6_K": {"scale_codes": (16, -128, 127)},
    "IQ4_XS": {"scale_codes": (8, 0, 63)},
    "MXFP4": {"exponent": (1, 0, 255)},
    "NVFP4": {"e4m3": (4, 0, 255)},
}
HALVES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "Q3_K", "Q6_K", "IQ4_NL", "IQ4_XS"), ("d",)),
    **dict.fromkeys(("Q4_1", "Q5_1"), ("d", "m")),
    **dict.fromkeys(("Q2_K", "Q4_K", "Q5_K"), ("d", "dmin")),
    **dict.fromkeys(("MXFP4", "NVFP4"), ()),
}


def generator(seed):
    return torch.Generator().manual_seed(seed)


def numbers(low, high, shape, seed):
    """Whole numbers of a field, its two ends among them."""
    values = torch.randint(low, high + 1, shape, generator=generator(seed))
    values.view(-1)[:2] = torch.tensor([low, high])
    return values


def fields(kind, rows=N, columns=K, seed=0):
    """Codes and stored numbers over their whole range."""
    block = TYPES[kind].block
    low, high = (-128, 127) if kind == "Q8_0" else (0, 2 ** BITS[kind] - 1)
    codes = numbers(low, high, (rows, columns), seed).to(torch.int8 if kind == "Q8_0" else torch.uint8)
    stored = {}
    for at, name in enumerate(HALVES[kind]):
        raw = numbers(-(2**15), 2**15 - 1, (rows, columns // block), seed + at + 1)
        stored[name] = raw.to(torch.int16).view(torch.float16)
    for at, (name, (tiles, least, most)) in enumerate(WHOLE.get(kind, {}).items()):
        values = numbers(least, most, (rows, columns // block * tiles), seed + at + 9)
        stored[name] = values.to(torch.int8 if least < 0 else torch.uint8)
    return codes, stored


def same_bits(a, b):
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def random_bytes(kind, rows=N, columns=K, seed=3):
    """Any bytes at all, but for float16 numbers that are finite and exponents that are not 255."""
    data = torch.randint(
        0, 256, (rows, row_bytes(kind, columns)), dtype=torch.uint8, generator=generator(seed)
    )
    item = data.view(-1, TYPES[kind].size)
    for at in LAYOUTS[kind].halves.values():
        item[:, at + 1] &= 0xBB  # the highest and the lowest bit of the exponent
    if kind == "MXFP4":
        item[:, 0] %= 253
    return data


def theirs(kind, data):
    """The gguf package's weights."""
    return torch.from_numpy(gguf.quants.dequantize(data.numpy(), gguf.GGMLQuantizationType[kind]))


@pytest.mark.parametrize("kind", KINDS)
def test_fields_come_back_bit_for_bit(kind):
    codes, stored = fields(kind)
    before = codes.clone(), {name: value.clone() for name, value in stored.items()}
    data = pack(kind, codes, stored)
    assert data.dtype == torch.uint8 and data.shape == (N, row_bytes(kind, K))
    assert same_bits(codes, before[0]) and all(same_bits(stored[name], before[1][name]) for name in stored)
    again, kept = unpack(kind, data, K)
    assert same_bits(again, codes)
    assert kept.keys() == stored.keys()
    assert all(same_bits(kept[name], stored[name]) for name in stored)


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_come_back_bit_for_bit(kind):
    data = torch.randint(0, 256, (N, row_bytes(kind, K)), dtype=torch.uint8, generator=generator(1))
    before = data.clone()
    assert torch.equal(pack(kind, *unpack(kind, data, K)), data)
    assert torch.equal(data, before)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_the_gguf_packages(kind):
    data = random_bytes(kind)
    weights = dequantize(kind, data, K)
    assert weights.isfinite().all() and weights.std() > 0
    assert same_bits(weights, theirs(kind, data))


def extreme(kind, half, byte):
    """Blocks of one byte repeated, their float16 numbers set."""
    data = torch.full((2, row_bytes(kind, K)), byte, dtype=torch.uint8)
    item = data.view(-1, TYPES[kind].size)
    for at in LAYOUTS[kind].halves.values():
        item[:, at : at + 2] = torch.tensor([half & 255, half >> 8], dtype=torch.uint8)
    return data


@pytest.mark.few(78)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("half", [0x0000, 0x8000, 0x0001, 0x83FF, 0x7BFF, 0xFBFF])
@pytest.mark.parametrize("byte", [0, 0xFE, 0x7F, 0x80])
def test_extreme_blocks_are_the_gguf_packages(kind, half, byte):
    """Zeros of both signs, the smallest and the largest float16, least and greatest codes and sub-scales."""
    data = extreme(kind, half, byte)
    with np.errstate(over="ignore"):
        assert same_bits(dequantize(kind, data, K), theirs(kind, data))
    if half == 0 and kind not in ("MXFP4", "NVFP4"):
        assert (dequantize(kind, data, K) == 0).all()


def test_every_exponent_of_mxfp4_is_the_gguf_packages():
    data = torch.zeros((256, 17), dtype=torch.uint8)
    data[:, 0] = torch.arange(256)
    data[:, 1:] = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2)
    with np.errstate(over="ignore"):
        assert same_bits(dequantize("MXFP4", data, 32), theirs("MXFP4", data))


def test_every_scale_of_nvfp4_is_the_gguf_packages():
    data = torch.zeros((256, 36), dtype=torch.uint8)
    data[:, :4] = torch.arange(256)[:, None]
    data[:, 4:] = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 4)
    assert same_bits(dequantize("NVFP4", data, 64), theirs("NVFP4", data))
    with pytest.raises(NumericsError, match="w: e4m3 of NVFP4 is NaN or infinite, 8 times"):
        check_blocks("NVFP4", data, "w")


def half(raw, at):
    return struct.unpack("<e", raw[at : at + 2])[0]


def six_bits(raw, i):
    """Scale and minimum i of a Q4_K or Q5_K block, after the picture in ggml-common.h."""
    packed = raw[4:16]
    if i < 4:
        return packed[i] & 63, packed[i + 4] & 63
    low = packed[i + 4]
    return (low & 15) | (packed[i - 4] >> 6) << 4, low >> 4 | (packed[i] >> 6) << 4


def slow_q2_k(raw, i):
    sub, part, within = raw[i // 16], i // 128, i % 128
    q = raw[16 + 32 * part + within % 32] >> 2 * (within // 32) & 3
    return half(raw, 80) * (sub & 15) * q - half(raw, 82) * (sub >> 4)


def slow_q3_k(raw, i):
    j = i // 16
    scale = (raw[96 + j % 8] >> 4 * (j // 8) & 15) | (raw[104 + j % 4] >> 2 * (j // 4) & 3) << 4
    low = raw[32 + 32 * (i // 128) + i % 32] >> 2 * (i % 128 // 32) & 3
    high = raw[i % 32] >> i // 32 & 1
    return half(raw, 108) * (scale - 32) * (low + 4 * high - 4)


def slow_q4_k(raw, i):
    scale, minimum = six_bits(raw, i // 32)
    q = raw[16 + 32 * (i // 64) + i % 32] >> 4 * (i % 64 // 32) & 15
    return half(raw, 0) * scale * q - half(raw, 2) * minimum


def slow_q5_k(raw, i):
    scale, minimum = six_bits(raw, i // 32)
    low = raw[48 + 32 * (i // 64) + i % 32] >> 4 * (i % 64 // 32) & 15
    high = raw[16 + i % 32] >> 2 * (i // 64) + i % 64 // 32 & 1
    return half(raw, 0) * scale * (low + 16 * high) - half(raw, 2) * minimum


def slow_q6_k(raw, i):
    part, within = i // 128, i % 128
    run, at = within // 32, within % 32
    low = raw[64 * part + 32 * (run % 2) + at] >> 4 * (run // 2) & 15
    high = raw[128 + 32 * part + at] >> 2 * run & 3
    scale = struct.unpack("b", raw[192 + i // 16 : 193 + i // 16])[0]
    return half(raw, 208) * scale * (low + 16 * high - 32)


def slow_iq4_xs(raw, i):
    j = i // 32
    high = struct.unpack("<H", raw[2:4])[0] >> 2 * j & 3
    scale = (raw[4 + j // 2] >> 4 * (j % 2) & 15) | high << 4
    q = raw[8 + 16 * j + i % 16] >> 4 * (i % 32 // 16) & 15
    return half(raw, 0) * (scale - 32) * IQ4_LEVELS[q]


def slow_q5_1(raw, i):
    high = struct.unpack("<I", raw[4:8])[0] >> i & 1
    low = raw[8 + i % 16] >> 4 * (i // 16) & 15
    return half(raw, 0) * (low + 16 * high) + half(raw, 2)


SLOW = {
    "Q2_K": slow_q2_k, "Q3_K": slow_q3_k, "Q4_K": slow_q4_k, "Q5_K": slow_q5_k, "Q6_K": slow_q6_k,
    "IQ4_XS": slow_iq4_xs, "Q5_1": slow_q5_1,
}  # fmt: skip


@pytest.mark.parametrize("kind", SLOW)
def test_decoders_that_go_weight_by_weight_agree(kind):
    """In float64: a weight in float32 is off by two roundings of its two terms at most."""
    block, size = TYPES[kind].block, TYPES[kind].size
    data = random_bytes(kind, 2, K, seed=5)
    weights = dequantize(kind, data, K).double().reshape(-1, block)
    for raw, row in zip(data.view(-1, size), weights, strict=True):
        expected = torch.tensor(
            [SLOW[kind](bytes(raw.tolist()), i) for i in range(block)], dtype=torch.float64
        )
        assert torch.allclose(row, expected, rtol=0, atol=3e-7 * float(expected.abs().max()))


def test_bytes_set_by_hand():
    """Q4_0: d = -0.5 (0xb800), code j for weights j and 15 - j for weights 16 + j."""
    codes = torch.cat([torch.arange(16), torch.arange(15, -1, -1)]).to(torch.uint8)[None]
    data = pack("Q4_0", codes, {"d": torch.tensor([[-0.5]], dtype=torch.float16)})
    assert bytes(data[0].tolist()).hex() == "00b8f0e1d2c3b4a5968778695a4b3c2d1e0f"
    assert dequantize("Q4_0", data, 32)[0, :3].tolist() == [4.0, 3.5, 3.0]
    exponent = torch.tensor([[128]], dtype=torch.uint8)
    data = pack("MXFP4", codes, {"exponent": exponent})
    assert bytes(data[0].tolist()).hex() == "80f0e1d2c3b4a5968778695a4b3c2d1e0f"
    assert dequantize("MXFP4", data, 32)[0, :9].tolist() == [0, 1, 2, 3, 4, 6, 8, 12, 0]


@pytest.mark.parametrize("kind", [*GGML, "MXFP4"])
def test_bytes_of_a_grids_codes_decode_as_the_grid_does(kind):
    weight = torch.randn(6, K, generator=generator(2)) * 0.02
    weight[1] = 0
    weight[2, 7] = 50.0
    quantized = rtn(weight, GGML[kind] if kind in GGML else MXFP4Grid())
    data = pack(kind, quantized.codes, quantized.parameters.stored)
    assert torch.equal(dequantize(kind, data, K), quantized.dequantize())
    assert data.numel() * 8 == quantized.grid.bits_per_weight((6, K)) * weight.numel()
    codes, stored = unpack(kind, data, K)
    assert same_bits(codes, quantized.codes)
    assert all(same_bits(stored[name], value) for name, value in quantized.parameters.stored.items())
    check_blocks(kind, data, "weight")


def test_the_levels_are_the_grids():
    assert IQ4_LEVELS == grids.IQ4_LEVELS
    assert tuple((2 * MXFP4Grid().level(torch.arange(16))).tolist()) == module.FP4_DOUBLED


@pytest.mark.parametrize("kind", KINDS)
def test_parts_make_the_whole(kind, monkeypatch):
    codes, stored = fields(kind)
    data, finite = pack(kind, codes, stored), random_bytes(kind)
    weights = dequantize(kind, finite, K)
    monkeypatch.setattr(module, "CHUNK", 3 * TYPES[kind].block)
    assert torch.equal(pack(kind, codes, stored), data)
    assert same_bits(unpack(kind, data, K)[0], codes)
    assert same_bits(dequantize(kind, finite, K), weights)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_in_any_order_and_at_any_address(kind):
    codes, stored = fields(kind)
    data = pack(kind, codes, stored)
    turned = {name: value.T.contiguous().T for name, value in stored.items()}
    assert torch.equal(pack(kind, codes.T.contiguous().T, turned), data)
    shifted = torch.cat([torch.zeros(1, dtype=torch.uint8), data.flatten()])[1:].view(data.shape)
    again, kept = unpack(kind, shifted, K)
    assert same_bits(again, codes) and all(same_bits(kept[name], stored[name]) for name in stored)
    assert torch.equal(pack(kind, *unpack(kind, shifted[:1], K)), data[:1])
    moved = torch.cat([codes.flatten()[:1], codes.flatten()])[1:].view(codes.shape)
    assert torch.equal(pack(kind, moved, stored), data)


@pytest.mark.parametrize("kind", FLOATS)
def test_float_types_are_their_bytes(kind):
    values = torch.randn(3, 7, generator=generator(4))
    data = pack(kind, values, {})
    assert data.shape == (3, row_bytes(kind, 7)) and data.dtype == torch.uint8
    rounded = values.to(FLOATS[kind])
    assert same_bits(unpack(kind, data, 7)[0], rounded) and unpack(kind, data, 7)[1] == {}
    assert torch.equal(dequantize(kind, data, 7), rounded.float())
    assert same_bits(dequantize(kind, data, 7), theirs(kind, data).float())
    shifted = torch.cat([torch.zeros(1, dtype=torch.uint8), data.flatten()])[1:].view(data.shape)
    assert torch.equal(dequantize(kind, shifted, 7), rounded.float())
    assert data.numpy().tobytes() == rounded.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if HALVES[kind]])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_scales_that_are_not_finite_are_refused_by_name(kind, value):
    data = random_bytes(kind)
    check_blocks(kind, data, "blk.0.ffn_up.weight")
    for name in HALVES[kind]:
        codes, stored = unpack(kind, data, K)
        stored[name][3, 0] = value
        message = rf"blk\.0\.ffn_up\.weight: {name} of {kind} is NaN or infinite, 1 times of"
        with pytest.raises(NumericsError, match=message):
            check_blocks(kind, pack(kind, codes, stored), "blk.0.ffn_up.weight")


def test_exponents_that_are_not_finite_are_refused():
    codes = torch.zeros((1, 96), dtype=torch.uint8)
    exponent = torch.tensor([[0, 252, 254]], dtype=torch.uint8)
    codes[0, 40], codes[0, 70] = 7, 1  # 6 * 2^125 and 0.5 * 2^127 are finite
    data = pack("MXFP4", codes, {"exponent": exponent})
    check_blocks("MXFP4", data, "w")
    assert dequantize("MXFP4", data, 96).isfinite().all()
    for code, most in ((7, 254), (7, 253), (0, 255)):
        codes[0, 70], exponent[0, 2] = code, most
        data = pack("MXFP4", codes, {"exponent": exponent})
        with pytest.raises(NumericsError, match=r"w: exponent of MXFP4 .* 1 times of 3"):
            check_blocks("MXFP4", data, "w")


@pytest.mark.parametrize("kind", FLOATS)
def test_weights_that_are_not_finite_are_refused(kind):
    values = torch.ones(2, 3)
    check_blocks(kind, pack(kind, values, {}), "w")
    values[1, 1] = 1e6 if kind == "F16" else float("nan")  # beyond float16
    with pytest.raises(NumericsError, match=f"w: weight of {kind} is NaN or infinite, 1 times of 6"):
        check_blocks(kind, pack(kind, values, {}), "w")


def test_whole_numbers_are_not_checked():
    check_blocks("I32", torch.full((1, 8), 255, dtype=torch.uint8), "tokens")


def test_what_does_not_fit_is_refused():
    codes, stored = fields("Q4_K")
    with pytest.raises(ModelError, match=r"rows of 500 weights cannot be stored as Q4_K"):
        pack("Q4_K", codes[:, :500], stored)
    data = pack("Q4_K", codes, stored)
    for read in (unpack, dequantize):
        with pytest.raises(
            CheckpointError, match=r"rows of 288 torch.uint8 are not 256 weights of Q4_K.* 144 "
        ):
            read("Q4_K", data, 256)
        with pytest.raises(CheckpointError, match=r"rows of 576 torch.float32"):
            read("F32", data.float().repeat(1, 2), 144)
    with pytest.raises(AssertionError):
        pack("Q4_K", codes + 16, stored)
    with pytest.raises(KeyError, match="dmin"):
        pack("Q4_K", codes, {name: value for name, value in stored.items() if name != "dmin"})
