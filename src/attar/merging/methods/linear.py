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
    """The weighted average."""
    w = torch.tensor(weight, dtype=torch.float32)
    divisor = w.sum()

    def average(*chunks: Tensor) -> Tensor:
        mean = chunks[0].float() * w[0]
        for factor, chunk in zip(w[1:].tolist(), chunks[1:], strict=True):
            mean.add_(chunk.float(), alpha=factor)
        return mean.div_(divisor) if normalize else mean

    return elementwise(average, tensors)
