"""Task arithmetic: Ilharco et al. 2022, "Editing models with task arithmetic", arXiv 2212.04089.

    y = base + lambda sum_i w_i (x_i - base) ,  the sum divided by sum_i w_i where ``normalize``

The arithmetic is in common/task_vectors.py. ``density``, ``rescale`` and ``int8_mask`` are accepted as in
mergekit, and have no effect: nothing is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from attar.merging.methods.common.task_vectors import combine, keep_all, task_vectors


def task_arithmetic(
    tensors: Sequence[Tensor],
    base: Tensor,
    *,
    weight: Sequence[float],
    density: Sequence[float] = (),
    normalize: bool = False,
    rescale: bool = False,
    int8_mask: bool = False,
    lambda_: float = 1.0,
) -> Tensor:
    """The sum of the task vectors, added to the base."""
    vectors = task_vectors(tensors, base)
    sparsifiers = [keep_all] * len(vectors)
    return combine(vectors, sparsifiers, weight=weight, normalize=normalize, lambda_=lambda_, elect=False)
