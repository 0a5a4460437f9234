"""A weight as integer or float codes, free of any layout, and the numbers that the codes stand for.

Letters: q codes (N, K); s scale and z zero point of a tile, in tables (P, G).

    w = s (q - z)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attar.formats.rules import WeightRule

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The positive FP4 levels; codes 8 to 15 are their negatives."""
MX_BIAS = 127  # of the exponents of MXFP4 and MXFP8, as they are stored
FP4_BITS = 5  # of a doubled FP4 level, which is at most 12

WeightLayout = dict[str, tuple[str, tuple[int, ...]]]
"""Type (as safetensors names it) and shape of the tensors of a weight, by the last part of their names."""


@dataclass(frozen=True)
class Coded:
    """A weight as codes: what the writers take and the readers return.

    Attributes:
        codes: (N, K): signed int8, float8, or 0 to 15 for FP4.
        scale: float32 (P, G), what a code is multiplied with.
        zero: float32 (P, G) signed whole numbers, or None.
        global_scale: NVFP4: float32, what the stored scales are divided by.
        g_idx: int (K,), the group of each input; None: groups of neighbours.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None = None
    global_scale: Tensor | None = None
    g_idx: Tensor | None = None


@dataclass(frozen=True)
class UniformWeight:
    """A weight (N, K) on a uniform grid, w = s (q - z): what an integer kernel can multiply.

    z is a whole number in integer layouts, and any number where a file stores a minimum (Q4_K: z = m / s).
    FP4 is uniform once its levels are doubled and the scale is halved. FP8 and NF4 are not uniform.

    Attributes:
        codes: q, int8 (N, K), from -2^(b-1) to 2^(b-1) - 1.
        bits: b, at most 8.
        scale: s, float32 (P, G).
        zero: z, float32 (P, G); None: 0.
        width: inputs of a group.
        g_idx: int (K,), the group of each input; None: groups of neighbours.
    """

    codes: Tensor
    bits: int
    scale: Tensor
    zero: Tensor | None = None
    width: int = 0
    g_idx: Tensor | None = None


def dequantize(weight: Coded, width: int) -> Tensor:
    """The weight of integer codes, float32 (N, K); exact where a scale has at most 15 significant bits.

    Args:
        weight: the codes; not changed.
        width: inputs that share a scale; not used where each input has its group in ``g_idx``.
    """
    if weight.g_idx is not None:
        g_idx = weight.g_idx.long()
        scale, zero = weight.scale[:, g_idx], None if weight.zero is None else weight.zero[:, g_idx]
        return (weight.codes if zero is None else weight.codes - zero) * scale
    rows, columns = weight.codes.shape
    tiled = torch.nn.functional.pad(weight.codes.float(), (0, -columns % width)).reshape(rows, -1, width)
    if weight.zero is not None:
        tiled = tiled - weight.zero[..., None]
    return (tiled * weight.scale[..., None]).reshape(rows, -1)[:, :columns].contiguous()


def fp4_levels(device: torch.device | None = None) -> Tensor:
    """The 16 FP4 levels by code, float32."""
    return torch.tensor([*FP4, *(-level for level in FP4)], device=device)


def nearest_fp4(values: Tensor) -> Tensor:
    """Codes, in the type of the values, of values on the unit scale; halves go to the even code, the sign of
    zero is kept.

    The levels have steps of 1/2 below 2, of 1 below 4 and of 2 beyond: the index is the least of three
    roundings.
    """
    magnitudes = values.abs()
    index = (magnitudes * 2).round_()
    index = index.minimum((magnitudes - 2).round_().add_(4))
    index = index.minimum(magnitudes.sub_(4).mul_(0.5).round_().add_(6)).clamp_(max=7)
    return index.add_(torch.signbit(values), alpha=8)


def level_fp4(codes: Tensor) -> Tensor:
    """Values on the unit scale, float32, of codes 0 to 15."""
    return fp4_levels(codes.device).index_select(0, codes.flatten().int()).view(codes.shape)


def mx_exponent(top: Tensor, largest: float) -> Tensor:
    """Exponents e of the scales 2^e of groups with these largest magnitudes, int32; -127 to 127.

    The exponent of max|w| is taken after 1/4 of its leading bit was added, so that a group whose largest
    magnitude is 1.75 or more times a power of two gets the next larger scale (compressed-tensors; the
    specification of MX cuts off and saturates).

    Args:
        largest: magnitude of a code: 6 or 448.
    """
    fraction, power = torch.frexp(top.float())  # top = fraction * 2^power, fraction in [1/2, 1)
    exponent: Tensor = power + (fraction >= 0.875).int() - math.frexp(largest)[1]
    return exponent.clamp(-MX_BIAS, MX_BIAS)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Codes (N, K) of bytes (N, K / 2), the even input in the low nibble."""
    return torch.stack((packed & 15, packed >> 4), -1).reshape(packed.shape[0], -1)


def uniform_weight(reader: Any, name: str) -> UniformWeight | None:
    """A stored weight on its uniform grid, out x in; None for other tensors and other grids.

    Raises:
        CheckpointError: the tensors of the weight do not fit together.
    """
    if hasattr(reader, "uniform"):  # GGUF's k-quants have minimums, which ``Coded`` cannot hold
        weight: UniformWeight | None = reader.uniform(name)
        return weight
    coded = reader.codes(name)
    return None if coded is None else uniform_of_codes(*coded)


def uniform_of_codes(weight: Coded, rule: WeightRule) -> UniformWeight | None:
    """Integer or FP4 codes on their uniform grid; None for float8. Does not modify its inputs."""
    width = rule.tile((weight.codes.shape[0], weight.codes.shape[1]))[1]
    if rule.kind == "int" and rule.bits <= 8:
        return UniformWeight(weight.codes, rule.bits, weight.scale, weight.zero, width, weight.g_idx)
    if rule.kind == "float" and rule.bits == 4:
        doubled = fp4_levels().mul_(2).to(torch.int8)
        return UniformWeight(doubled[weight.codes.int()], FP4_BITS, weight.scale / 2, width=width)
    return None
