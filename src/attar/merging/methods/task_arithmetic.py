"""Task arithmetic: Ilharco et al. 2022, "Editing models with task arithmetic", arXiv 2212.04089.

    y = base + lambda sum_i w_i (x_i - base) ,  the sum divided by sum_i w_i where ``normalize``

The arithmetic is in consensus.py. ``density``, ``rescale`` and ``int8_mask`` are read as in mergekit, and
have no effect: nothing is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from attar.merging.consensus import combine, task_vectors
from attar.merging.methods.common.task_vectors import keep_all


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
    """The sum of the task vectors, added to the base. Does not modify its inputs.

    Args:
        tensors: x_i, of base's shape.
        base: the common ancestor's tensor.
        weight: w_i.
        density: no effect.
        normalize: divide by the sum of the weights.
        rescale: no effect.
        int8_mask: no effect.
        lambda_: scale of the sum.

    Returns:
        Of base's dtype.
    """
    vectors = task_vectors(tensors, base)
    sparsifiers = [keep_all] * len(vectors)
    return combine(vectors, sparsifiers, weight=weight, normalize=normalize, lambda_=lambda_, vote=False)
