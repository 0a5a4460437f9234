"""DELLA: Deep, Bhardwaj, Poria 2024, "DELLA-Merging: Reducing interference in model merging through
magnitude-based sampling", arXiv 2406.11617, section 3.

    p_j = density - epsilon + 2 epsilon (r_j - 1) / (m - 1)
    d_i = M (x_i - base) / p ,  M_j ~ Bernoulli(p_j)
    y = base + lambda (TIES' elect and merge of the d_i) ,  or their sum (``della_linear``)

Letters: x_i the models' tensors, r_j = 1 ... m the rank of |x_i - base| in its row of m numbers, p_j the
probability that an entry is kept.

mergekit's form rescales by R = sum |d| / sum |M d| of each tensor instead of 1 / p of each entry. A row is
of the last dimension (mergekit: of the second, which differs for tensors of three dimensions). The masks
are not mergekit's: see common/random_masks.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from attar.merging.methods.common.random_masks import MaskSource
from attar.merging.methods.common.task_vectors import by_rank, combine, rescaling, task_vectors


def della(
    tensors: Sequence[Tensor],
    base: Tensor,
    *,
    weight: Sequence[float],
    density: Sequence[float],
    epsilon: Sequence[float],
    masks: Sequence[MaskSource],
    normalize: bool = True,
    rescale: bool = True,
    int8_mask: bool = False,
    lambda_: float = 1.0,
    compat: str = "mergekit",
    elect: bool = True,
) -> Tensor:
    """Entries dropped at random, small ones more often; the mean of the entries that agree in sign.

    Args:
        density: mean probability that an entry is kept, of each model; 1: all are kept.
        epsilon: half the width of the probabilities, of each model.
        elect: elect signs, as in TIES.
    """
    vectors = task_vectors(tensors, base)
    scale = rescaling(rescale, compat)
    sparsifiers = [
        by_rank(d, p, e, u, scale) for d, p, e, u in zip(vectors, density, epsilon, masks, strict=True)
    ]
    return combine(vectors, sparsifiers, weight=weight, normalize=normalize, lambda_=lambda_, elect=elect)


def della_linear(tensors: Sequence[Tensor], base: Tensor, **settings: Any) -> Tensor:
    """:func:`della` without election: the sum."""
    return della(tensors, base, **settings, elect=False)
