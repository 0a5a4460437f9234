"""The tensors of one quantized Linear in each layout of compressed-tensors: codes to bytes and back.

For a weight (N, K), b bits, scales in a table (P, G) of tiles:

``pack-quantized``          weight_packed int32 (N, ceil(K b / 32)): signed code + 2^(b-1), dense_pack along
                            K; weight_scale; weight_shape int64 = N, K; asymmetric: weight_zero_point int32
                            (ceil(N b / 32), G), signed zero + 2^(b-1), dense_pack along N
``int-quantized``           weight int8, weight_scale; asymmetric: weight_zero_point int8 (P, G)
``float-quantized``         weight float8, weight_scale
``naive-quantized``         either of the two above
``nvfp4-pack-quantized``    weight_packed uint8 (N, K / 2), the even input in the low nibble; weight_scale
                            float8_e4m3fn; weight_global_scale float32 (1,), which *divides* the scales
``mxfp4-pack-quantized``    weight_packed likewise; weight_scale uint8, 2^(byte - 127)
``mxfp8-quantized``         weight float8, weight_scale likewise

weight_scale is (P, G) in the model's type; a single one is (1,). Packed weights whose groups are not
neighbours have weight_g_idx, int32 (K,). A decoded weight is code times scale, rounded once to the type of
the scale; the FP4 and MX layouts decode to bfloat16, whatever the model's type, as compressed-tensors does.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from attar.formats.coded import MX_BIAS, Coded, WeightLayout, fp4_levels, unpack_nibbles
from attar.formats.dense_pack import dense_pack, dense_unpack
from attar.formats.rules import BFLOAT16, MXFP4, MXFP8, NVFP4, PACK, WeightRule

PACKED, SCALE, SHAPE, ZERO = "weight_packed", "weight_scale", "weight_shape", "weight_zero_point"
GLOBAL, G_IDX, WEIGHT = "weight_global_scale", "weight_g_idx", "weight"


def encode(weight: Coded, rule: WeightRule, form: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of a Linear, by the last part of their names. Does not modify its inputs.

    Args:
        form: a layout of compressed-tensors.
        dtype: of scales whose type the layout does not fix.
    """
    if form in (NVFP4, MXFP4):
        return _encode_fp4(weight, form)
    if form == MXFP8:
        return {WEIGHT: weight.codes.contiguous(), SCALE: _exponents(weight)}
    scale = weight.scale.to(dtype)
    tensors = {SCALE: scale.reshape(1) if rule.strategy == "tensor" else scale}
    if form == PACK:
        offset = 2 ** (rule.bits - 1)
        tensors[PACKED] = dense_pack(weight.codes.to(torch.int16) + offset, rule.bits)
        tensors[SHAPE] = torch.tensor(weight.codes.shape, dtype=torch.int64)
    else:
        tensors[WEIGHT] = weight.codes.contiguous()
    if not rule.symmetric:
        assert weight.zero is not None, "an asymmetric rule has zero points"
        tensors[ZERO] = _encode_zero(weight.zero, rule, form)
    if rule.ordered:
        assert weight.g_idx is not None, "an ordered rule has the group of each input"
        tensors[G_IDX] = weight.g_idx.to(torch.int32)
    return tensors


