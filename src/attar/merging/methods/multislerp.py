"""Multislerp: the weighted mean of several directions, taken in the tangent plane of the sphere at their
average; mergekit's own.

    W_i = w_i / sum_j w_j ,  u_i = x_i / (|x_i| + eps) ,  m = sum_i W_i u_i / |sum_i W_i u_i|
    v = sum_i W_i (u_i - <u_i, m> m) ,  r = |v| + eps
    y = (cos(r) m + sin(r) v / r) sum_i W_i |x_i|
    with a base: the same of x_i - base, plus base

Letters: x_i the models' tensors, each as one vector; m the mean direction; v the mean in the tangent plane
at m. In the tensors' dtype, as in mergekit. Two opposite directions, whose mean is 0, are averaged
linearly.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attar.errors import NumericsError
from attar.kernels.threads import one_thread
from attar.merging.methods.common.chunked import norm


def multislerp(
    tensors: Sequence[Tensor],
    base: Tensor | None = None,
    *,
    weight: Sequence[float],
    normalize_weights: bool = True,
    eps: float = 1e-8,
) -> Tensor:
    """The weighted mean on the sphere.

    Args:
        tensors: a single one is returned itself.
        normalize_weights: divide the weights by their sum.
        eps: added to divisors.

    Raises:
        NumericsError: three or more directions whose mean is 0.
    """
    if len(tensors) == 1:
        return tensors[0]
    like = tensors[0] if base is None else base
    X = torch.stack([x.to(like.dtype).reshape(-1) for x in tensors])
    if base is not None:
        X -= base.reshape(-1)
    W = torch.tensor(weight, dtype=like.dtype)
    if normalize_weights:
        W = W / W.sum()
    with one_thread():
        y = tangent_mean(X, W, eps).view(like.shape)
    return y if base is None else base + y


def tangent_mean(X: Tensor, W: Tensor, eps: float) -> Tensor:
    """y (n,) of the vectors X (N, n) with the weights W (N,)."""
    lengths = norm(X, dim=-1)
    u = X / (lengths + eps)
    column = W.view(-1, 1)
    m = (u * column).sum(0)
    length = norm(m)
    if length < eps:
        if len(X) == 2:
            return (X * column).sum(0)
        raise NumericsError("multislerp: the mean of the directions is 0", hint="change the weights")
    m = m / length
    along = (u * m).sum(-1, keepdim=True)
    v = ((u - along * m) * column).sum(0)
    r = norm(v) + eps
    return (m * torch.cos(r) + v * (torch.sin(r) / r)) * (column * lengths).sum()
