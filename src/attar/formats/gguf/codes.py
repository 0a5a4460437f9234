"""Codes of llama.cpp's blocks in the layout-free forms of ../coded.py, and back; no code changes.

To and from integer and MXFP4 codes:

    w = s (q - z)        Q4_0  d (q' - 8)      Q5_0  d (q' - 16)     Q8_0  d q'       z = 0,  d = s
                         Q4_1  d q' + m        Q5_1  d q' + m                         d = s,  m = -s z
                         MXFP4 2^e t(q)                                               e of s
                         NVFP4 e4m3(c) t(q) / a                                       c of a s

Letters: q signed code, q' stored code of b bits, s scale, z zero point of a group; d, m float16, of 32
inputs; a global scale of a weight, whose reciprocal is a tensor beside the blocks. A group of more inputs
repeats its scale. Blocks hold codes exactly where s (and s z) are float16 numbers and groups are multiples of
32 neighbouring inputs; anything else would round a second time and is refused with the reason. Codes of Q4_1
and Q5_1 are exact where m is a multiple of d that a code can be: z = -m / d - 2^(b-1). k-quants have scales
of scales, which no integer layout has.

To a uniform grid, from every block type:

    w = s0 (q0 - h) - m        s = s0,  q = q0 - 2^(b-1),  z = h + m / s0 - 2^(b-1)
    w = s0 T[q0]               s = s0,  q = T[q0],         z = 0,  b = 8

with the letters of blocks.py. Where s0 is 0 and m is not, all weights of the tile are -m: codes 0, scale m,
zero 1.

llama.cpp gives d the sign of the largest weight, so that half the blocks of Q4_0 and Q5_0 have a negative
scale. Kernels multiply by it as by any other, but some tools refuse it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attar.formats.coded import Coded, UniformWeight
from attar.formats.gguf.blocks import LAYOUTS, scales, unpack
from attar.formats.gguf.types import TYPES
from attar.formats.rules import WeightRule

BLOCK = 32
BITS = {
    "Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q5_1": 5, "Q8_0": 8,
    "Q2_K": 2, "Q3_K": 3, "Q4_K": 4, "Q5_K": 5, "Q6_K": 6,
}  # fmt: skip
NVFP4_RULE = WeightRule("float", 4, "tensor_group", 16)
INTEGERS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
ZERO = {"Q4_0": 8, "Q5_0": 16, "Q8_0": 0}
"""The stored code of zero."""


def exact_type(coded: Coded, rule: WeightRule) -> tuple[str | None, str]:
    """The smallest type that holds a weight's codes exactly. Returns the type and "", or None and the
    reason."""
    if why := _misfit(coded, rule):
        return None, why
    if rule.kind == "float":
        return ("MXFP4" if coded.global_scale is None else "NVFP4"), ""
    if not _is_half(coded.scale):
        return None, "its scales are no float16 numbers"
    if rule.symmetric:
        return next(kind for kind, bits in (("Q4_0", 4), ("Q5_0", 5), ("Q8_0", 8)) if rule.bits <= bits), ""
    if rule.bits > 5:
        return None, f"llama.cpp has no type for {rule.bits} bits with a zero point"
    if not _is_half(_minimum(coded, rule)):
        return None, "scale times zero point is no float16 number"
    return ("Q4_1" if rule.bits <= 4 else "Q5_1"), ""


def _misfit(coded: Coded, rule: WeightRule) -> str:
    """Why no type has groups like these; "" where one has."""
    columns = coded.codes.shape[1]
    nvfp4 = rule == NVFP4_RULE
    block = TYPES["NVFP4"].block if nvfp4 else BLOCK
    if columns % block:
        return f"its {columns} inputs are no multiple of {block}"
    if coded.g_idx is not None:
        return "its groups are not neighbouring inputs (act-order group)"
    if rule.kind == "float":
        fp4 = rule.bits == 4 and rule.strategy == "group" and rule.group_size == BLOCK
        return "" if fp4 or nvfp4 else "llama.cpp has no type for this float format"
    if rule.kind != "int" or rule.block:
        return f"llama.cpp has no type for {rule.kind} codes of this layout"
    if rule.strategy == "group" and rule.group_size % BLOCK:
        return f"its groups of {rule.group_size} are no multiple of {BLOCK}"
    return ""


def to_blocks(kind: str, coded: Coded, rule: WeightRule) -> tuple[Tensor, dict[str, Tensor]]:
    """Codes (N, K) and the other fields of blocks, as blocks.py packs them, in the type of
    :func:`exact_type`."""
    if kind == "MXFP4":
        exponent = torch.frexp(coded.scale).exponent.to(torch.int16) - 1 + 127
        return coded.codes.to(torch.uint8), {"exponent": exponent.to(torch.uint8)}
    if kind == "NVFP4":
        return coded.codes.to(torch.uint8), {"e4m3": e4m3_of(coded.scale, coded.global_scale)}
    stored = {"d": _per_block(coded.scale, coded).half()}
    if kind in ZERO:
        codes = coded.codes.to(torch.int16) + ZERO[kind]
        return codes.to(torch.int8 if kind == "Q8_0" else torch.uint8), stored
    low = -(2 ** (rule.bits - 1))
    stored["m"] = _per_block(_minimum(coded, rule), coded).half()
    return (coded.codes.to(torch.int16) - low).to(torch.uint8), stored


def e4m3_of(scale: Tensor, global_scale: Tensor | None) -> Tensor:
    """The bytes of NVFP4's scales."""
    assert global_scale is not None, "NVFP4 has a global scale"
    return (scale * global_scale).to(torch.float8_e4m3fn).view(torch.uint8)


