"""Planes: how ggml's blocks spread the bits of their codes over bytes.

ggml, ``ggml-common.h`` (the structs) and ``ggml-quants.c``. There is no paper.

    byte j of a chunk of r bytes:  sum over i < 8 / b of  ((q[j + i r] >> t) mod 2^b) << (b i)

Letters: q codes of a chunk of 8 r / b weights; b bits of each that the plane holds, from bit t on; r run,
bytes of a chunk. No field straddles a byte, so that eight bytes are cut and joined at a time where r allows.
With a compiler, kernels/planes.py does it.

Only the scales and minimums of Q4_K and Q5_K are no planes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attar.kernels import planes as kernel


@dataclass(frozen=True)
class Plane:
    """Some of the bits of every code.

    Attributes:
        at: its first byte in the block.
        bits: b, 1, 2, 4 or 8.
        run: r.
        shift: t.
    """

    at: int
    bits: int
    run: int
    shift: int = 0

    @property
    def word(self) -> tuple[torch.dtype, int]:
        """The widest type in which it is cut and joined, and a mask of b bits for each of its bytes."""
        mask = (1 << self.bits) - 1
        if self.run % 8:
            return torch.uint8, mask
        return torch.int64, int.from_bytes(bytes([mask] * 8), "little", signed=True)


def join(out: Tensor, planes: tuple[Plane, ...], codes: Tensor) -> None:
    """Write codes (B, n), uint8 with memory of their own, into the blocks ``out`` (B, bytes)."""
    assert int(codes.max()) >> max(plane.shift + plane.bits for plane in planes) == 0
    if kernel.join(out, _numbers(planes), codes):
        return
    for plane in planes:
        kind, mask = plane.word
        spread = codes.view(len(codes), -1, 8 // plane.bits, plane.run).view(kind)
        joined = (spread[:, :, 0] >> plane.shift) & mask
        for i in range(1, 8 // plane.bits):
            joined |= ((spread[:, :, i] >> plane.shift) & mask) << plane.bits * i
        octets = joined.view(torch.uint8).reshape(len(codes), -1)
        out[:, plane.at : plane.at + octets.shape[1]] = octets


def cut(blocks: Tensor, planes: tuple[Plane, ...], count: int) -> Tensor:
    """The codes (B, count), uint8, of blocks (B, bytes)."""
    codes = torch.empty((len(blocks), count), dtype=torch.uint8, device=blocks.device)
    if kernel.cut(blocks, _numbers(planes), codes):
        return codes
    codes.zero_()
    for plane in planes:
        kind, mask = plane.word
        octets = blocks[:, plane.at : plane.at + count * plane.bits // 8]
        joined = octets.clone(memory_format=torch.contiguous_format)
        joined = joined.view(len(blocks), -1, plane.run).view(kind)
        spread = codes.view(len(blocks), -1, 8 // plane.bits, plane.run).view(kind)
        for i in range(8 // plane.bits):
            spread[:, :, i] |= ((joined >> plane.bits * i) & mask) << plane.shift
    return codes


def _numbers(planes: tuple[Plane, ...]) -> list[tuple[int, int, int, int]]:
    return [(plane.at, plane.bits, plane.run, plane.shift) for plane in planes]


def join_six(scales: Tensor, minimums: Tensor) -> Tensor:
    """Eight scales and eight minimums of 6 bits, uint8 (B, 8) each, in 12 bytes.

    The first four of each are the low 6 bits of bytes 0 to 7. Of the last four of each, bytes 8 to 11 hold
    the low 4 bits (scale low, minimum high), bytes 0 to 7 the other 2.
    """
    first = torch.cat((scales[:, :4], minimums[:, :4]), 1)
    last = torch.cat((scales[:, 4:], minimums[:, 4:]), 1)
    return torch.cat((first | last >> 4 << 6, last[:, :4] & 15 | last[:, 4:] << 4), 1)


def cut_six(octets: Tensor) -> Tensor:
    """The inverse: uint8 (B, 16), the scales before the minimums."""
    low = torch.cat((octets[:, 8:] & 15, octets[:, 8:] >> 4), 1)
    first, last = octets[:, :8] & 63, octets[:, :8] >> 6 << 4 | low
    return torch.cat((first[:, :4], last[:, :4], first[:, 4:], last[:, 4:]), 1)
