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