def _minimum(coded: Coded, rule: WeightRule) -> Tensor:
    """m of each group: the value of unsigned code 0."""
    zero = torch.zeros_like(coded.scale) if coded.zero is None else coded.zero
    return coded.scale * (-(2.0 ** (rule.bits - 1)) - zero)


def _per_block(table: Tensor, coded: Coded) -> Tensor:
    """A (P, G) table as (N, K / 32)."""
    rows, blocks = coded.codes.shape[0], coded.codes.shape[1] // BLOCK
    table = table.reshape(1, 1) if table.dim() < 2 else table
    return table.repeat_interleave(blocks // table.shape[1], 1).expand(rows, blocks)


def _is_half(values: Tensor) -> bool:
    """Whether all values are float16 numbers."""
    return bool((values.half().float() == values.float()).all())


def from_blocks(
    kind: str, data: Tensor, columns: int, global_scale: float = 1.0
) -> tuple[Coded, WeightRule] | None:
    """Codes and rule of a weight in blocks; None where no integer or FP4 layout holds it exactly.

    Args:
        data: uint8 (N, row bytes).
        columns: K.
        global_scale: NVFP4: the scale of the whole weight.

    Raises:
        CheckpointError: the bytes are not rows of K weights.
    """
    if kind not in (*INTEGERS, "MXFP4", "NVFP4"):
        return None
    codes, stored = unpack(kind, data, columns)
    if kind == "NVFP4":
        scale = scales(kind, stored)[0] * 2.0 * global_scale
        return Coded(codes, scale, global_scale=torch.tensor([1.0 / global_scale])), NVFP4_RULE
    if kind == "MXFP4":
        exponent = stored["exponent"].int() - 127
        scale = torch.ldexp(torch.ones(exponent.shape), exponent)
        return Coded(codes, scale), WeightRule("float", 4, "group", BLOCK)  # as rule_of
    middle = 0 if kind == "Q8_0" else 1 << (BITS[kind] - 1)
    signed, scale = (codes.to(torch.int16) - middle).to(torch.int8), stored["d"].float()
    if "m" not in stored:
        return Coded(signed, scale), WeightRule("int", BITS[kind], "group", BLOCK)
    zero = _zero_codes(scale, stored["m"].float(), 2 * middle)
    if zero is None:
        return None
    return Coded(signed, scale, zero - middle), WeightRule("int", BITS[kind], "group", BLOCK, symmetric=False)


def rule_of(kind: str) -> WeightRule | None:
    """The rule of :func:`from_blocks`; None where there is none, or the numbers decide whether there is."""
    if kind == "MXFP4":
        return WeightRule("float", 4, "group", BLOCK)
    return WeightRule("int", BITS[kind], "group", BLOCK) if kind in ZERO else None


def _zero_codes(scale: Tensor, minimum: Tensor, levels: int) -> Tensor | None:
    """-m / d; None where one of them is no code. A block of zeros has code 0."""
    empty = (scale == 0) & (minimum == 0)
    zero = torch.where(empty, 0.0, (-minimum / scale).round())
    fits = (zero >= 0) & (zero < levels) & (zero * scale == -minimum)
    return zero if bool(fits.all()) else None


def with_positive_scales(weight: Coded, rule: WeightRule) -> tuple[Coded, WeightRule]:
    """The same numbers with scales that are not negative. Does not modify its inputs.

    s c = (-s)(-c) where -c is a code for all of a group; otherwise s (c - z) = (-s)(~c - ~z) with
    ~c = -1 - c, and the weight becomes asymmetric.

    Args:
        weight: integer codes, groups of neighbours.
    """
    negative = weight.scale < 0
    if not bool(negative.any()):
        return weight, rule
    width = weight.codes.shape[1] // weight.scale.shape[1]
    flipped = negative.repeat_interleave(width, 1)
    scale, lowest = weight.scale.abs(), -(1 << (rule.bits - 1))
    if weight.zero is None and not bool((flipped & (weight.codes == lowest)).any()):
        return replace(weight, codes=torch.where(flipped, -weight.codes, weight.codes), scale=scale), rule
    zero = torch.zeros_like(scale) if weight.zero is None else weight.zero
    codes = torch.where(flipped, ~weight.codes, weight.codes)
    positive = replace(weight, codes=codes, scale=scale, zero=torch.where(negative, -1 - zero, zero))
    return positive, replace(rule, symmetric=False)


def uniform_of_blocks(kind: str, data: Tensor, columns: int, global_scale: float = 1.0) -> UniformWeight:
    """A weight in blocks on its uniform grid.

    Args:
        kind: its type, one of :data:`attar.formats.gguf.blocks.LAYOUTS`.
        data: uint8 (N, row bytes).
        columns: K.
        global_scale: a scale of the whole weight.

    Raises:
        CheckpointError: the bytes are not rows of K weights.
    """
    layout = LAYOUTS[kind]
    codes, stored = unpack(kind, data, columns)
    scale, minimum = scales(kind, stored)
    scale = scale if global_scale == 1.0 else scale * global_scale
    width = columns // scale.shape[1]
    if layout.levels is not None:
        levels = torch.tensor(layout.levels, dtype=torch.int8)
        return UniformWeight(levels[codes.int()], 8, scale, width=width)
    if kind == "Q8_0":
        return UniformWeight(codes, 8, scale, width=width)
    middle = 1 << (BITS[kind] - 1)
    signed = (codes - middle).view(torch.int8)
    if minimum is None:
        assert layout.zero == middle, f"{kind} without minimums has its zero in the middle"
        return UniformWeight(signed, BITS[kind], scale, width=width)
    zero = minimum / scale + (layout.zero - middle)
    flat = scale == 0
    if bool(flat.any()):
        tiles = signed.view(len(signed), -1, width)
        signed = torch.where(flat[..., None], 0, tiles).view_as(signed)
        scale, zero = torch.where(flat, minimum, scale), torch.where(flat, 1.0, zero)
    return UniformWeight(signed, BITS[kind], scale, zero, width)
