"""Roundings and functions that the kernels compute by arithmetic, the same on every card and in the
interpreter.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def round_even(x):
    """The nearest whole number, ties to even; |x| < 2^22, float32."""
    return (x + 12582912.0) - 12582912.0  # 1.5 * 2^23: its float32 neighbours are whole


@triton.jit
def tanh(x):
    """tanh x, float32."""
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def hadamard(x, ROWS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Rows (ROWS, SIZE) float32, each BLOCK numbers times the Hadamard matrix and BLOCK^-1/2.

    In a stage neighbours become their sum and difference, the sums in front: after as many stages as a number
    has bits, each has been the last bit once, and all are in order again.
    """
    x = tl.reshape(x, (ROWS * SIZE // BLOCK, BLOCK))
    for _ in tl.static_range(BLOCK.bit_length() - 1):
        a, b = tl.split(tl.reshape(x, (ROWS * SIZE // BLOCK, BLOCK // 2, 2)))
        pairs = tl.permute(tl.join(a + b, a - b), (0, 2, 1))
        x = tl.reshape(pairs, (ROWS * SIZE // BLOCK, BLOCK))
    return tl.reshape(x, (ROWS, SIZE)) * (1.0 / tl.sqrt_rn(BLOCK + 0.0))


@triton.jit
def e4m3_bits(x):
    """The byte, int8, of the FP8 number (e4m3fn) nearest to x, ties to even; float32, |x| <= 448."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (
        120 << 3
    )  # 3 of 23 bits stay; the bias is 7, not 127
    small = round_even(tl.abs(x) * 512.0).to(tl.int32)  # below 2^-6: multiples of 2^-9
    code = tl.where(size < (121 << 23), small, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.int8)


@triton.jit
def e4m3_value(codes):
    """The FP8 numbers (e4m3fn) of bytes, float16, times 2^-8; NaN becomes 480 * 2^-8."""
    wide = codes.to(tl.int16)
    return (((wide & 0x7F) << 7) | ((wide & 0x80) << 8)).to(tl.float16, bitcast=True)
