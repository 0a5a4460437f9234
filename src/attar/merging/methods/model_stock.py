"""Model stock: Jang, Yun, Han 2024, "Model Stock: All we need is just a few fine-tuned models", arXiv
2403.19522, equation 5.

    o_i = x_i - base ,  c = mean over pairs i < j of cos(o_i, o_j) ,  t = N c / (1 + (N - 1) c)
    y = t mean_i x_i + (1 - t) base

Letters: N models, x_i their tensors; t the interpolation ratio, for the whole tensor or, ``filter_wise``,
for each row of the last dimension. t is not clamped: c < 0 extrapolates away from the models, as in
mergekit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

import torch
from torch import Tensor

from attar.errors import NumericsError
from attar.kernels.threads import one_thread
from attar.merging.methods.common.chunked import SIZE, elementwise, norm, spans

TINY = 1e-6


def model_stock(tensors: Sequence[Tensor], base: Tensor, *, filter_wise: bool = False) -> Tensor:
    """Between the base and the average, as far as the task vectors agree.

    Args:
        tensors: at least two.
        filter_wise: a ratio for each row.

    Raises:
        NumericsError: t is undefined, because c = -1 / (N - 1).
    """
    shape = (-1, base.shape[-1]) if filter_wise and base.dim() > 1 else (1, -1)
    w0, rows = base.reshape(shape), [x.to(base.dtype).reshape(shape) for x in tensors]
    t = ratio(mean_cosine(rows, w0), len(rows))
    out = torch.empty_like(w0)
    for block in _blocks(*w0.shape):
        share = t[block[0]]
        mean = sum((x[block] for x in rows[1:]), rows[0][block]) / len(rows)
        out[block] = share * mean + (1 - share) * w0[block]
    return out.view(base.shape)


def mean_cosine(rows: Sequence[Tensor], w0: Tensor) -> Tensor:
    """c of each row, (rows, 1): the mean over the pairs of cos(o_i, o_j). Needs one more tensor."""
    norms = [norm(x - w0, -1).squeeze(-1) for x in rows]
    cosines = []
    for (a, p), (b, q) in combinations(zip(rows, norms, strict=True), 2):
        products = elementwise(lambda w, x, y: (x - w).mul_(y - w), [w0, a, b])
        with one_thread():
            cosines.append((products.sum(-1) / (p * q).clamp(min=TINY)).clamp(-1, 1))
    return torch.stack(cosines).mean(0).unsqueeze(-1)


def ratio(c: Tensor, N: int) -> Tensor:
    """t = N c / (1 + (N - 1) c)."""
    divisor = 1 + (N - 1) * c
    if (divisor == 0).any():
        raise NumericsError(f"model_stock: the mean cosine of {N} task vectors is -1/{N - 1}, t is undefined")
    return N * c / divisor


def _blocks(rows: int, columns: int) -> Iterator[tuple[slice, slice]]:
    """Blocks of whole rows, or chunks of one row where rows are long."""
    if columns >= SIZE:
        return ((slice(i, i + 1), span) for i in range(rows) for span in spans(columns))
    return (
        (slice(s.start // columns, s.stop // columns), slice(None)) for s in spans(rows * columns, columns)
    )
