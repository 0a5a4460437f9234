"""DARE: Yu, Yu, Yu, Huang, Li 2023, "Language models are super Mario: absorbing abilities from homologous
models as a free lunch", arXiv 2311.03099, equations 1 and 2.

    d_i = m_i (x_i - base) / density ,  m_i ~ Bernoulli(density)
    y = base + lambda sum_i w_i d_i ,  or TIES' elect and merge of the d_i (``dare_ties``)

Letters: x_i the models' tensors, m_i masks (the paper's drop rate is p = 1 - density), w_i weights.

mergekit's form rescales by R = sum |d| / sum |m d| of each tensor instead of 1 / density: the same on
average. The masks are not mergekit's, which depend on the order of the tensors and the machine: see
common/random_masks.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from attar.merging.methods.common.random_masks import MaskSource
from attar.merging.methods.common.task_vectors import combine, random, rescaling, task_vectors


def dare_linear(
    tensors: Sequence[Tensor],
    base: Tensor,
    *,
    weight: Sequence[float],
    density: Sequence[float],
    masks: Sequence[MaskSource],
    normalize: bool = False,
    rescale: bool = True,
    int8_mask: bool = False,
    lambda_: float = 1.0,
    compat: str = "mergekit",
    elect: bool = False,
) -> Tensor:
    """The sum of the task vectors, entries dropped at random.

    Args:
        density: probability that an entry is kept, of each model.
        elect: elect signs, as in TIES.
    """
    vectors = task_vectors(tensors, base)
    scale = rescaling(rescale, compat)
    sparsifiers = [random(d, p, u, scale) for d, p, u in zip(vectors, density, masks, strict=True)]
    return combine(vectors, sparsifiers, weight=weight, normalize=normalize, lambda_=lambda_, elect=elect)


def dare_ties(tensors: Sequence[Tensor], base: Tensor, **settings: Any) -> Tensor:
    """:func:`dare_linear` with elected signs."""
    return dare_linear(tensors, base, **settings, elect=True)
