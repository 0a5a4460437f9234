"""What lies between the products of a layer: residual sums with norms, rotary embedding with the write of
keys and values, gated activations. Arguments as in ``kernels/device``; all arithmetic is float32.

    add_norm     x += sum of a layer's outputs ;  y = x / rms(x) w
    rope_write   norm and rotary embedding of queries and keys ;  keys and values into their slots, rounded
                 as the store has them
    gated        act(gate) up

FP8 (e4m3) is rounded by its bits, so that cards without such conversions (before sm_89) write the same bytes.
Codes of 4 bits are those of ``kernels/kv_int4.py``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attar.kernels import kv_int4
from attar.kernels.triton.rounding import e4m3_bits, hadamard, round_even, tanh

NUMBERS = 512  # of gated in a program
FLOOR = tl.constexpr(1e-6)  # smallest scale of a stored row
KINDS = {torch.int8: "int8", torch.float8_e4m3fn: "fp8", torch.uint8: "int4"}
RANGES = tl.constexpr(kv_int4.RANGES)
LARGEST, SMALLEST = tl.constexpr(kv_int4.LARGEST), tl.constexpr(kv_int4.SMALLEST)


@triton.jit
def add_norm_kernel(
    x, y, share, routed, shares, post, weight, out, H, k, eps,
    OUTPUTS: tl.constexpr, SHARE: tl.constexpr, ROUTED: tl.constexpr, POST: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """A row of H numbers; OUTPUTS: there is a y, ROUTED: there are k outputs of experts."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, SIZE)
    inside = at < H
    total = tl.zeros((SIZE,), tl.float32)
    if ROUTED:
        for choice in range(k):
            part = tl.load(routed + (row * k + choice) * H + at, mask=inside, other=0.0).to(tl.float32)
            total += tl.load(shares + row * k + choice) * part
    if OUTPUTS:
        part = tl.load(y + row * H + at, mask=inside, other=0.0).to(tl.float32)
        if SHARE:
            part = part * tl.load(share + row)
        total += part
    if POST:
        mean = tl.sum(total * total, 0) / H
        total = total * (1.0 / tl.sqrt_rn(mean + eps)) * tl.load(post + at, mask=inside, other=0.0)
    value = tl.load(x + row * H + at, mask=inside, other=0.0)
    if OUTPUTS or ROUTED:
        value += total
        tl.store(x + row * H + at, value, mask=inside)
    mean = tl.sum(value * value, 0) / H
    value = value * (1.0 / tl.sqrt_rn(mean + eps)) * tl.load(weight + at, mask=inside, other=0.0)
    tl.store(out + row * H + at, value.to(out.dtype.element_ty), mask=inside)


