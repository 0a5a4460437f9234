"""OWL: blocks with more outliers keep more weights.

Yin et al. 2023, "Outlier Weighed Layerwise Sparsity (OWL): A Missing Secret Sauce for Pruning LLMs to High
Sparsity", arXiv 2310.05175, section 3:

    D_l = share of the block's Wanda scores that are above M times their mean                     (eq. 3)
    s_l = s + lambda (1 - 2 (D_l - min D) / (max D - min D)) + c,      c such that the mean of s_l is s

Letters: l block; s fraction of zeros in all, s_l in block l; M outlier threshold, 5; lambda reach, 0.08.

Differs from the paper: the mean weighs each block by its number of weights, and s_l stays within 0 and 1, c
being found again where a bound holds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MULTIPLE, REACH = 5.0, 0.08  # M and lambda of the paper


def outlier_share(scores: Sequence[Tensor], multiple: float = MULTIPLE) -> float:
    """D_l of the scores (N, K) of a block's matrices."""
    count = sum(int(part.numel()) for part in scores)
    mean = sum(float(part.sum(dtype=torch.float64)) for part in scores) / count
    return sum(int((part > multiple * mean).sum()) for part in scores) / count


def block_zeros(shares: Tensor, sizes: Tensor, zeros: float, reach: float = REACH) -> Tensor:
    """s_l, float64 (L,).

    Args:
        shares: D_l (L,).
        sizes: weights of each block (L,).
        zeros: s.
    """
    shares, sizes = shares.double(), sizes.double()
    spread = shares.max() - shares.min()
    if spread == 0:
        return torch.full_like(shares, zeros)
    tilt = reach * (1.0 - 2.0 * (shares - shares.min()) / spread)
    low, high = -1.0 - 2.0 * reach, 1.0 + 2.0 * reach  # bounds of s + c
    for _ in range(200):  # bisection: the mean rises with c
        middle = (low + high) / 2.0
        mean = (sizes * (tilt + middle).clamp(0.0, 1.0)).sum() / sizes.sum()
        low, high = (middle, high) if mean < zeros else (low, middle)
    return (tilt + high).clamp(0.0, 1.0)
