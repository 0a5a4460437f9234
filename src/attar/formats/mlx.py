"""MLX's layout of one quantized matrix: codes in 32-bit words, a scale for each group of neighbouring inputs.

For a weight (N, K), b bits, groups of g inputs:

    weight    uint32 (N, K b / 32)    codes without gaps, the first input in the lowest bits (dense_pack)
    scales    (N, K / g)              affine: a floating-point type; mxfp4, mxfp8: uint8, 2^(byte - 127);
                                      nvfp4: uint8, the byte of a float8_e4m3fn
    biases    (N, K / g)              affine alone, in the type of the scales

    affine    w = scale u + bias      u = 0 .. 2^b - 1: a signed code q with zero z is u = q + 2^(b-1), and
                                      bias = -scale (2^(b-1) + z)
    mxfp4, nvfp4                      w = scale F[u], F of e2m1
    mxfp8                             w = scale u, u a float8_e4m3fn

nvfp4 has no scale of the whole matrix. Experts are stacked: every tensor has a first dimension of experts.
Source: mlx 0.32 ``mx.quantize``; mlx-lm 0.32 ``utils.load_model``.

Letters: N outputs, K inputs, b bits, g inputs of a group, P and G rows and columns of a table of tiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attar.formats.coded import Coded, WeightLayout, fp4_levels
from attar.formats.dense_pack import dense_pack, dense_unpack
from attar.formats.rules import WeightRule

METHOD = "mlx"
WEIGHT, SCALES, BIASES = "weight", "scales", "biases"
AFFINE = "affine"
FLOATS = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}
"""Bits and group size of the modes without a choice."""
BITS = (2, 3, 4, 5, 6, 8)
GROUPS = (128, 64, 32)
E8M0_BIAS = 127


@dataclass(frozen=True)
class MLXRule:
    """How a matrix is coded: ``mode`` is :data:`AFFINE` or one of :data:`FLOATS`."""

    mode: str
    bits: int
    group_size: int

    def config(self) -> dict[str, Any]:
        """An entry of ``quantization`` in config.json."""
        return {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}


def float_rule(mode: str) -> MLXRule:
    """The rule of one of :data:`FLOATS`."""
    return MLXRule(mode, *FLOATS[mode])


def carried_rule(rule: WeightRule, shape: tuple[int, int]) -> MLXRule | str:
    """The rule under which MLX holds unchanged codes of a rule and shape (N, K); else why it holds none."""
    if rule.ordered:
        return "its groups are not neighbouring inputs (act-order)"
    if rule.block:
        return f"it has scales for blocks of {rule.block[0]} x {rule.block[1]} weights"
    width = rule.group_size or shape[1]
    if shape[1] % width:
        return f"its {shape[1]} inputs are no multiple of its groups of {width}"
    if rule.kind == "float":
        modes = {"tensor_group": "nvfp4", "group": "mxfp4" if rule.bits == 4 else "mxfp8"}
        mode = modes.get(rule.strategy, "")
        fits = FLOATS.get(mode) == (rule.bits, rule.group_size)
        return (
            float_rule(mode) if fits else f"MLX has no float{rule.bits} codes with a scale by {rule.strategy}"
        )
    if rule.kind != "int" or rule.bits > max(BITS):
        return f"MLX has no {rule.kind} codes of {rule.bits} bits"
    group = next((size for size in GROUPS if width % size == 0), 0)
    if not group:
        return f"its groups of {width} are no multiple of 32, the least that MLX has"
    return MLXRule(AFFINE, next(bits for bits in BITS if bits >= rule.bits), group)


def layout(shape: tuple[int, int], rule: MLXRule, dtype: str) -> WeightLayout:
    """Type and shape of the tensors of a weight (N, K); ``dtype`` is safetensors' name of affine scales'."""
    rows, columns = shape
    groups = (rows, columns // rule.group_size)
    specs: WeightLayout = {WEIGHT: ("U32", (rows, columns * rule.bits // 32))}
    if rule.mode == AFFINE:
        return {**specs, SCALES: (dtype, groups), BIASES: (dtype, groups)}
    return {**specs, SCALES: ("U8", groups)}


def affine(codes: Tensor, scale: Tensor, bias: Tensor, bits: int) -> dict[str, Tensor]:
    """The tensors of codes u (N, K) from 0 to 2^bits - 1, scales and biases (N, K / g) in their type."""
    return {WEIGHT: _words(dense_pack(codes, bits)), SCALES: scale.contiguous(), BIASES: bias.contiguous()}


def encode(weight: Coded, rule: WeightRule, target: MLXRule, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of carried codes. Does not modify its inputs.

    Args:
        rule: of the codes.
        target: what :func:`carried_rule` returned for it.
        dtype: of affine scales and biases; both are rounded to it.
    """
    if target.mode != AFFINE:
        return encode_float(weight.codes, weight.scale, target)
    rows, columns = weight.codes.shape
    groups, half = columns // target.group_size, 2 ** (rule.bits - 1)

    def spread(table: Tensor) -> Tensor:
        wide = table.float().repeat_interleave(groups // table.shape[1], 1)
        return wide.expand(rows, groups)

    scale = spread(weight.scale).to(dtype)
    zero = torch.zeros_like(weight.scale) if weight.zero is None else weight.zero
    bias = -spread(weight.scale) * (spread(zero) + half)
    return affine(weight.codes.to(torch.int16) + half, scale, bias.to(dtype), target.bits)


def encode_float(codes: Tensor, scale: Tensor, rule: MLXRule) -> dict[str, Tensor]:
    """The tensors of e2m1 or e4m3 codes (N, K) under scales (N, K / g) that the mode holds exactly."""
    if rule.mode == "nvfp4":
        stored = scale.to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        stored = (torch.frexp(scale).exponent.to(torch.int16) - 1 + E8M0_BIAS).to(torch.uint8)
    codes = codes.view(torch.uint8) if rule.bits == 8 else codes.to(torch.uint8)
    return {WEIGHT: _words(dense_pack(codes, rule.bits)), SCALES: stored.contiguous()}


def decode(tensors: Mapping[str, Tensor], rule: MLXRule) -> Tensor:
    """The weight (N, K) of stored tensors, float32."""
    words = tensors[WEIGHT].view(torch.int32)
    codes = dense_unpack(words, rule.bits, words.shape[1] * 32 // rule.bits)
    scales = tensors[SCALES]
    if rule.mode == AFFINE:
        values, scale, bias = codes.float(), scales.float(), tensors[BIASES].float()
    else:
        values = fp4_levels()[codes.int()] if rule.bits == 4 else codes.view(torch.float8_e4m3fn).float()
        nvfp4 = rule.mode == "nvfp4"
        scale = scales.view(torch.float8_e4m3fn).float() if nvfp4 else torch.exp2(scales.float() - E8M0_BIAS)
        bias = torch.zeros_like(scale)
    tiled = values.unflatten(1, (-1, rule.group_size))
    return (tiled * scale[..., None] + bias[..., None]).flatten(1)


def _words(packed: Tensor) -> Tensor:
    return packed.view(torch.uint32)
