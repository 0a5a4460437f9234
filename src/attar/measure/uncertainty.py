"""Standard errors of what is measured on a text: of a mean, of the ratio of two accuracies, of a difference.

Letters: N tokens; a_i, b_i in {0, 1}: model and reference predict token i right; R = sum a / sum b, the
quality kept. Both models read the same tokens, so their hits are paired. By the delta method:

    r_i  =  a_i - R b_i        SE(R)  =  sqrt(Var(sum_i r_i)) / sum_i b_i

Neighbouring tokens are not independent, so variances are taken over G blocks of consecutive tokens of one
sequence (Cochran, Sampling Techniques, 1977, 9A), with S_g the sum of r over a block:

    Var(sum_i r_i)  =  G / (G - 1) * sum_g S_g^2

The error of a mean is the same with r_i = x_i - mean(x), divided by N. Blocks of 32 tokens answer how well
this text was measured; whole rows as blocks answer what other texts would give, since a text has a subject
and all its tokens share it (clusters, ibid. 9A). Models that agree on every token of a
small text would have no error at all: half a token is added to either kind of disagreement (Agresti and Min,
2005), hence 1 to the variance of a ratio's sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

BLOCK = 32  # tokens; the correlation of errors reaches over a few
FEWEST = 16  # blocks, which are shorter on a short text
ROWS = 64  # means of rows that a record keeps


def mean_stderr(values: Sequence[Tensor]) -> float | None:
    """Standard error of the mean over all tokens; None for fewer than two.

    Args:
        values: (n,) of each sequence.
    """
    everything = torch.cat(list(values)).double()
    if len(everything) < 2:
        return None
    mean = everything.mean()
    return math.sqrt(_block_variance([part.double() - mean for part in values])) / len(everything)


def row_stderr(values: Sequence[Tensor]) -> float | None:
    """Standard error of the mean over all tokens, from row to row; None for fewer than two rows.

    Args:
        values: (n,) of each row, which may have none.
    """
    rows = [part.double() for part in values if len(part)]
    if len(rows) < 2:
        return None
    everything = torch.cat(rows)
    sums = torch.stack([(row - everything.mean()).sum() for row in rows])
    return math.sqrt(_variance_of_sum(sums)) / len(everything)


def row_means(values: Sequence[Tensor]) -> tuple[float, ...]:
    """The mean of each row, or of :data:`ROWS` stretches of neighbouring rows where there are more: of two
    models on the same text they are pairs.

    Args:
        values: (n,) of each row.
    """
    count = min(len(values), ROWS)
    bounds = [len(values) * number // count for number in range(count + 1)]
    stretches = [torch.cat(list(values[start:end])) for start, end in pairwise(bounds)]
    return tuple(float(stretch.double().mean()) for stretch in stretches if len(stretch))


def ratio_stderr(hits: Sequence[Tensor], reference_hits: Sequence[Tensor]) -> float | None:
    """Standard error of sum(hits) / sum(reference hits); None for fewer than two tokens, or where the
    reference has no hit.

    Args:
        hits, reference_hits: bool (n,) of each sequence, of the same tokens.
    """
    ours, theirs = (float(sum(int(part.sum()) for part in parts)) for parts in (hits, reference_hits))
    if not theirs or sum(map(len, hits)) < 2:
        return None
    pairs = zip(hits, reference_hits, strict=True)
    residuals = [part.double() - ours / theirs * other.double() for part, other in pairs]
    return math.sqrt(_block_variance(residuals) + 1) / theirs


def _block_variance(residuals: Sequence[Tensor]) -> float:
    """Variance of the sum of residuals, whose mean is zero, over blocks of tokens."""
    size = max(1, min(BLOCK, sum(map(len, residuals)) // FEWEST))
    return _variance_of_sum(
        torch.stack([block.sum() for part in residuals if len(part) for block in part.split(size)])
    )


def _variance_of_sum(sums: Tensor) -> float:
    """Variance of the sum of independent sums, whose mean is zero."""
    return float(sums.square().sum()) * len(sums) / max(len(sums) - 1, 1)
