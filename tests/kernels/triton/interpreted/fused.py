"""Norms, rotary embedding with the write, and activations in Triton's interpreter, against float64."""

import pytest
import torch
import triton
import triton.language as tl

from attar.kernels import kv_int4
from attar.kernels.kv_codes import encode
from attar.kernels.triton import fused
from attar.kernels.triton.rounding import e4m3_bits, e4m3_value


def rms(x, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize("outputs", ["none", "dense", "experts", "both"])
@pytest.mark.parametrize("post", [False, True])
@pytest.mark.parametrize("H", [48, 1040])
def test_outputs_are_added_and_the_sum_is_normed(H, post, outputs):
    T, k, eps = 3, 4, 1e-5
    x, weight = torch.randn(T, H), torch.randn(H)
    y = torch.randn(T, H).bfloat16() if outputs in ("dense", "both") else None
    share = torch.rand(T) if outputs == "both" else None
    routed = torch.randn(T, k, H).bfloat16() if outputs in ("experts", "both") else None
    shares = None if routed is None else torch.rand(T, k)
    after = torch.randn(H) if post and outputs != "none" else None
    expected = x.double()
    total = torch.zeros(T, H, dtype=torch.float64)
    if routed is not None:
        total += (routed.double() * shares.double()[..., None]).sum(1)
    if y is not None:
        total += y.double() * (1 if share is None else share.double()[:, None])
    if after is not None:
        total = rms(total, eps) * after
    expected = expected + total
    out = fused.add_norm(x, y, share, routed, shares, after, weight, eps, torch.float32)
    torch.testing.assert_close(x.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.double(), rms(expected, eps) * weight, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped_swiglu"])
def test_gated_activations_are_their_formulas(activation):
    gate_up = torch.randn(3, 2 * 700) * 6
    gate, up = gate_up.double().chunk(2, 1)
    if activation == "silu":
        expected = torch.nn.functional.silu(gate) * up
    elif activation == "gelu_tanh":
        expected = torch.nn.functional.gelu(gate, approximate="tanh") * up
    else:
        gate, up = gate.clamp(max=7), up.clamp(-7, 7)
        expected = gate * torch.sigmoid(1.702 * gate) * (up + 1)
    ours = fused.gated(gate_up, activation)
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-5)


STORES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn]


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("norm", ["none", "head", "wide"])
@pytest.mark.parametrize("h, g, d, r", [(6, 2, 24, 24), (3, 3, 20, 8), (2, 1, 64, 0)])
def test_queries_are_rotated_and_keys_and_values_go_to_their_slots(h, g, d, r, norm, store):
    T, blocks, B, eps, scale = 5, 4, 3, 1e-6, 0.3
    qkv, positions = torch.randn(T, (h + 2 * g) * d), torch.tensor([0, 7, 7, 2, 19]).int()
    qkv[1, h * d : (h + 1) * d] = 0.0  # a key of zeros
    slots = torch.tensor([11, 0, 5, 6, 1]).int()
    angle = torch.rand(20, r // 2) * 6
    rotary = torch.cat([angle.cos(), angle.sin()], 1) if r else None
    wide = norm == "wide"
    norms = [torch.rand(n * d if wide else d) + 0.5 if norm != "none" else None for n in (h, g)]
    scaled = store in (torch.int8, torch.float8_e4m3fn)
    plane = torch.zeros(2, blocks, B, g, d).to(store)
    scales = torch.zeros(2, blocks, B, g, 1) if scaled else (None, None)
    q = fused.rope_write(qkv, positions, slots, rotary, *norms, *plane, *scales, None, h, eps, scale, wide)

    queries, keys, values = qkv.double().split([h * d, g * d, g * d], 1)
    rotated = []
    for x, n, weight in ((queries, h, norms[0]), (keys, g, norms[1])):
        if weight is not None:
            x = (rms(x, eps) if wide else rms(x.unflatten(1, (n, d)), eps)).reshape(T, -1)
            x = x * (weight if wide else weight.repeat(n))
        x = x.unflatten(1, (n, d))
        if r:
            at = angle[positions.long()].double()[:, None]
            a, b = x[..., : r // 2], x[..., r // 2 : r]
            x = torch.cat([a * at.cos() - b * at.sin(), b * at.cos() + a * at.sin(), x[..., r:]], -1)
        rotated.append(x)
    torch.testing.assert_close(q.double(), rotated[0] * scale, rtol=1e-5, atol=1e-5)
    for kind, x in enumerate((rotated[1], values.unflatten(1, (g, d)))):
        rows = plane[kind].flatten(0, 1)[slots.long()]
        if scaled:
            s = scales[kind].flatten(0, 1)[slots.long()]
            codes, expected = encode(x.float(), store)
            torch.testing.assert_close(s, expected, rtol=1e-5, atol=0)
            if kind == 1:  # the same numbers: the same bytes
                assert torch.equal(rows.view(torch.int8), codes.view(torch.int8))
            assert (rows.float() * s - x.float()).abs().max() <= (
                0.51 / 127 if store == torch.int8 else 1 / 16
            ) * x.abs().max()
        else:
            assert torch.allclose(rows.double(), x, rtol=2**-7 if store != torch.float32 else 1e-5, atol=1e-5)
    untouched = torch.ones(blocks * B, dtype=torch.bool)
    untouched[slots.long()] = False
    assert not plane.view(torch.uint8).reshape(2, blocks * B, -1)[:, untouched].any()


@pytest.mark.parametrize("h, g, d", [(4, 2, 24), (2, 1, 64), (3, 3, 20)])
def test_four_bit_codes_are_those_of_their_definition(h, g, d):
    T, blocks, B = 40, 4, 16
    factors, centers = torch.rand(g, d) + 0.5, torch.randn(2, g, d) * 2
    basis = torch.stack((factors, 1 / factors, *kv_int4.rotated(centers * factors)), dim=1)
    qkv, positions, slots = (
        torch.randn(T, (h + 2 * g) * d),
        torch.zeros(T).int(),
        torch.randperm(64)[:T].int(),
    )
    qkv[0, h * d :] = 0.0  # keys and values of zeros
    codes = torch.zeros(2, blocks, B, g, d // 2, dtype=torch.uint8)
    pairs = torch.zeros(2, blocks, B, g, 2, dtype=torch.float16)
    q = fused.rope_write(qkv, positions, slots, None, None, None, *codes, *pairs, basis, h, 1e-6, 0.3, False)
    queries, keys, values = qkv.unflatten(1, (-1, d)).split([h, g, g], 1)
    turned = kv_int4.rotated(queries * 0.3 / factors.repeat_interleave(h // g, 0))
    torch.testing.assert_close(q, turned, rtol=1e-5, atol=1e-5)
    for kind, wanted in enumerate((kv_int4.encode(keys, factors, centers), kv_int4.encode(values))):
        for plane, expected in zip((codes, pairs), wanted, strict=True):
            stored = plane[kind].flatten(0, 1)[slots.long()]
            same = (stored == expected).flatten(1).all(1)
            assert same.float().mean() > 0.9, "sums of another order choose another neighbour at times"
            torch.testing.assert_close(stored[same], expected[same], rtol=0, atol=0)
    assert (pairs[0, ..., 0] < 0).any() and not (pairs[1, ..., 0] < 0).any()


@triton.jit
def both_ways(x, codes, back, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    code = e4m3_bits(tl.load(x + i))
    tl.store(codes + i, code)
    tl.store(back + i, e4m3_value(code))


def test_every_fp8_byte_is_written_and_read_as_torch_does():
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    every = every[every.isfinite()]
    halves = (every.sort().values[1:] + every.sort().values[:-1]) / 2
    x = torch.cat(
        [
            every,
            halves,
            halves.nextafter(torch.tensor(500.0)),
            torch.randn(1024) * 20,
            torch.randn(1024) * 0.01,
        ]
    )
    x = torch.nn.functional.pad(x, (0, 4096 - len(x)))
    codes, back = torch.empty(4096, dtype=torch.int8), torch.empty(4096, dtype=torch.float16)
    both_ways[(1,)](x, codes, back, 4096)
    expected = x.to(torch.float8_e4m3fn)
    assert torch.equal(codes, expected.view(torch.int8))
    assert torch.equal(back.float() * 256, expected.float())
