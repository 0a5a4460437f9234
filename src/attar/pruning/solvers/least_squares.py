"""Least squares on a fixed support: the best values of the weights that a mask keeps.

    minimise over W' with W' = 0 where the mask is False:   f = tr((W' - W) (H + lambda I) (W' - W)^T)

Letters: W (N, K) weight, N outputs, K inputs; W' the new weight; H (K, K) from quantization's hessian.py;
A = H + lambda I; B = W A; R (N, K) residual on the support; S (N, K) search directions.

Each row has its own support and so its own system of equations. Conjugate gradients (Hestenes & Stiefel 1952)
solve them together: a step is one product with A for all rows. The preconditioner is A's diagonal. This is
the second half of ALPS (Meng et al. 2024, arXiv 2406.07831, section 3.3), and what a reconstruction after the
masks of magnitude and Wanda needs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attar.quantization.hessian import check_finite, damped, fill_unseen_


def masked_least_squares(
    weight: Tensor,
    H: Tensor,
    mask: Tensor,
    *,
    iterations: int = 10,
    damp: float = 0.01,
    start: Tensor | None = None,
    target: Tensor | None = None,
) -> Tensor:
    """The weight with the kept weights corrected for the pruned weights, float32 (N, K); exactly zero
    where the mask is False. Does not modify its inputs, but that H's diagonal is damped meanwhile.

    Args:
        weight: W (N, K), any float type.
        H: (K, K) float32, symmetric, positive semi-definite.
        mask: bool (N, K); False: the weight is zero.
        iterations: steps of conjugate gradients; none raises f.
        damp: lambda as a fraction of the mean of H's diagonal.
        start: W' (N, K) to start from; None: W under the mask.
        target: float32 (N, K), takes the place of W H: the product that the new weight should have with H;
            None: W H.

    Raises:
        NumericsError: the weight or H is not finite.
    """
    W = weight.float()
    check_finite(W, H)
    H, unseen = H.float(), H.diagonal() <= 0
    ridge = damp * H.diagonal().mean()
    with damped(H, ridge) as A:
        B = W @ A if target is None else target.float() + A.diagonal().where(unseen, ridge) * W
        return conjugate_gradients(A, B, mask, W if start is None else start.float(), iterations)


def damped_hessian(H: Tensor, damp: float) -> Tensor:
    """A = H + lambda I, float32; unseen columns as in hessian.py."""
    A = H.float().clone()
    fill_unseen_(A)
    diagonal = A.diagonal()
    diagonal.add_(damp * diagonal.mean())
    return A


def conjugate_gradients(A: Tensor, B: Tensor, mask: Tensor, start: Tensor, iterations: int) -> Tensor:
    """X (N, K), zero where the mask is False, with [X A - B] near 0 where it is True: one system for each
    row.

    Args:
        A: (K, K), symmetric, positive definite.
    """
    X = start * mask
    R = (B - X @ A).mul_(mask)
    scale = A.diagonal().reciprocal()
    S = R * scale
    power = (R * S).sum(1, keepdim=True)
    for _ in range(iterations):
        product = (S @ A).mul_(mask)
        step = _ratio(power, (S * product).sum(1, keepdim=True))
        X.addcmul_(S, step)
        R.addcmul_(product, step, value=-1.0)
        Z = R * scale
        before, power = power, (R * Z).sum(1, keepdim=True)
        S.mul_(_ratio(power, before)).add_(Z)
    return X


def _ratio(above: Tensor, below: Tensor) -> Tensor:
    """above / below; 0 where a row has converged."""
    return torch.where(below > 0, above / below, torch.zeros_like(below))
