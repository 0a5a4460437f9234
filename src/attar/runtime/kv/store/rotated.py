"""INT4: keys shifted, keys and values rotated, then 4-bit codes with a scale and a minimum for each token and
head.

    y = (x - c) H,   m = min y,   s = (max y - min y) / 15,   q = round((y - m) / s),   x ~ (q s + m) H + c

x is the key or the value of one token in one head. H is a Hadamard matrix of 2^j rows, divided by its norm,
on each 2^j numbers of a head; 2^j is the largest power of two that divides head_dim. It spreads a few large
numbers over all, and H H = 1. c is a constant vector for each layer and head, keys alone: the mean key that
the model has for fixed tokens (``runner/key_means.py``). It depends on the model alone, so that no request
changes the rounding of another. A token has its final form when it is written.

Sources: QuaRot (Ashkboos et al. 2024, arXiv 2404.00456) for the rotation; the shift is the smoothing of keys
of SageAttention (Zhang et al. 2024, arXiv 2410.02367). s and m are float16: head_dim / 2 + 4 bytes for each
token and head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from attar.errors import SettingsError
from attar.runtime.kv.store.kivi import packed, quantize, unpacked
from attar.runtime.kv.store.planes import Cells, PlaneStore, PoolGeometry

LARGEST = torch.finfo(torch.float16).max


class RotatedStore(PlaneStore):
    """Two planes: bytes of two codes, and float16 pairs s, m.

    Attributes:
        shift: float32 (layers, kv_heads, head_dim), c; zeros until it is set. Not to be changed once a key is
            written.

    Raises:
        SettingsError: a head's numbers do not fill bytes.
    """

    def __init__(self, geometry: PoolGeometry, device: torch.device) -> None:
        n = geometry.head_dim
        if n % 2:
            raise SettingsError("kv_dtype", "int4", f"another one: {n} is no multiple of 2")
        codes = torch.zeros(geometry.plane(n // 2), dtype=torch.uint8, device=device)
        pairs = torch.zeros(geometry.plane(2), dtype=torch.float16, device=device)
        super().__init__(geometry, codes, pairs)
        self.codes, self.pairs = codes, pairs
        self.shift = torch.zeros(geometry.layers, geometry.kv_heads, n, device=device)

    def write_(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        shifted = k.float() - self.shift[layer]
        for kind, x in enumerate(self.geometry.stored(shifted, v)):
            codes, pairs = encode(x)
            self.rows(self.codes, layer, kind).index_copy_(0, slots, codes)
            self.rows(self.pairs, layer, kind).index_copy_(0, slots, pairs)

    def read_cells(self, cells: Cells, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        layers, _, heads = cells
        kinds = [
            decode(codes.flatten(1, 2)[cells], pairs.flatten(1, 2)[cells])
            for codes, pairs in zip(self.codes.unbind(1), self.pairs.unbind(1), strict=True)
        ]
        kinds[0] += self.shift[layers, heads]
        return self.geometry.loaded(*(kind.to(dtype) for kind in kinds))

    def read(
        self, layer: int, blocks: Tensor, dtype: torch.dtype, numbers: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        kinds = [
            decode(codes.index_select(0, blocks), pairs.index_select(0, blocks)).flatten(0, 1)
            for codes, pairs in zip(self.codes[layer], self.pairs[layer], strict=True)
        ]
        kinds[0] += self.shift[layer]
        return self.geometry.loaded(*(kind.to(dtype) for kind in kinds))


def rotated(x: Tensor) -> Tensor:
    """x H along the last dimension, float32 (..., n); its own inverse."""
    n = x.shape[-1]
    size = n & -n
    y = x.float().unflatten(-1, (-1, size))
    half = 1
    while half < size:
        first, second = y.unflatten(-1, (-1, 2, half)).unbind(-2)
        y = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        half *= 2
    return (y / math.sqrt(size)).flatten(-2)


def encode(x: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes uint8 (..., n / 2) and s, m float16 (..., 2) of numbers (..., n), which are rotated here."""
    x = x.clamp(-LARGEST, LARGEST)  # so that no sum of the rotation is infinite
    q, s, m = quantize(rotated(x).clamp_(-LARGEST, LARGEST), -1, 4)
    return packed(q, 4), torch.cat((s, m), dim=-1)


def decode(codes: Tensor, pairs: Tensor) -> Tensor:
    """float32 (..., n) of :func:`encode`, rotated back."""
    s, m = pairs.float().split(1, dim=-1)
    return rotated(torch.addcmul(m, unpacked(codes, 4), s))
