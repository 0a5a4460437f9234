"""INT4: keys shifted and scaled, keys and values rotated, then 4-bit codes with a scale and a minimum for
each token and head.

    y = (x - c) D H,   m = a - r b,   s = 2 r b / 15,   q = round((y - m) / s) between 0 and 15
    x ~ (q s + m) H D^-1 + c                  a, b: middle and half of the range of y

x is the key or the value of one token in one head. H is a Hadamard matrix of 2^j rows, divided by its norm,
on each 2^j numbers of a head; 2^j is the largest power of two that divides head_dim. It spreads a few large
numbers over all, and H H = 1. r is the one of RANGES with the least squared error. c, of keys alone, is the
one of two constant vectors of each layer and head with the smaller range: the mean key, or the mean key of a
sequence's first token, on which attention rests and which is unlike all others; the sign of s says which. D
is diagonal, for each layer and head: 1, or of keys calibrated (``quantization/kv_basis.py``), so that
channels which queries multiply by more are rounded less. Both depend on the model alone
(``runner/key_means.py``), so that no request changes the rounding of another. A token has its final form when
it is written.

Sources: QuaRot (Ashkboos et al. 2024, arXiv 2404.00456) for the rotation; the shift is the smoothing of keys
of SageAttention (Zhang et al. 2024, arXiv 2410.02367). s and m are float16: head_dim / 2 + 4 bytes for each
token and head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attar.errors import SettingsError
from attar.runtime.kv.store.kivi import packed, unpacked
from attar.runtime.kv.store.planes import Cells, PlaneStore, PoolGeometry

RANGES = (1.0, 0.94, 0.88, 0.82)  # r
LARGEST, SMALLEST = torch.finfo(torch.float16).max, torch.finfo(torch.float16).tiny


@dataclass(frozen=True)
class CacheBasis:
    """What the keys of a model are rounded in.

    Attributes:
        centers: float32 (2, layers, kv_heads, head_dim), c.
        factors: float32 (layers, kv_heads, head_dim), the diagonals of D.
        formats: of the keys and values of each layer, int4 or int8 (scaled.py); empty: int4 in all.
    """

    centers: Tensor
    factors: Tensor
    formats: tuple[str, ...] = ()

    @classmethod
    def of_centers(cls, centers: Tensor) -> CacheBasis:
        """With D = 1."""
        return cls(centers, torch.ones_like(centers[0]))

    def at(self, *index: Any) -> tuple[Tensor, Tensor]:
        """D (..., head_dim) and c (2, ..., head_dim) of layers, or of layers and heads."""
        return self.factors[index], self.centers[:, *index]

    def rows(self) -> Tensor:
        """For csrc/decode/kv_codes.h, float32 (layers, kv_heads, 4, head_dim): D, 1 / D and c D H."""
        return torch.stack((self.factors, 1 / self.factors, *rotated(self.centers * self.factors)), dim=2)


def formats_label(kv_dtype: str, formats: Sequence[str]) -> str:
    """A pool's format in words."""
    wide = sum(name != kv_dtype for name in formats)
    return f"{kv_dtype}, {wide} of {len(formats)} layers int8" if wide else kv_dtype


class RotatedStore(PlaneStore):
    """Two planes: bytes of two codes, and float16 pairs s, m.

    Attributes:
        basis: zeros and ones until it is set. Not to be changed once a key is written.

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
        zeros = torch.zeros(2, geometry.layers, geometry.kv_heads, n, device=device)
        self.basis = CacheBasis.of_centers(zeros)

    def write_(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        for kind, x in enumerate(self.geometry.stored(k, v)):
            codes, pairs = encode(x, *(() if kind else self.basis.at(layer)))
            self.rows(self.codes, layer, kind).index_copy_(0, slots, codes)
            self.rows(self.pairs, layer, kind).index_copy_(0, slots, pairs)

    def read_cells(self, cells: Cells, owner: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        kinds = [
            decode(
                codes.flatten(1, 2)[cells],
                pairs.flatten(1, 2)[cells],
                *(() if kind else self.basis.at(*owner)),
            )
            for kind, (codes, pairs) in enumerate(
                zip(self.codes.unbind(1), self.pairs.unbind(1), strict=True)
            )
        ]
        return self.geometry.loaded(*(kind.to(dtype) for kind in kinds))

    def read(
        self, layer: int, blocks: Tensor, dtype: torch.dtype, numbers: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        kinds = [
            decode(
                codes.index_select(0, blocks),
                pairs.index_select(0, blocks),
                *(() if kind else self.basis.at(layer)),
            ).flatten(0, 1)
            for kind, (codes, pairs) in enumerate(zip(self.codes[layer], self.pairs[layer], strict=True))
        ]
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


def encode(x: Tensor, factors: Tensor | None = None, centers: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Bytes uint8 (..., n / 2) and s, m float16 (..., 2) of numbers (..., n), which are rotated here.

    Args:
        factors: D of keys, broadcasts against x; None: of values.
        centers: (2, ...), c of keys, each broadcasts against x.
    """
    x = x.clamp(-LARGEST, LARGEST)  # so that no sum of the rotation is infinite
    y = rotated(x if factors is None else x * factors)
    other = torch.zeros_like(y[..., :1], dtype=torch.bool)
    if factors is not None and centers is not None:
        usual, first = (y - c for c in rotated(centers * factors))
        other = _spread(first) < _spread(usual)
        y = torch.where(other, first, usual)
    q, s, m = _rounded(y.clamp_(-LARGEST, LARGEST))
    return packed(q, 4), torch.cat((torch.where(other, -s, s), m), dim=-1)


def decode(
    codes: Tensor, pairs: Tensor, factors: Tensor | None = None, centers: Tensor | None = None
) -> Tensor:
    """float32 (..., n) of :func:`encode`, rotated back."""
    s, m = pairs.float().split(1, dim=-1)
    x = rotated(torch.addcmul(m, unpacked(codes, 4), s.abs()))
    if factors is None or centers is None:
        return x
    return x / factors + torch.where(s < 0, centers[1], centers[0])


def _rounded(y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q uint8 (..., n), s and m float16 (..., 1) of y (..., n)."""
    low, high = y.aminmax(dim=-1, keepdim=True)
    a, b = (low + high) / 2, (high - low) / 2
    best: tuple[Tensor, ...] = ()
    for r in RANGES:
        m = (a - r * b).half()
        s = ((a + r * b - m.float()) / 15).half().clamp_(min=SMALLEST)
        q = ((y - m.float()) / s.float()).round_().clamp_(0, 15)
        error = (torch.addcmul(m.float(), q, s.float()) - y).square().sum(-1, keepdim=True)
        if best:
            pairs = zip((error, q, s, m), best, strict=True)
            best = tuple(torch.where(error < best[0], new, old) for new, old in pairs)
        else:
            best = error, q, s, m
    _, q, s, m = best
    return q.to(torch.uint8), s, m


def _spread(y: Tensor) -> Tensor:
    low, high = y.aminmax(dim=-1, keepdim=True)
    return high - low
