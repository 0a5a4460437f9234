"""Layouts of one Linear: announced shapes, and a decoder that goes through the description by element."""

import pytest
import torch

from attar.checkpoint.tensors import stored_dtype
from attar.formats.coded import FP4, Coded
from attar.formats.layouts import decode, encode, layout
from attar.formats.rules import FLOAT, INT, MXFP4, NAIVE, NVFP4, PACK, WeightRule

ROWS, COLUMNS = 6, 48


def strategies(kind, bits, symmetric=True):
    result = {
        "tensor": WeightRule(kind, bits, "tensor", symmetric=symmetric),
        "channel": WeightRule(kind, bits, "channel", symmetric=symmetric),
        "group": WeightRule(kind, bits, "group", 16, symmetric),
        "block": WeightRule(kind, bits, "block", symmetric=symmetric, block=(4, 32)),
    }
    return result if symmetric else {name: result[name] for name in ("tensor", "channel", "group")}


def coded(rule, seed=0):
    """Random codes and parameters of a rule."""
    g = torch.Generator().manual_seed(seed)
    tiles = rule.tiles((ROWS, COLUMNS))
    scale = torch.rand(tiles, generator=g).to(torch.bfloat16).float() + 0.5
    if rule.kind == "float":
        codes = torch.randn(ROWS, COLUMNS, generator=g).to(torch.float8_e4m3fn)
        return Coded(codes, scale)
    half = 2 ** (rule.bits - 1)
    codes = torch.randint(-half, half, (ROWS, COLUMNS), generator=g).to(torch.int8)
    zero = None if rule.symmetric else torch.randint(-half, half, tiles, generator=g).float()
    return Coded(codes, scale.to(torch.bfloat16).float(), zero)


def field(words, index, bits):
    """Field ``index`` of a little-endian string of 32-bit words."""
    number = sum((int(word) & 0xFFFFFFFF) << (32 * position) for position, word in enumerate(words))
    return number >> (index * bits) & (2**bits - 1)


def by_loops(tensors, rule, form):
    height, width = rule.tile((ROWS, COLUMNS))
    scales, offset = tensors["weight_scale"], 2 ** (rule.bits - 1)
    weight = torch.zeros(ROWS, COLUMNS, dtype=torch.float64)
    for n in range(ROWS):
        for k in range(COLUMNS):
            p, g = n // height, k // width
            if form == PACK:
                code = field(tensors["weight_packed"][n], k, rule.bits) - offset
            else:
                code = float(tensors["weight"][n, k])
            if "weight_zero_point" in tensors:
                zeros = tensors["weight_zero_point"]
                if rule.strategy == "tensor":
                    code -= int(zeros)
                elif form == PACK:
                    code -= field(zeros[:, g], n, rule.bits) - offset
                else:
                    code -= int(zeros[p, g])
            weight[n, k] = code * float(scales if scales.numel() == 1 else scales[p, g])
    return weight.to(scales.dtype)


CASES = [
    *((rule, PACK) for bits in range(1, 9) for rule in strategies("int", bits).values() if not rule.block),
    *((rule, PACK) for bits in (1, 3, 4, 8) for rule in strategies("int", bits, False).values()),
    *((rule, INT) for rule in strategies("int", 8).values()),
    *((rule, INT) for rule in strategies("int", 4, False).values()),
    *((rule, FLOAT) for rule in strategies("float", 8).values()),
    *((rule, NAIVE) for kind in ("int", "float") for rule in strategies(kind, 8).values()),
]


@pytest.mark.few(10)
@pytest.mark.parametrize(
    ("rule", "form"), CASES, ids=[f"{f}-{r.kind}{r.bits}-{r.strategy}-{r.symmetric}" for r, f in CASES]
)
def test_decoding_agrees_with_loops_over_the_description(rule, form):
    encoded = coded(rule)
    tensors = encode(encoded, rule, form, torch.bfloat16)
    assert torch.equal(decode(tensors, rule, form), by_loops(tensors, rule, form))
    code = stored_dtype(encoded.codes.dtype)
    assert layout((ROWS, COLUMNS), rule, form, "BF16", code) == {
        name: (stored_dtype(value.dtype), tuple(value.shape)) for name, value in tensors.items()
    }


