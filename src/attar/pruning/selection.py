"""From scores to the units that stay.

Letters: scores float64 (rows, units), the more important the larger; -infinity for what is removed already.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attar.pruning.structures import nearest_multiple


def keep_most_important(scores: Tensor, keep: int) -> list[list[int]]:
    """Per row, the ``keep`` units of the largest scores, ascending; equal ones go to the lower number."""
    order = torch.argsort(scores, dim=1, descending=True, stable=True)
    return [sorted(int(unit) for unit in row[:keep]) for row in order]


def keep_over_rows(scores: Tensor, keep: int, multiple: int = 1) -> list[list[int]]:
    """The units of the largest scores over all rows, ``keep`` a row in the mean. Each row's number is then
    rounded to a multiple, at least one of it, so that the mean may come out a little different."""
    rows, units = scores.shape
    order = torch.argsort(scores.flatten(), descending=True, stable=True)[: rows * keep]
    counts = torch.bincount(order // units, minlength=rows).tolist()
    left = scores.isfinite().sum(1).tolist()
    snapped = [nearest_multiple(most, count, multiple) for count, most in zip(counts, left, strict=True)]
    pairs = zip(scores, snapped, strict=True)
    return [keep_most_important(row[None], count)[0] for row, count in pairs]


def standardized(scores: Tensor) -> Tensor:
    """Each row less its mean, over its standard deviation (FLAP, arXiv 2312.11983, eq. 6): criteria that are
    not in units of the loss can be compared over rows only so. Removed units stay at -infinity."""
    finite = scores.masked_fill(~scores.isfinite(), torch.nan)
    mean = finite.nanmean(1, keepdim=True)
    deviation = (finite - mean).square().nanmean(1, keepdim=True).sqrt().clamp(min=1e-30)
    return ((scores - mean) / deviation).masked_fill(~scores.isfinite(), -torch.inf)


def without_removed(scores: Tensor, keep: Sequence[Sequence[int]]) -> Tensor:
    """The scores with -infinity for units that are not in ``keep``."""
    result = torch.full_like(scores, -torch.inf)
    for row, kept in enumerate(keep):
        result[row, list(kept)] = scores[row, list(kept)]
    return result
