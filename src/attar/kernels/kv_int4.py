"""Keys and values of 4 bits: keys shifted and scaled, keys and values rotated, then codes with a scale and a
minimum for each token and head.

    y = (x - c) D H,   m = a - r b,   s = 2 r b / 15,   q = round((y - m) / s) between 0 and 15
    x ~ (q s + m) H D^-1 + c                  a, b: middle and half of the range of y

x is the key or the value of one token in one head. H is a Hadamard matrix of 2^j rows, divided by its norm,
on each 2^j numbers of a head; 2^j is the largest power of two that divides head_dim. It spreads a few large
numbers over all, and H H = 1. r is the one of RANGES with the least squared error. c, of keys alone, is the
one of two constant vectors with the smaller range of y; the sign of s says which. D is diagonal: channels of
keys which queries multiply by more are rounded less. s and m are float16.

Attention needs no x: scores are q x = (q D^-1 H) (q s + m + c D H), and the sum of weighted values is rotated
back once.

Sources: QuaRot (Ashkboos et al. 2024, arXiv 2404.00456) for the rotation; the shift is the smoothing of keys
of SageAttention (Zhang et al. 2024, arXiv 2410.02367).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from attar.kernels.kv_codes import packed, unpacked

RANGES = (1.0, 0.94, 0.88, 0.82)  # r
LARGEST, SMALLEST = torch.finfo(torch.float16).max, torch.finfo(torch.float16).tiny


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
    if factors is None or centers is None:
        return encode_turned(rotated(x))
    return encode_turned(rotated(x * factors), rotated(centers * factors))


def encode_turned(y: Tensor, centers: Sequence[Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """The same of y = x D H (..., n) and both c D H."""
    other = torch.zeros_like(y[..., :1], dtype=torch.bool)
    if centers is not None:
        usual, first = (y - c for c in centers)
        other = _spread(first) < _spread(usual)
        y = torch.where(other, first, usual)
    q, s, m = _rounded(y.clamp(-LARGEST, LARGEST))
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