@pytest.mark.parametrize("symmetric", [True, False])
def test_inputs_may_name_their_group(symmetric):
    rule = WeightRule("int", 4, "group", 16, symmetric, ordered=True)
    encoded = coded(rule)
    order = torch.arange(COLUMNS) // 16
    order = order[torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(3))]
    encoded = Coded(encoded.codes, encoded.scale, encoded.zero, g_idx=order)
    tensors = encode(encoded, rule, PACK, torch.bfloat16)
    assert layout((ROWS, COLUMNS), rule, PACK, "BF16")["weight_g_idx"] == ("I32", (COLUMNS,))
    zero = 0 if symmetric else encoded.zero[:, order]
    wanted = ((encoded.codes.float() - zero) * encoded.scale[:, order]).to(torch.bfloat16)
    assert torch.equal(decode(tensors, rule, PACK), wanted)


def fp4(byte):
    return -FP4[byte & 7] if byte & 8 else FP4[byte & 7]


@pytest.mark.parametrize("form", [NVFP4, MXFP4])
def test_fp4_bytes(form):
    g = torch.Generator().manual_seed(4)
    strategy, size = ("tensor_group", 16) if form == NVFP4 else ("group", 32)
    rule = WeightRule("float", 4, strategy, size)
    codes = torch.randint(0, 16, (ROWS, 64), generator=g, dtype=torch.uint8)
    if form == NVFP4:
        local = (torch.rand(ROWS, 4, generator=g) * 400 + 1).to(torch.float8_e4m3fn)
        above = torch.tensor([2688 / 3.7])
        encoded = Coded(codes, local.float() / above, global_scale=above)
    else:
        exponent = torch.randint(-20, 20, (ROWS, 2), generator=g).float()
        encoded = Coded(codes, torch.exp2(exponent))
    tensors = encode(encoded, rule, form, torch.float32)
    got = decode(tensors, rule, form)
    assert got.dtype == torch.bfloat16
    for n in range(ROWS):
        for k in range(64):
            byte = int(tensors["weight_packed"][n, k // 2])
            value = fp4(byte >> 4 if k % 2 else byte & 15)
            if form == NVFP4:
                assert tensors["weight_scale"][n, k // 16] == local[n, k // 16]
                scale = tensors["weight_scale"].float()[n, k // 16] / tensors["weight_global_scale"]
            else:
                scale = torch.tensor(2.0 ** (int(tensors["weight_scale"][n, k // 32]) - 127))
            assert got[n, k] == (value * scale).to(torch.bfloat16)
    assert layout((ROWS, 64), rule, form, "F32") == {
        name: (stored_dtype(value.dtype), tuple(value.shape)) for name, value in tensors.items()
    }


def test_every_exponent_of_mxfp4_comes_back():
    rule = WeightRule("float", 4, "group", 32)
    stored = torch.arange(1, 255, dtype=torch.uint8).reshape(-1, 1)
    packed = torch.full((254, 16), 0x22, dtype=torch.uint8)
    got = decode({"weight_packed": packed, "weight_scale": stored}, rule, MXFP4)
    wanted = torch.tensor([2.0 ** (int(byte) - 127) for byte in stored.flatten()], dtype=torch.float64)
    assert torch.equal(got[:, 0].double(), wanted)
    again = encode(Coded(torch.full((254, 32), 2), got[:, :1].float()), rule, MXFP4, torch.float32)
    assert torch.equal(again["weight_scale"], stored)


def test_nothing_is_modified():
    rule = WeightRule("int", 4, "group", 16, symmetric=False)
    encoded = coded(rule)
    before = encoded.codes.clone(), encoded.scale.clone(), encoded.zero.clone()
    encode(encoded, rule, PACK, torch.bfloat16)
    assert all(
        torch.equal(a, b) for a, b in zip(before, (encoded.codes, encoded.scale, encoded.zero), strict=True)
    )
