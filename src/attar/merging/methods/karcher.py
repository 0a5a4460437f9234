"""Karcher mean of directions on the sphere: Karcher 1977, "Riemannian center of mass and mollifier
smoothing"; the iteration x <- exp_x(mean of log_x(u_i)).

    cos th_i = <u_i, u> ,  T = sum_i a_i (th_i / sin th_i) (u_i - cos th_i u)
    u <- cos|T| u + sin|T| T / |T|   until |T| < tol
    y = u sum_i a_i |x_i| ,  a_i = 1 / n

Letters: x_i the models' tensors, each as one vector, u_i their directions, n their number, u the mean
direction, T the mean in the tangent plane at u. Tensors of norm up to tol have no direction, but count for
the length. The base model, listed or not, is one of the models, as in mergekit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from attar.kernels.threads import one_thread
from attar.merging.methods.common.chunked import norm


def karcher(tensors: Sequence[Tensor], base: None = None, *, max_iter: int = 10, tol: float = 1e-5) -> Tensor:
    """The mean direction, with the mean length.

    Args:
        tensors: a single one is returned itself.
        tol: ends the iteration; th_i and |x_i| up to it count as 0.
    """
    if len(tensors) == 1:
        return tensors[0]
    flat = [x.reshape(-1) for x in tensors]
    lengths = [norm(x, dtype=torch.float32) for x in flat]
    units = [x / length for x, length in zip(flat, lengths, strict=True) if length > tol]
    if not units:
        return torch.zeros_like(tensors[0])
    with one_thread():
        u = mean_direction(units, max_iter, tol)
    a = 1 / len(flat)
    length = _sum(a * length for length in lengths).to(u.dtype)  # rounded first, as in mergekit
    return (u * length).to(tensors[0].dtype).view(tensors[0].shape)


def mean_direction(units: Sequence[Tensor], max_iter: int, tol: float) -> Tensor:
    """u of unit vectors."""
    a = 1 / len(units)
    u = _sum(x * a for x in units)
    length = norm(u, dtype=torch.float32)
    u = units[0].clone() if length < tol else u / length
    for _ in range(max_iter):
        T = _tangent(units, u, a, tol)
        length = float(norm(T, dtype=torch.float32))
        if length < tol:
            break
        step = torch.tensor(length)
        u = torch.cos(step) * u + torch.sin(step) * (T / length)
        u = u / norm(u, dtype=torch.float32).clamp(min=tol)
    return u


def _tangent(units: Sequence[Tensor], u: Tensor, a: float, tol: float) -> Tensor:
    """T, the mean of the directions as seen from u."""
    T = torch.zeros_like(u)
    for x in units:
        cosine = torch.clamp(torch.dot(x, u), -1, 1)
        th = torch.arccos(cosine)
        if th >= tol:
            T += a * (th / torch.sin(th)) * (x - cosine * u)
    return T


def _sum(terms: Iterable[Tensor]) -> Tensor:
    terms = iter(terms)
    total = next(terms)
    for term in terms:
        total = total + term
    return total
