"""Blocks of llama.cpp's on even grids, w = s (q - z): every type but the plain floats.

    w = s0 (q0 - h) - m        s = s0,  q = q0 - 2^(b-1),  z = h + m / s0 - 2^(b-1)
    w = s0 T[q0]               s = s0,  q = T[q0],         z = 0,  b = 8

Letters: those of blocks.py; b bits of a code. Where s0 is 0 and m is not, all weights of the tile are -m:
codes of 0, a scale of m and a zero of 1. A zero is not a whole number where a file stores minimums.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attar.formats.gguf.blocks import LAYOUTS, scales, unpack
from attar.formats.coded import UniformWeight

BITS = {"Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q5_1": 5, "Q2_K": 2, "Q3_K": 3, "Q4_K": 4, "Q5_K": 5, "Q6_K": 6}


def uniform_of_blocks(kind: str, data: Tensor, columns: int) -> UniformWeight:
    """A weight in blocks.

    Args:
        kind: its type, one of :data:`attar.formats.gguf.blocks.LAYOUTS`.
        data: uint8 (N, row bytes).
        columns: K.

    Raises:
        CheckpointError: the bytes are not those of rows of K weights.
    """
    layout = LAYOUTS[kind]
    codes, stored = unpack(kind, data, columns)
    scale, minimum = scales(kind, stored)
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