def add_norm(
    x: Tensor,
    y: Tensor | None,
    share: Tensor | None,
    routed: Tensor | None,
    shares: Tensor | None,
    post: Tensor | None,
    weight: Tensor,
    eps: float,
    out_dtype: torch.dtype,
) -> Tensor:
    """The norm (T, H) of x (T, H), to which outputs are added in place."""
    T, H = x.shape
    out = torch.empty(T, H, dtype=out_dtype, device=x.device)
    size = triton.next_power_of_2(H)
    optional = (x if part is None else part for part in (y, share, routed, shares, post))
    add_norm_kernel[(T,)](
        x, *optional, weight, out, H, 0 if routed is None else routed.shape[1], eps,
        y is not None, share is not None, routed is not None, post is not None, size,
        num_warps=max(1, min(16, size // 512)),
    )  # fmt: skip
    return out


@triton.jit
def rope_write_kernel(
    qkv, positions, slots, rotary, query_norm, key_norm, keys, values, key_scales, value_scales, basis, q,
    eps, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr,
    WIDE: tl.constexpr, KIND: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """One head of one token: of the queries, keys or values.

    Args:
        ROTARY: dimensions that are rotated; NORM: queries and keys are normed, WIDE: over all heads.
        KIND: of the store: plain, int8, fp8 or int4, whose Hadamard matrix has BLOCK rows.
        SIZE, QUERIES, KEYS: powers of two that hold d, h d and g d.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = qkv + token * ((HEADS + 2 * KV_HEADS) * D)
    i = tl.arange(0, SIZE)
    inside = i < D
    x = tl.load(row + head * D + i, mask=inside, other=0.0).to(tl.float32)
    if head < HEADS + KV_HEADS:
        is_query = head < HEADS
        half: tl.constexpr = ROTARY // 2
        partner = tl.where(i < half, i + half, tl.where(i < ROTARY, i - half, i))
        other = tl.load(row + head * D + partner, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            if WIDE:
                first = tl.where(is_query, 0, HEADS * D)
                size = tl.where(is_query, HEADS * D, KV_HEADS * D)
                j = tl.arange(0, QUERIES)
                wide = tl.load(row + first + j, mask=j < size, other=0.0).to(tl.float32)
                mean = tl.sum(wide * wide, 0) / size
                at = tl.where(is_query, head, head - HEADS) * D
            else:
                mean = tl.sum(x * x, 0) / D
                at = 0
            factor = 1.0 / tl.sqrt_rn(mean + eps)
            if is_query:
                w = tl.load(query_norm + at + i, mask=inside, other=0.0)
                w_other = tl.load(query_norm + at + partner, mask=inside, other=0.0)
            else:
                w = tl.load(key_norm + at + i, mask=inside, other=0.0)
                w_other = tl.load(key_norm + at + partner, mask=inside, other=0.0)
            x = x * factor * w
            other = other * factor * w_other
        if ROTARY:
            angles = rotary + tl.load(positions + token).to(tl.int64) * ROTARY
            pair = tl.where(i < half, i, i - half)
            turned = i < ROTARY
            cosine = tl.load(angles + pair, mask=turned, other=1.0)
            sine = tl.load(angles + half + pair, mask=turned, other=0.0)
            x = x * cosine + tl.where(i < half, -other, other) * sine
    if head < HEADS:
        x = x * scale
        if KIND == "int4":
            of_key = basis + (head // (HEADS // KV_HEADS) * 4 + 1) * D
            x = x * tl.load(of_key + i, mask=inside, other=0.0)
            x = tl.reshape(hadamard(x, 1, SIZE, BLOCK), (SIZE,))
        tl.store(q + (token * HEADS + head) * D + i, x.to(q.dtype.element_ty), mask=inside)
    else:
        cell = tl.load(slots + token).to(tl.int64) * KV_HEADS
        if head < HEADS + KV_HEADS:
            kv = head - HEADS
            if KIND == "int4":
                store_int4(
                    keys, key_scales, cell + kv, x, i, inside, basis + kv * 4 * D, D, SIZE, BLOCK, True
                )
            else:
                store_row(keys, key_scales, cell + kv, x, i, inside, D, KIND)
        else:
            kv = head - HEADS - KV_HEADS
            if KIND == "int4":
                store_int4(values, value_scales, cell + kv, x, i, inside, basis, D, SIZE, BLOCK, False)
            else:
                store_row(values, value_scales, cell + kv, x, i, inside, D, KIND)


@triton.jit
def store_int4(
    plane, pairs, cell, x, i, inside, basis, D: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    KEY: tl.constexpr,
):  # fmt: skip
    """Codes of a row of D numbers, and s and m; of a key in its head's basis."""
    x = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
    if KEY:
        x = x * tl.load(basis + i, mask=inside, other=0.0)
    y = tl.reshape(hadamard(x, 1, SIZE, BLOCK), (SIZE,))
    sign = 1.0
    if KEY:
        usual = y - tl.load(basis + 2 * D + i, mask=inside, other=0.0)
        first = y - tl.load(basis + 3 * D + i, mask=inside, other=0.0)
        other = spread(first, inside) < spread(usual, inside)
        y = tl.where(other, first, usual)
        sign = tl.where(other, -1.0, 1.0)
    y = tl.minimum(tl.maximum(y, -LARGEST), LARGEST)
    low = tl.min(tl.where(inside, y, float("inf")), 0)
    high = tl.max(tl.where(inside, y, float("-inf")), 0)
    a, b = (low + high) / 2, (high - low) / 2
    s, m, q, least = low, low, tl.zeros_like(y), float("inf")
    for n in tl.static_range(4):
        lowest = (a - RANGES[n] * b).to(tl.float16).to(tl.float32)
        step = tl.div_rn(a + RANGES[n] * b - lowest, 15.0).to(tl.float16).to(tl.float32)
        step = tl.maximum(step, SMALLEST)
        code = round_even(tl.minimum(tl.maximum(tl.div_rn(y - lowest, tl.zeros_like(y) + step), -1.0), 16.0))
        code = tl.minimum(tl.maximum(code, 0.0), 15.0)
        off = tl.where(inside, tl.fma(code, tl.zeros_like(y) + step, lowest - y), 0.0)
        error = tl.sum(off * off, 0)
        better = error < least
        s, m = tl.where(better, step, s), tl.where(better, lowest, m)
        q, least = tl.where(better, code, q), tl.where(better, error, least)
    even, odd = tl.split(tl.reshape(q.to(tl.int32), (SIZE // 2, 2)))
    byte = tl.arange(0, SIZE // 2)
    tl.store(plane + cell * (D // 2) + byte, (even | (odd << 4)).to(tl.uint8), mask=byte < D // 2)
    tl.store(pairs + cell * 2, (s * sign).to(tl.float16))
    tl.store(pairs + cell * 2 + 1, m.to(tl.float16))


@triton.jit
def spread(y, inside):
    """The range of the numbers inside."""
    return tl.max(tl.where(inside, y, float("-inf")), 0) - tl.min(tl.where(inside, y, float("inf")), 0)


@triton.jit
def store_row(plane, scales, cell, x, i, inside, D: tl.constexpr, KIND: tl.constexpr):
    """A row of D numbers, and its scale where the store has one."""
    if KIND == "plain":
        tl.store(plane + cell * D + i, x.to(plane.dtype.element_ty), mask=inside)
    else:
        top: tl.constexpr = 127.0 if KIND == "int8" else 448.0
        s = tl.maximum(tl.div_rn(tl.max(tl.abs(x), 0), top), FLOOR)
        y = tl.minimum(tl.maximum(tl.div_rn(x, tl.zeros_like(x) + s), -top), top)
        code = round_even(y).to(tl.int8) if KIND == "int8" else e4m3_bits(y)
        tl.store(plane + cell * D + i, code, mask=inside)
        tl.store(scales + cell, s)


def rope_write(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    rotary: Tensor | None,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    keys: Tensor,
    values: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    basis: Tensor | None,
    heads: int,
    eps: float,
    scale: float,
    wide: bool,
) -> Tensor:
    """Queries (T, h, d); keys and values go to their slots."""
    T, kv_heads = len(qkv), keys.shape[2]
    d = qkv.shape[1] // (heads + 2 * kv_heads)
    assert (query_norm is None) == (key_norm is None), "norms of queries alone, or of keys alone"
    q = torch.empty(T, heads, d, dtype=qkv.dtype, device=qkv.device)
    optional = (qkv if part is None else part for part in (rotary, query_norm, key_norm))
    kind = KINDS.get(keys.dtype, "plain")
    planes = (plane.view(torch.int8) if kind in ("int8", "fp8") else plane for plane in (keys, values))
    scales = (qkv if part is None else part for part in (key_scales, value_scales, basis))
    width = triton.next_power_of_2(max(heads, kv_heads) * d) if wide else 1
    rope_write_kernel[(T, heads + 2 * kv_heads)](
        qkv, positions, slots, *optional, *planes, *scales, q, eps, scale,
        heads, kv_heads, d, 0 if rotary is None else rotary.shape[1], query_norm is not None,
        wide, kind, triton.next_power_of_2(d), d & -d, width, width, num_warps=1 if width < 1024 else 4,
    )  # fmt: skip
    return q


@triton.jit
def gated_kernel(gate_up, out, n, ACTIVATION: tl.constexpr, NUMBERS: tl.constexpr):
    """Some of a row's n numbers."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * NUMBERS + tl.arange(0, NUMBERS)
    inside = at < n
    gate = tl.load(gate_up + row * 2 * n + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * n + n + at, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        y = gate / (1.0 + tl.exp(-gate)) * up
    elif ACTIVATION == "gelu_tanh":
        y = 0.5 * gate * (1.0 + tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate))) * up
    else:  # gpt-oss: both sides are clamped, and up is moved by 1
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0)
        y = gate / (1.0 + tl.exp(gate * -1.702)) * (up + 1.0)
    tl.store(out + row * n + at, y.to(out.dtype.element_ty), mask=inside)


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """act(gate) up (R, n) of gate and up (R, 2 n)."""
    R, n = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(R, n, dtype=gate_up.dtype, device=gate_up.device)
    gated_kernel[(R, triton.cdiv(n, NUMBERS))](gate_up, out, n, activation, NUMBERS)
    return out
