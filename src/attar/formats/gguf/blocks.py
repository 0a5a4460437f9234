"""The bytes of ggml's blocks: codes and scales to rows of bytes, and back.

ggml, ``ggml-common.h`` (the structs) and ``ggml-quants.c`` (``dequantize_row_*``). There is no paper.

    w = s * (q - h) - m ,   s = d * (c - k) ,   m = d_m * c_m      (Q2_K to Q6_K)
                            s = d ,             m = -(stored m)    (Q4_0 to Q8_0)
    w = s * T[q] ,          s = d * (c - k)                        (IQ4_XS)
                            s = d                                  (IQ4_NL)
                            s = 2^(e - 128)                        (MXFP4)
                            s = e4m3(c) / 2                        (NVFP4)

Letters: q code of a weight, h the code of zero; s, m scale and minimum of a tile of 16 or 32 weights; c, c_m
their codes, k the code of zero among c; d, d_m float16; T sixteen uneven levels; e exponent.

NVFP4 has another scale of the whole weight, a tensor of its own beside the blocks (reader.py).

A row is cut into blocks of 32, 64 or 256 weights, each a struct: the float16 numbers, c and c_m, and q in
planes of bits (planes.py). Everything little-endian.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from attar.errors import CheckpointError, NumericsError
from attar.formats.gguf.planes import Plane, cut, cut_six, join, join_six
from attar.formats.gguf.types import TYPES, row_bytes

CHUNK = 1 << 20  # weights at a time

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FP4_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
BOTH = ("scale_codes", "minimum_codes")
SCALES = ("scale_codes",)
SIX_BITS_AT = 4  # first byte of c and c_m in Q4_K and Q5_K


@dataclass(frozen=True)
class BlockLayout:
    """A block.

    Attributes:
        codes: planes of q.
        halves: first bytes of the float16 numbers, by name.
        tiles: number of c in a block.
        integers: names of c, c_m or e.
        planes: of these, c before c_m; none for the 6 bits of Q4_K and Q5_K.
        zero: h.
        bias: k.
        levels: T; None: T[q] = q - h.
    """

    codes: tuple[Plane, ...]
    halves: Mapping[str, int]
    tiles: int = 1
    integers: tuple[str, ...] = ()
    planes: tuple[Plane, ...] = ()
    zero: int = 0
    bias: int = 0
    levels: tuple[int, ...] | None = None


LAYOUTS = {
    "Q4_0": BlockLayout((Plane(2, 4, 16),), {"d": 0}, zero=8),
    "Q4_1": BlockLayout((Plane(4, 4, 16),), {"d": 0, "m": 2}),
    "Q5_0": BlockLayout((Plane(6, 4, 16), Plane(2, 1, 1, 4)), {"d": 0}, zero=16),
    "Q5_1": BlockLayout((Plane(8, 4, 16), Plane(4, 1, 1, 4)), {"d": 0, "m": 2}),
    "Q8_0": BlockLayout((Plane(2, 8, 32),), {"d": 0}),
    "Q2_K": BlockLayout((Plane(16, 2, 32),), {"d": 80, "dmin": 82}, 16, BOTH, (Plane(0, 4, 16),)),
    "Q3_K": BlockLayout(
        (Plane(32, 2, 32), Plane(0, 1, 32, 2)),
        {"d": 108},
        16,
        SCALES,
        (Plane(96, 4, 8), Plane(104, 2, 4, 4)),
        4,
        32,
    ),
    "Q4_K": BlockLayout((Plane(16, 4, 32),), {"d": 0, "dmin": 2}, 8, BOTH),
    "Q5_K": BlockLayout((Plane(48, 4, 32), Plane(16, 1, 32, 4)), {"d": 0, "dmin": 2}, 8, BOTH),
    "Q6_K": BlockLayout(
        (Plane(0, 4, 64), Plane(128, 2, 32, 4)), {"d": 208}, 16, SCALES, (Plane(192, 8, 16),), 32
    ),
    "IQ4_NL": BlockLayout((Plane(2, 4, 16),), {"d": 0}, levels=IQ4_LEVELS),
    "IQ4_XS": BlockLayout(
        (Plane(8, 4, 16),),
        {"d": 0},
        8,
        SCALES,
        (Plane(4, 4, 1), Plane(2, 2, 1, 4)),
        bias=32,
        levels=IQ4_LEVELS,
    ),
    "MXFP4": BlockLayout((Plane(1, 4, 16),), {}, 1, ("exponent",), (Plane(0, 8, 1),), levels=FP4_DOUBLED),
    "NVFP4": BlockLayout((Plane(4, 4, 8),), {}, 4, ("e4m3",), (Plane(0, 8, 4),), levels=FP4_DOUBLED),
}
"""Every type that is stored in blocks."""

SIGNED = {("Q8_0", "codes"), ("Q6_K", "scale_codes")}
"""Whole numbers that are signed bytes; all others are unsigned."""


def pack(kind: str, codes: Tensor, stored: Mapping[str, Tensor]) -> Tensor:
    """The bytes of a weight. Does not modify its inputs. Returns uint8 (N, row bytes).

    Args:
        kind: a name of :data:`LAYOUTS`, or F32, F16, BF16.
        codes: q, whole numbers (N, K), int8 for Q8_0, from 0 on for the others; for a float type the weights.
        stored: the other fields of the file by name: "d", "dmin", "m" float16 (N, K / block); "scale_codes"
            and "minimum_codes" (N, tiles), c with its k (0 to 63 for Q3_K and IQ4_XS), int8 for Q6_K; for
            MXFP4 "exponent" uint8 (N, K / 32), for NVFP4 "e4m3" uint8 (N, K / 16), its sign 0.

    Raises:
        ModelError: K is no multiple of the block.
    """
    if kind in FLOATS:
        return codes.to(FLOATS[kind]).contiguous().view(torch.uint8)
    layout, block = LAYOUTS[kind], TYPES[kind].block
    data = torch.empty((len(codes), row_bytes(kind, codes.shape[1])), dtype=torch.uint8, device=codes.device)
    out, flat = data.view(-1, TYPES[kind].size), codes.reshape(-1, block)
    fields = {name: stored[name].reshape(len(out), -1) for name in (*layout.halves, *layout.integers)}
    for chunk in _chunks(len(out), block):
        join(out[chunk], layout.codes, _octets(kind, "codes", flat[chunk]))
        for name, at in layout.halves.items():
            out[chunk, at : at + 2] = fields[name][chunk].half().contiguous().view(torch.uint8)
        _join_integers(kind, out[chunk], {name: fields[name][chunk] for name in layout.integers})
    return data


def unpack(kind: str, data: Tensor, columns: int) -> tuple[Tensor, dict[str, Tensor]]:
    """The inverse of :func:`pack`: codes (N, K), and the other fields by name.

    Args:
        kind: as there.
        data: uint8 (N, row bytes).
        columns: K.

    Raises:
        CheckpointError: the bytes are not rows of K weights.
    """
    _check_shape(kind, data, columns)
    if kind in FLOATS:
        return _floats(kind, data), {}
    block, rows = TYPES[kind].block, len(data)
    blocks = data.reshape(-1, TYPES[kind].size)
    codes = torch.empty((rows, columns), dtype=torch.uint8, device=data.device)
    fields: dict[str, list[Tensor]] = {}
    for chunk in _chunks(len(blocks), block):
        codes.view(-1, block)[chunk] = cut(blocks[chunk], LAYOUTS[kind].codes, block)
        for name, value in _stored(kind, blocks[chunk]).items():
            fields.setdefault(name, []).append(value)
    stored = {name: torch.cat(values).reshape(rows, -1) for name, values in fields.items()}
    return codes.view(torch.int8) if (kind, "codes") in SIGNED else codes, stored


def dequantize(kind: str, data: Tensor, columns: int) -> Tensor:
    """The weights, float32 (N, K), with the roundings of ggml's reference.

    Args:
        kind: as for :func:`pack`.
        data: uint8 (N, row bytes).
        columns: K.

    Raises:
        CheckpointError: the bytes are not rows of K weights.
    """
    _check_shape(kind, data, columns)
    if kind in FLOATS:
        return _floats(kind, data).float()
    blocks = data.reshape(-1, TYPES[kind].size)
    weights = torch.empty((len(data), columns), dtype=torch.float32, device=data.device)
    out = weights.view(-1, TYPES[kind].block)
    for chunk in _chunks(len(blocks), TYPES[kind].block):
        _decode(kind, blocks[chunk], out[chunk])
    return weights


def scales(kind: str, stored: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """s and m of the fields from :func:`unpack`, float32 (N, tiles); m is None where the type has none."""
    layout = LAYOUTS[kind]
    rows = len(next(iter(stored.values())))
    flat = {
        name: value.reshape(-1, layout.tiles if name in layout.integers else 1)
        for name, value in stored.items()
    }
    scale, minimum = _scales(layout, flat)
    return scale.reshape(rows, -1), None if minimum is None else minimum.reshape(rows, -1)


def check_blocks(kind: str, data: Tensor, name: str) -> None:
    """Raise where weights, or the scales and minimums of blocks, are not finite.

    Args:
        kind: as for :func:`pack`; other types hold whole numbers and are not checked.
        data: uint8 (N, row bytes).

    Raises:
        NumericsError: names tensor, field and type.
    """
    for leaf, wrong in _not_finite(kind, data).items():
        if wrong.any():
            raise NumericsError(
                f"{name}: {leaf} of {kind} is NaN or infinite, {int(wrong.sum())} times of {wrong.numel()}",
                hint="quantize the model again",
            )


def _not_finite(kind: str, data: Tensor) -> dict[str, Tensor]:
    """Where each field is NaN or infinite."""
    if kind in FLOATS:
        return {"weight": ~torch.isfinite(_floats(kind, data))}
    if kind not in LAYOUTS:
        return {}
    blocks = data.reshape(-1, TYPES[kind].size)
    if kind == "MXFP4":
        return {"exponent": _overflow(blocks)}
    if kind == "NVFP4":
        return {"e4m3": blocks[:, :4] & 127 == 127}
    return {name: ~torch.isfinite(_half(blocks, at)) for name, at in LAYOUTS[kind].halves.items()}


def _overflow(blocks: Tensor) -> Tensor:
    """Blocks of MXFP4 with weights beyond float32. E8M0 has no infinity; its NaN is 255."""
    wrong = blocks[:, 0] > 252  # below, even 6 * 2^(e - 127) is finite
    if wrong.any():
        high = blocks[wrong]
        weights = torch.empty((len(high), TYPES["MXFP4"].block), device=blocks.device)
        _decode("MXFP4", high, weights)
        wrong[wrong.clone()] = (high[:, 0] == 255) | ~torch.isfinite(weights).all(1)
    return wrong


def _chunks(count: int, block: int) -> list[slice]:
    """Slices of ``count`` blocks, CHUNK weights each."""
    step = CHUNK // block
    return [slice(start, start + step) for start in range(0, count, step)]


def _check_shape(kind: str, data: Tensor, columns: int) -> None:
    needed = row_bytes(kind, columns)
    if data.dtype != torch.uint8 or data.shape[-1] != needed:
        raise CheckpointError(
            f"rows of {data.shape[-1]} {data.dtype} are not {columns} weights of {kind}, "
            f"which take {needed} bytes",
            hint="the file is damaged, or shape and type belong to another tensor",
        )


def _floats(kind: str, data: Tensor) -> Tensor:
    """Bytes as a plain array."""
    aligned = data.contiguous()
    if aligned.storage_offset() % FLOATS[kind].itemsize:
        aligned = aligned.clone()
    return aligned.view(FLOATS[kind])


def _half(blocks: Tensor, at: int) -> Tensor:
    """A float16 number of each block, (B, 1)."""
    return blocks[:, at : at + 2].clone(memory_format=torch.contiguous_format).view(torch.float16)


def _octets(kind: str, name: str, numbers: Tensor) -> Tensor:
    """Whole numbers as bytes, copied."""
    dtype = torch.int8 if (kind, name) in SIGNED else torch.uint8
    return numbers.to(dtype, copy=True, memory_format=torch.contiguous_format).view(torch.uint8)


def _join_integers(kind: str, out: Tensor, numbers: Mapping[str, Tensor]) -> None:
    """Write c, c_m or e into blocks."""
    octets = [_octets(kind, name, value) for name, value in numbers.items()]
    if LAYOUTS[kind].planes:
        join(out, LAYOUTS[kind].planes, torch.cat(octets, 1))
    elif octets:
        out[:, SIX_BITS_AT : SIX_BITS_AT + 12] = join_six(*octets)


def _stored(kind: str, blocks: Tensor) -> dict[str, Tensor]:
    """The fields other than the codes, each (B, 1) or (B, tiles)."""
    layout = LAYOUTS[kind]
    stored = {name: _half(blocks, at) for name, at in layout.halves.items()}
    if not layout.integers:
        return stored
    if layout.planes:
        numbers = cut(blocks, layout.planes, layout.tiles * len(layout.integers))
    else:
        numbers = cut_six(blocks[:, SIX_BITS_AT : SIX_BITS_AT + 12])
    for name, value in zip(layout.integers, numbers.split(layout.tiles, 1), strict=True):
        stored[name] = value.view(torch.int8) if (kind, name) in SIGNED else value
    return stored


def _decode(kind: str, blocks: Tensor, out: Tensor) -> None:
    """The weights of blocks into ``out`` (B, block)."""
    layout, stored = LAYOUTS[kind], _stored(kind, blocks)
    codes = cut(blocks, layout.codes, out.shape[1])
    if layout.levels is not None:
        out.copy_(_look_up_levels(codes, layout.levels))
    elif (kind, "codes") in SIGNED:
        out.copy_(codes.view(torch.int8))
    else:
        out.copy_(codes.view(torch.int8).sub_(layout.zero))
    scale, minimum = _scales(layout, stored)
    tiled = out.view(len(out), scale.shape[1], -1)
    tiled.mul_(scale[..., None])
    if minimum is not None:
        tiled.sub_(minimum[..., None])


def _scales(layout: BlockLayout, stored: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """s and m, float32 (B, tiles)."""
    if "exponent" in stored:
        return _power(stored["exponent"]), None
    if "e4m3" in stored:
        return _unsigned_e4m3(stored["e4m3"]) * 0.5, None
    scale = stored["d"].float()
    if "scale_codes" in stored:
        scale = scale * (stored["scale_codes"].float() - layout.bias)
    if "m" in stored:
        return scale, -stored["m"].float()
    return scale, stored["dmin"].float() * stored["minimum_codes"] if "dmin" in stored else None


def _power(exponent: Tensor) -> Tensor:
    """2^(e - 128), float32."""
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent.int() - 128)


def _unsigned_e4m3(octets: Tensor) -> Tensor:
    """Numbers of e4m3, float32. ggml passes over the sign; byte 127 is 0 there, and byte 255 is 480."""
    numbers = (octets & 127).view(torch.float8_e4m3fn).float().nan_to_num_(nan=480.0)
    return numbers.masked_fill_(octets == 127, 0.0)


def _look_up_levels(codes: Tensor, levels: tuple[int, ...]) -> Tensor:
    """T[q], float32 of the same shape: two neighbours at a time, as one number of 64 bits."""
    pairs = torch.arange(1 << 12, dtype=torch.int16, device=codes.device).view(torch.uint8) & 15
    table = torch.tensor(levels, dtype=torch.float32, device=codes.device)[pairs.int()].view(torch.float64)
    levels_of_pairs = table.index_select(0, codes.view(torch.int16).flatten().int())
    return levels_of_pairs.view(torch.float32).view(codes.shape)
