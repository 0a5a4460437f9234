"""Codes of 2 to 8 bits in words of 32, as the products of a device read them.

A code's bits are divided into planes of 8, 4, 2 and 1 bits, the widest plane first and with the lowest bits:
6 bits are a plane of 4 and one of 2. In a plane of b bits, an int32 (K b / 32, N), word (w, n) holds the
inputs w (32 / b) + i of output n at bits [i b, (i + 1) b). Planes follow one another in the first dimension,
so that neighbouring outputs are neighbouring words whatever the width.

Letters: N outputs, K inputs (a multiple of 32), G inputs of a scale; q codes; s scales, z zero points.

    W[n, k] = s[k / G, n] (q[k, n] - z[k / G, n])              z without zero points: 2^(bits - 1)
"""

from __future__ import annotations

import torch
from torch import Tensor

WORD = 32  # bits
MOST = 8  # bits of a code


def plane_bits(bits: int) -> list[int]:
    """Widths of the planes of a code, in their order."""
    assert 1 <= bits <= MOST, f"codes of {bits} bits"
    return [size for size in (8, 4, 2, 1) if bits & size]


def join(codes: Tensor, bits: int) -> Tensor:
    """Words int32 (K bits / 32, N) of codes uint8 (N, K), below 2^bits."""
    rows, columns = codes.shape
    assert columns % WORD == 0, f"{columns} inputs do not fill words"
    planes, shift = [], 0
    for size in plane_bits(bits):
        part = ((codes >> shift) & (2**size - 1)).to(torch.int32).view(rows, -1, WORD // size)
        offsets = torch.arange(0, WORD, size, dtype=torch.int32, device=codes.device)
        planes.append((part << offsets).sum(dim=2, dtype=torch.int32).T)  # disjoint bits: a sum is an or
        shift += size
    return torch.cat(planes).contiguous()


def cut(words: Tensor, bits: int) -> Tensor:
    """The inverse: codes uint8 (..., N, K) of words (..., K bits / 32, N)."""
    columns = words.shape[-2] * WORD // bits
    codes, shift = None, 0
    for size, plane in zip(plane_bits(bits), words.split(_plane_rows(columns, bits), dim=-2), strict=True):
        offsets = torch.arange(0, WORD, size, dtype=torch.int32, device=words.device)
        part = (plane.mT[..., None] >> offsets) & (2**size - 1)
        part = part.flatten(-2).to(torch.uint8) << shift
        codes = part if codes is None else codes | part
        shift += size
    assert codes is not None, "a code has a plane"
    return codes


def dense(words: Tensor, scales: Tensor, zeros: Tensor | None, bits: int) -> Tensor:
    """W float32 (..., N, K) of words (..., K bits / 32, N), scales and zeros (..., K / G, N)."""
    codes = cut(words, bits).float()
    groups = scales.shape[-2]
    codes = codes.unflatten(-1, (groups, -1))
    points = 2 ** (bits - 1) if zeros is None else zeros.float().mT[..., None]
    return ((codes - points) * scales.float().mT[..., None]).flatten(-2)


def _plane_rows(columns: int, bits: int) -> list[int]:
    return [columns * size // WORD for size in plane_bits(bits)]
