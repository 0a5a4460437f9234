"""Arcee Fusion: Arcee 2025, mergekit 0.1: another model's entries where the change is large and the row's
distribution moves.

    p = softmax(x) + 1e-8 ,  q = softmax(base) + 1e-8   along the last dimension
    KL_row = sum_j p_j log(p_j / q_j)
    score = |x - base| KL_row ,  threshold = median + 1.5 (Q3 - Q1) of the scores
    y = x where score >= threshold, else base

Letters: Q1, Q3 the lower and upper quartile; the quantile q of n sorted scores is the one at index int(q (n -
1)).

Differs from mergekit: the quantiles are of all scores, by selection; mergekit takes a random sample of a
million where there are more.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attar.merging.methods.common.chunked import SIZE, spans
from attar.merging.methods.common.selection import kth_largest

EPSILON = 1e-8


def arcee_fusion(tensors: Sequence[Tensor], base: Tensor) -> Tensor:
    """The base, with the other model's entries whose score is high."""
    x = tensors[0].to(base.dtype)
    score = scores(x, base)
    bound = threshold(score.view(-1))
    out = torch.empty_like(base)
    flat, w0, x, score = out.view(-1), base.reshape(-1), x.reshape(-1), score.view(-1)
    for span in spans(flat.numel()):
        a = w0[span]
        flat[span] = a + (x[span] - a) * (score[span] >= bound)
    return out


def scores(x: Tensor, base: Tensor) -> Tensor:
    """|x - base| KL_row, of base's shape and dtype, some rows at a time."""
    out = torch.empty_like(base)
    rows = [t.reshape(-1, base.shape[-1]) for t in (x, base, out)]
    step = max(SIZE // max(base.shape[-1], 1), 1)
    for start in range(0, len(rows[0]), step):
        b, a, target = (t[start : start + step] for t in rows)
        p, q = torch.softmax(b, -1) + EPSILON, torch.softmax(a, -1) + EPSILON
        target.copy_((b - a).abs() * (p * (p / q).log()).sum(-1, keepdim=True))
    return out


def threshold(score: Tensor) -> Tensor:
    """median + 1.5 (Q3 - Q1) of the scores (n,)."""
    n = score.numel()
    median, upper, lower = (quantile(score, int(q * (n - 1))) for q in (0.5, 0.75, 0.25))
    return median + 1.5 * (upper - lower)


def quantile(score: Tensor, index: int) -> Tensor:
    """The score at an index of the ascending order, a scalar. Rounding makes some scores negative."""
    negative = int((score < 0).sum())
    sign, rank = (1.0, score.numel() - index) if index >= negative else (-1.0, index + 1)
    magnitude = kth_largest((score * sign).clamp_(min=0), rank)
    return torch.tensor(sign * magnitude, dtype=score.dtype)
