"""ALPS: Meng, Behdin, Wang, Mazumder 2024, "ALPS: Improved Optimization for Highly Sparse One-Shot Pruning
for Large Language Models", arXiv 2406.07831, algorithm 1 and section 3.3.

    minimise  tr((W' - W) H (W' - W)^T)   where W' has k weights (N:M: N in each M)

Which weights stay is found by the alternating direction method of multipliers (ADMM), their values then by
conjugate gradients (least_squares.py).

    A = E^-1 (H + lambda I) E^-1 ,  E = diag(H + lambda I)^1/2 ;  the weights below are W E
    P <- (W A - V + rho D) (A + rho I)^-1
    D <- P + V / rho  where it is largest, else 0
    V <- V + rho (P - D)
    after each 3 steps:  rho <- 1.3 rho, 1.2 rho or 1.1 rho ,  the faster the more of the support changed

Letters: W (N, K) weight, N outputs, K inputs; H (K, K) from quantization's hessian.py; P the weight that fits
the outputs, D the sparse matrix, V their multipliers (all N, K); the support is where D is not 0; rho
how strongly P and D are drawn together.

SparseGPT decides about a weight when its loop reaches the column, and never again; here every step may change
the whole support. On layers of SmolLM2 a third less of the output is lost, for some 15 times the time.

Differs from the paper: A + rho I is factorized afresh when rho changes, which costs less than a product with
A's eigenvectors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attar.errors import NumericsError
from attar.pruning.solvers.least_squares import conjugate_gradients, damped_hessian
from attar.quantization.hessian import check_finite
from attar.sparsity import Sparsity

EVERY = 3  # steps between two changes of rho
GROWTH = ((0.1, 1.3), (0.005, 1.2), (0.0, 1.1))  # where more than this share of the support changed
SETTLED = 3e-4  # share of the support below which the search ends
LEAST_STEPS = 30  # before it may end by that
LEAST_RHO = 1e-3


def alps(
    weight: Tensor,
    H: Tensor,
    sparsity: Sparsity,
    *,
    damp: float = 0.01,
    rho: float = 0.1,
    iterations: int = 300,
    refits: int = 10,
) -> Tensor:
    """The pruned weight, float32 (N, K), with exact zeros. Does not modify its inputs.

    Args:
        weight: W (N, K), any float type.
        H: (K, K) float32, symmetric, positive semi-definite.
        damp: lambda as a fraction of the mean of H's diagonal.
        rho: the first one.
        iterations: steps of ADMM, at most.
        refits: steps of conjugate gradients.

    Raises:
        SettingsError: K is no multiple of M.
        NumericsError: W or H is not finite, or damping does not make H invertible.
    """
    sparsity.check(weight.shape[1], "a layer")
    W = weight.float()
    check_finite(W, H)
    A = damped_hessian(H, damp)
    scale = A.diagonal().sqrt()
    A.div_(scale).div_(scale[:, None])
    W = W * scale
    B = W @ A
    P, mask = _search(W, A, B, sparsity, rho, iterations)
    return conjugate_gradients(A, B, mask, P, refits).div_(scale)


def _search(
    W: Tensor, A: Tensor, B: Tensor, sparsity: Sparsity, rho: float, iterations: int
) -> tuple[Tensor, Tensor]:
    """P (N, K) and the support, bool (N, K).

    Args:
        B: W A.
    """
    mask = sparsity.mask(W.abs())
    D, V, growing = W * mask, torch.zeros_like(W), False
    P, inverse, support = W, _inverse(A, rho), mask
    for step in range(1, iterations + 1):
        P = (B - V).add_(D, alpha=rho) @ inverse
        wanted = V.div_(rho).add_(P)
        mask = sparsity.mask(wanted.abs())
        D = wanted * mask
        V = wanted.sub_(D).mul_(rho)
        if step % EVERY:
            continue
        changed = float((mask != support).sum()) / max(float(mask.sum()), 1.0)
        if growing and (changed == 0 or (step > LEAST_STEPS and changed < SETTLED)):
            break
        support = mask
        growing = growing or changed > GROWTH[1][0]
        before = rho
        if growing:
            rho *= next(factor for share, factor in GROWTH if changed > share)
        else:  # drawn together too strongly to change at all
            rho = max(rho / 5.0, LEAST_RHO)
            growing = rho == before
        inverse = _inverse(A, rho)
    return P, sparsity.mask(P.abs())


def _inverse(A: Tensor, rho: float) -> Tensor:
    """(A + rho I)^-1."""
    shifted = A.clone()
    shifted.diagonal().add_(rho)
    L, failed = torch.linalg.cholesky_ex(shifted)
    if failed:
        raise NumericsError(
            "the Hessian stays singular with damping", hint="more calibration samples or damp"
        )
    return torch.cholesky_inverse(L)