def layout(shape: tuple[int, int], rule: WeightRule, form: str, dtype: str, code: str = "I8") -> WeightLayout:
    """Type and shape of the tensors that :func:`encode` returns, without a weight.

    Args:
        shape: (N, K).
        dtype: safetensors' name of the scales' type.
        code: safetensors' name of the codes' type, where they are not packed.
    """
    (rows, columns), tiles = shape, rule.tiles(shape)
    if form in (NVFP4, MXFP4):
        specs: WeightLayout = {PACKED: ("U8", (rows, columns // 2))}
        specs[SCALE] = ("F8_E4M3" if form == NVFP4 else "U8", tiles)
        return {**specs, GLOBAL: ("F32", (1,))} if form == NVFP4 else specs
    if form == MXFP8:
        return {WEIGHT: (code, shape), SCALE: ("U8", tiles)}
    single = rule.strategy == "tensor"
    specs = {SCALE: (dtype, (1,) if single else tiles)}
    if form == PACK:
        specs[PACKED] = ("I32", (rows, -(-columns * rule.bits // 32)))
        specs[SHAPE] = ("I64", (2,))
    else:
        specs[WEIGHT] = (code, shape)
    if not rule.symmetric:
        packed = form == PACK and not single
        specs[ZERO] = ("I32", (-(-rows * rule.bits // 32), tiles[1])) if packed else ("I8", specs[SCALE][1])
    if rule.ordered:
        specs[G_IDX] = ("I32", (columns,))
    return specs


def unpack(tensors: Mapping[str, Tensor], rule: WeightRule, form: str) -> Coded:
    """The codes of stored tensors: the inverse of :func:`encode`."""
    if form == NVFP4:
        above = tensors[GLOBAL]
        scale = tensors[SCALE].float() / above.float()
        return Coded(unpack_nibbles(tensors[PACKED]), scale, global_scale=above)
    if form in (MXFP4, MXFP8):
        codes = unpack_nibbles(tensors[PACKED]) if form == MXFP4 else tensors[WEIGHT]
        return Coded(codes, torch.exp2(tensors[SCALE].float() - MX_BIAS))
    scale, zero, codes = tensors[SCALE].float(), tensors.get(ZERO), tensors.get(WEIGHT)
    table = (1, 1) if scale.numel() == 1 else scale.shape
    offset = 2 ** (rule.bits - 1)
    if codes is None:
        codes = dense_unpack(tensors[PACKED], rule.bits, int(tensors[SHAPE][1]))
        codes = (codes - offset).view(torch.int8)
    if zero is not None and zero.dtype == torch.int32:
        zero = dense_unpack(zero.T.contiguous(), rule.bits, table[0]).T.float() - offset
    signed = None if zero is None else zero.float().reshape(table).contiguous()
    return Coded(codes, scale.reshape(table), signed, g_idx=tensors.get(G_IDX))


def decode(tensors: Mapping[str, Tensor], rule: WeightRule, form: str) -> Tensor:
    """The weight (N, K) of a Linear, in the type of its scale (FP4 and MX: bfloat16)."""
    weight = unpack(tensors, rule, form)
    fp4 = form in (NVFP4, MXFP4)
    dtype = torch.bfloat16 if form in BFLOAT16 else tensors[SCALE].dtype
    codes = fp4_levels(weight.codes.device)[weight.codes.long()] if fp4 else weight.codes.float()
    if weight.g_idx is not None:
        g_idx = weight.g_idx.long()
        shifted = codes if weight.zero is None else codes - weight.zero[:, g_idx]
        return (shifted * weight.scale[:, g_idx]).to(dtype)
    rows, columns = codes.shape
    height, width = rule.tile((rows, columns))

    def spread(table: Tensor) -> Tensor:
        return (table.repeat_interleave(height, 0)[:rows] if rule.block else table)[..., None]

    tiled = torch.nn.functional.pad(codes, (0, -columns % width)).reshape(rows, -1, width)
    if weight.zero is not None:
        tiled = tiled - spread(weight.zero)
    return (tiled * spread(weight.scale)).reshape(rows, -1)[:, :columns].to(dtype)


def _encode_zero(zero: Tensor, rule: WeightRule, form: str) -> Tensor:
    if rule.strategy == "tensor":
        return zero.reshape(1).to(torch.int8)
    if form != PACK:
        return zero.to(torch.int8)
    return dense_pack((zero + 2 ** (rule.bits - 1)).T.to(torch.int16), rule.bits).T.contiguous()


def _encode_fp4(weight: Coded, form: str) -> dict[str, Tensor]:
    codes = weight.codes.to(torch.uint8)
    tensors = {PACKED: codes[:, 0::2] | codes[:, 1::2] << 4}
    if form == MXFP4:
        return {**tensors, SCALE: _exponents(weight)}
    assert weight.global_scale is not None, "NVFP4 has a global scale"
    above = weight.global_scale.float().reshape(1)
    return {**tensors, SCALE: (weight.scale * above).to(torch.float8_e4m3fn), GLOBAL: above}


def _exponents(weight: Coded) -> Tensor:
    """e + 127 of scales 2^e, uint8."""
    return (torch.frexp(weight.scale).exponent.to(torch.int16) - 1 + MX_BIAS).to(torch.uint8)
