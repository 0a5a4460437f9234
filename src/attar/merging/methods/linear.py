"""Linear: the weighted average, Wortsman et al. 2022, "Model soups: averaging weights of multiple fine-tuned
models improves accuracy without increasing inference time", arXiv 2203.05482, the uniform soup with weights.

    y = sum_i w_i x_i ,  divided by sum_i w_i where ``normalize``

Letters: x_i the models' tensors, w_i their weights. Summed in float32 by fused multiplications and
additions, model after model, and rounded once, as in mergekit 0.1.5.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attar.merging.methods.common.chunked import elementwise


def linear(
    tensors: Sequence[Tensor], base: None = None, *, weight: Sequence[float], normalize: bool = True
) -> Tensor:
    """The weighted average. Does not modify its inputs.

    Args:
        tensors: of one shape and dtype.
        base: there is none.
        weight: one for each tensor; their sum is not 0.
        normalize: divide by the sum of the weights.
    """
    w = torch.tensor(weight, dtype=torch.float32)
    divisor = w.sum()

    def average(*pieces: Tensor) -> Tensor:
        mean = pieces[0].float() * w[0]
        for factor, piece in zip(w[1:].tolist(), pieces[1:], strict=True):
            mean.add_(piece.float(), alpha=factor)
        return mean.div_(divisor) if normalize else mean

    return elementwise(average, tensors)
