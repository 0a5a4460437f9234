"""Model breadcrumbs: Davari, Belilovsky 2023, "Model Breadcrumbs: Scaling multi-task model merging with
sparse masks", arXiv 2312.06795, section 3.

    d_i = x_i - base without its int(gamma n) largest and its smallest entries, int(density n) are kept
    y = base + lambda sum_i w_i d_i ,  or TIES' elect and merge of the d_i (``breadcrumbs_ties``)

Letters: x_i the models' tensors, n numbers of the tensor, gamma the paper's 1 - beta. Equal magnitudes are
kept in their order. Where int(gamma n) is 0, mergekit drops the whole tensor's change; here no outlier is
dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from attar.merging.methods.common.task_vectors import combine, outliers, task_vectors


def breadcrumbs(
    tensors: Sequence[Tensor],
    base: Tensor,
    *,
    weight: Sequence[float],
    density: Sequence[float],
    gamma: Sequence[float],
    normalize: bool = False,
    rescale: bool = False,
    int8_mask: bool = False,
    lambda_: float = 1.0,
    elect: bool = False,
) -> Tensor:
    """The sum of the task vectors without outliers and small entries.

    Args:
        gamma: share of the largest entries that is dropped, of each model.
        elect: elect signs, as in TIES.
    """
    vectors = task_vectors(tensors, base)
    sparsifiers = [outliers(d, p, g, rescale) for d, p, g in zip(vectors, density, gamma, strict=True)]
    return combine(vectors, sparsifiers, weight=weight, normalize=normalize, lambda_=lambda_, elect=elect)


def breadcrumbs_ties(tensors: Sequence[Tensor], base: Tensor, **settings: Any) -> Tensor:
    """:func:`breadcrumbs` with elected signs."""
    return breadcrumbs(tensors, base, **settings, elect=True)
