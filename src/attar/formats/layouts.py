"""The tensors of one quantized Linear in each layout of compressed-tensors: codes in, bytes out, and back.

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

weight_scale is (P, G) in the model's type; a single one is (1,). weight_g_idx, int32 (K,), stands beside
packed weights whose groups are not neighbours. A decoded weight is code times scale, rounded once to the type
of the scale; for both FP4 layouts that type is bfloat16, whatever the model's, as compressed-tensors decodes
them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from attar.formats.coded import Coded
from attar.formats.dense_pack import dense_pack, dense_unpack
from attar.formats.rules import MXFP4, NVFP4, PACK, WeightRule

PACKED, SCALE, SHAPE, ZERO = "weight_packed", "weight_scale", "weight_shape", "weight_zero_point"
GLOBAL, ORDER, WEIGHT = "weight_global_scale", "weight_g_idx", "weight"
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def encode(weight: Coded, rule: WeightRule, form: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of a Linear, by the last part of their names.

    Args:
        weight: the codes; not changed.
        rule: what they are.
        form: one of :data:`attar.formats.rules.FORMATS`.
        dtype: of scales that have no type of their own.
    """
    if form in (NVFP4, MXFP4):
        return _encode_fp4(weight, form)
    scale = weight.scale.to(dtype)
    tensors = {SCALE: scale.reshape(1) if rule.strategy == "tensor" else scale}
    if form == PACK:
        offset = 2 ** (rule.bits - 1)
        tensors[PACKED] = dense_pack(weight.codes.to(torch.int16) + offset, rule.bits)
        tensors[SHAPE] = torch.tensor(weight.codes.shape, dtype=torch.int64)
    else:
        tensors[WEIGHT] = weight.codes.contiguous()
    if not rule.symmetric:
        assert weight.zero is not None, "an asymmetric rule has zeros"
        tensors[ZERO] = _encode_zero(weight.zero, rule, form)
    if rule.ordered:
        assert weight.order is not None, "an ordered rule has the group of each input"
        tensors[ORDER] = weight.order.to(torch.int32)
    return tensors


def layout(
    shape: tuple[int, int], rule: WeightRule, form: str, dtype: str, code: str = "I8"
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type and shape of the tensors that :func:`encode` makes, known before any weight is.

    Args:
        shape: (N, K).
        dtype: safetensors' name of the scales' type.
        code: safetensors' name of the codes' type, where they are stored as they are.
    """
    (rows, columns), tiles = shape, rule.tiles(shape)
    if form in (NVFP4, MXFP4):
        made: dict[str, tuple[str, tuple[int, ...]]] = {PACKED: ("U8", (rows, columns // 2))}
        made[SCALE] = ("F8_E4M3" if form == NVFP4 else "U8", tiles)
        return {**made, GLOBAL: ("F32", (1,))} if form == NVFP4 else made
    single = rule.strategy == "tensor"
    made = {SCALE: (dtype, (1,) if single else tiles)}
    if form == PACK:
        made[PACKED] = ("I32", (rows, -(-columns * rule.bits // 32)))
        made[SHAPE] = ("I64", (2,))
    else:
        made[WEIGHT] = (code, shape)
    if not rule.symmetric:
        packed = form == PACK and not single
        made[ZERO] = ("I32", (-(-rows * rule.bits // 32), tiles[1])) if packed else ("I8", made[SCALE][1])
    if rule.ordered:
        made[ORDER] = ("I32", (columns,))
    return made


def decode(tensors: Mapping[str, Tensor], rule: WeightRule, form: str) -> Tensor:
    """The weight (N, K) of a Linear, in the type of its scale (FP4: bfloat16)."""
    codes, scale, zero, dtype = (
        _codes(tensors, rule, form),
        tensors[SCALE].float(),
        None,
        tensors[SCALE].dtype,
    )
    if form == NVFP4:
        scale, dtype = scale / tensors[GLOBAL].float(), torch.bfloat16
    elif form == MXFP4:
        scale, dtype = torch.exp2(scale - 127.0), torch.bfloat16
    if ZERO in tensors:
        zero = _decode_zero(tensors[ZERO], rule, form, codes.shape[0])
    if ORDER in tensors:
        order = tensors[ORDER].long()
        shifted = codes if zero is None else codes - zero[:, order]
        return (shifted * scale[:, order]).to(dtype)
    return _scaled(codes, scale, zero, rule).to(dtype)


def _scaled(codes: Tensor, scale: Tensor, zero: Tensor | None, rule: WeightRule) -> Tensor:
    """(code - zero) * scale, float32 (N, K); the tables are (P, G) or (1,)."""
    rows, columns = codes.shape
    height, width = rule.tile((rows, columns))

    def spread(table: Tensor) -> Tensor:
        table = table.reshape(1, 1) if table.dim() < 2 else table
        return (table.repeat_interleave(height, 0)[:rows] if rule.block else table)[..., None]

    tiled = torch.nn.functional.pad(codes, (0, -columns % width)).reshape(rows, -1, width)
    if zero is not None:
        tiled = tiled - spread(zero)
    return (tiled * spread(scale)).reshape(rows, -1)[:, :columns]


def _codes(tensors: Mapping[str, Tensor], rule: WeightRule, form: str) -> Tensor:
    """The codes as numbers, float32 (N, K)."""
    if form == PACK:
        columns = int(tensors[SHAPE][1])
        return dense_unpack(tensors[PACKED], rule.bits, columns).float() - 2 ** (rule.bits - 1)
    if form in (NVFP4, MXFP4):
        packed = tensors[PACKED]
        codes = torch.stack((packed & 15, packed >> 4), -1).reshape(packed.shape[0], -1).long()
        levels = torch.tensor([*FP4, *(-value for value in FP4)])
        return levels.to(packed.device)[codes]
    return tensors[WEIGHT].float()


def _encode_zero(zero: Tensor, rule: WeightRule, form: str) -> Tensor:
    if rule.strategy == "tensor":
        return zero.reshape(1).to(torch.int8)
    if form != PACK:
        return zero.to(torch.int8)
    return dense_pack((zero + 2 ** (rule.bits - 1)).T.to(torch.int16), rule.bits).T.contiguous()


def _decode_zero(stored: Tensor, rule: WeightRule, form: str, rows: int) -> Tensor:
    """Signed zeros, float32 (P, G) or (1,)."""
    if form != PACK or rule.strategy == "tensor":
        return stored.float()
    return dense_unpack(stored.T.contiguous(), rule.bits, rows).T.float() - 2 ** (rule.bits - 1)


def _encode_fp4(weight: Coded, form: str) -> dict[str, Tensor]:
    codes = weight.codes.to(torch.uint8)
    tensors = {PACKED: codes[:, 0::2] | codes[:, 1::2] << 4}
    if form == MXFP4:
        exponent = torch.frexp(weight.scale).exponent.to(torch.int16) - 1 + 127
        return {**tensors, SCALE: exponent.to(torch.uint8)}
    assert weight.global_scale is not None, "NVFP4 has a global scale"
    above = weight.global_scale.float().reshape(1)
    return {**tensors, SCALE: (weight.scale * above).to(torch.float8_e4m3fn), GLOBAL: above}
