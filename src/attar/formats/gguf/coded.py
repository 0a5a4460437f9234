"""Blocks of llama.cpp's as codes of an integer or MXFP4 layout, none of them changed: carry.py the other way.

    Q4_0  d (q - 8)      Q5_0  d (q - 16)      Q8_0  d q          s = d,        no zero
    Q4_1  d q + m        Q5_1  d q + m                            s = d,        z = -m / d - 2^(b-1)
    MXFP4 2^(e-127) t(q)                                          s = 2^(e-127)

Letters: q code as stored, b its bits; d, m float16, of 32 inputs; s scale and z signed zero point of a group.
Q4_1 and Q5_1 are exact where m is a multiple of d that a code can be, as in what was carried over; k-quants
have scales of scales, which no integer layout has.

llama.cpp gives d the sign of the largest weight, so that half the blocks of Q4_0 and Q5_0 have a negative
scale. Kernels multiply by it like by any other, but some tools refuse it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attar.formats.coded import Coded
from attar.formats.gguf.blocks import unpack
from attar.formats.rules import WeightRule

BLOCK = 32
BITS = {"Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q5_1": 5, "Q8_0": 8}


def from_blocks(kind: str, data: Tensor, columns: int) -> tuple[Coded, WeightRule] | None:
    """Codes and rule of a weight in blocks; None where no such layout holds it exactly.

    Args:
        kind: its type.
        data: uint8 (N, row bytes).
        columns: K.

    Raises:
        CheckpointError: the bytes are not those of rows of K weights.
    """
    if kind not in (*BITS, "MXFP4"):
        return None
    codes, stored = unpack(kind, data, columns)
    if kind == "MXFP4":
        exponent = stored["exponent"].int() - 127
        scale = torch.ldexp(torch.ones(exponent.shape), exponent)
        return Coded(codes, scale), WeightRule("float", 4, "group", BLOCK)
    middle = 0 if kind == "Q8_0" else 1 << (BITS[kind] - 1)
    signed, scale = (codes.to(torch.int16) - middle).to(torch.int8), stored["d"].float()
    if "m" not in stored:
        return Coded(signed, scale), WeightRule("int", BITS[kind], "group", BLOCK)
    zero = _whole(scale, stored["m"].float(), 2 * middle)
    if zero is None:
        return None
    return Coded(signed, scale, zero - middle), WeightRule("int", BITS[kind], "group", BLOCK, symmetric=False)


def _whole(scale: Tensor, minimum: Tensor, levels: int) -> Tensor | None:
    """-m / d, where all of them are codes; a block of zeros has that of zero."""
    empty = (scale == 0) & (minimum == 0)
    zero = torch.where(empty, 0.0, (-minimum / scale).round())
    fits = (zero >= 0) & (zero < levels) & (zero * scale == -minimum)
    return zero if bool(fits.all()) else None


def with_positive_scales(weight: Coded, rule: WeightRule) -> tuple[Coded, WeightRule]:
    """The same numbers under scales that are not negative; the inputs are not changed.

    s c = (-s)(-c) where -c is a code for all of a group; otherwise s (c - z) = (-s)(~c - ~z) with
    ~c = -1 - c, and the weight becomes asymmetric.

    Args:
        weight: integer codes, groups of neighbours.
        rule: what they are.
    """
    negative = weight.scale < 0
    if not bool(negative.any()):
        return weight, rule
    width = weight.codes.shape[1] // weight.scale.shape[1]
    turned = negative.repeat_interleave(width, 1)
    scale, lowest = weight.scale.abs(), -(1 << (rule.bits - 1))
    if weight.zero is None and not bool((turned & (weight.codes == lowest)).any()):
        return replace(weight, codes=torch.where(turned, -weight.codes, weight.codes), scale=scale), rule
    zero = torch.zeros_like(scale) if weight.zero is None else weight.zero
    codes = torch.where(turned, ~weight.codes, weight.codes)
    made = replace(weight, codes=codes, scale=scale, zero=torch.where(negative, -1 - zero, zero))
    return made, replace(rule, symmetric=False)
