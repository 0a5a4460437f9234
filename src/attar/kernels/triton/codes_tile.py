"""A tile of a quantized weight, decoded in registers: what all products of codes share.

Layout (kernels/device/planes.py): codes of 2 to 8 bits are divided into planes of 8, 4, 2 or 1 bits, the
lowest bits first. A plane of b bits is int32 (K b / 32, N): word (w, n) holds inputs k = w (32 / b) + i at
bits [i b, (i + 1) b). Words of neighbouring outputs are neighbours in memory, so that a thread loads four
of them (16 bytes).

Letters: K inputs, N outputs, G inputs of a scale; q code, z zero point, s scale: w = s (q - z).

A tile is a group of G inputs by some outputs. q - z is a whole number below 256, exact in bfloat16 and
float16, and s multiplies the float32 sum of the group: nothing is rounded again. Zero points that are not
whole are subtracted behind the product, z times the group's sum of inputs: a product with ones of as many
columns, for the compiler divides the outputs of all products here among warps as those of the narrowest.

Every product of a tile is :func:`tl.dot` with row tiles of 16 or 32, which is mma.m16n8k16 on every card
since Ampere: the order of a row's sums depends on K and G, and never on how many rows there are.
"""

from __future__ import annotations

import triton
import triton.language as tl

MAGIC = tl.constexpr(0x4B000000)  # the bits of 2^23: with a code in the lowest ones, the float 2^23 + code


@triton.jit
def plane_tile(words, stride, first, n, inside, G: tl.constexpr, WIDTH: tl.constexpr):
    """int32 (G, n): the codes of a plane.

    Args:
        words: of the plane; stride: words of a row, N.
        first: first input of the group; n: outputs, masked by ``inside``.
    """
    SPAN: tl.constexpr = 32 // WIDTH  # codes of a word
    FIELDS: tl.constexpr = SPAN if SPAN < G else G
    ROWS: tl.constexpr = G // FIELDS
    rows = first // SPAN + tl.arange(0, ROWS)
    values = tl.load(words + rows[:, None] * stride + n[None, :], mask=inside[None, :], other=0)
    shifts = (first % SPAN + tl.arange(0, FIELDS)) * WIDTH
    codes = (values[:, None, :] >> shifts[None, :, None]) & ((1 << WIDTH) - 1)
    return tl.reshape(codes, (G, n.shape[0]))


@triton.jit
def code_tile(words, K, N, first, n, inside, zero, G: tl.constexpr, BITS: tl.constexpr):
    """q - zero, float32 (G, n); zero: float32 (n,), whole."""
    if BITS == 8:
        codes = plane_tile(words, N, first, n, inside, G, 8)
    elif BITS >= 4:
        codes = plane_tile(words, N, first, n, inside, G, 4)
        if BITS >= 6:
            two = words + K // 8 * N
            codes |= plane_tile(two, N, first, n, inside, G, 2) << 4
        if BITS % 2:
            low: tl.constexpr = BITS - 1
            last = words + K // 32 * low * N
            codes |= plane_tile(last, N, first, n, inside, G, 1) << low
    else:
        codes = plane_tile(words, N, first, n, inside, G, 2)
        if BITS == 3:
            last = words + K // 16 * N
            codes |= plane_tile(last, N, first, n, inside, G, 1) << 2
    return (codes | MAGIC).to(tl.float32, bitcast=True) - (zero[None, :] + 8388608.0)


@triton.jit
def split_sum(
    x, row_mask, words, scales, zeros, K, N, n, inside, first_group, last_group,
    G: tl.constexpr, BITS: tl.constexpr, ZEROS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):  # fmt: skip
    """The product of rows with groups [first_group, last_group), float32 (ROWS, COLUMNS).

    Args:
        x: pointers (ROWS, 1) to the rows' first inputs.
        row_mask: bool (ROWS, 1).
        words, scales, zeros: of one weight.
        ZEROS: none (the middle of the codes), whole (integers) or real.
    """
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    k = tl.arange(0, INNER)
    for group in range(first_group, last_group):
        at = group * N + n
        scale = tl.load(scales + at, mask=inside, other=0.0).to(tl.float32)
        zero = tl.full((COLUMNS,), 1 << (BITS - 1), tl.float32)
        if ZEROS == "whole":
            zero = tl.load(zeros + at, mask=inside, other=0).to(tl.float32)
        part = tl.zeros((ROWS, COLUMNS), tl.float32)
        sums = tl.zeros((ROWS, COLUMNS), tl.float32)
        for step in tl.static_range(0, G, INNER):
            first = group * G + step
            rows = tl.load(x + (first + k)[None, :], mask=row_mask, other=0.0)
            codes = code_tile(words, K, N, first, n, inside, zero, INNER, BITS)
            part = tl.dot(rows, codes.to(rows.dtype), part, input_precision="ieee")
            if ZEROS == "real":
                ones = tl.full((INNER, COLUMNS), 1.0, rows.dtype)
                sums = tl.dot(rows, ones, sums, input_precision="ieee")
        if ZEROS == "real":
            difference = tl.load(zeros + at, mask=inside, other=0.0).to(tl.float32) - zero
            part -= sums * difference[None, :]
        total += part * scale[None, :]
    return total
