"""Magnitude: a weight matters as much as it is large (Han et al. 2015, "Learning both Weights and Connections
for Efficient Neural Networks", arXiv 1506.02626).

    S_ij = |W_ij|

Over several matrices at once there is one threshold. It is found exactly without holding them: the bits of a
non-negative float32 are ordered as its value is, so a histogram of the upper 16 bits finds the threshold's
bin, and one of the lower 16 bits in that bin finds the threshold. Each matrix is read twice. Of weights equal
to the threshold (in bfloat16 there are many) the first ones stay.

Letters: W (N, K) weight; S (N, K) scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

HALF = 1 << 16  # values of 16 bits


def magnitude_scores(weight: Tensor) -> Tensor:
    """S, float32 (N, K)."""
    return weight.float().abs()


def global_zeros(weights: Mapping[str, Callable[[], Tensor]], zeros: int) -> dict[str, int]:
    """How many of each matrix's weights are among the smallest ``zeros`` of all.

    Args:
        weights: functions that read the matrices; each is called twice.
        zeros: at most the number of all weights.
    """
    upper = {name: _histogram(_bits(load()) >> 16) for name, load in weights.items()}
    start, below = _bin_of(upper, zeros)
    lower = {}
    for name, load in weights.items():
        bits = _bits(load())
        lower[name] = _histogram(bits[bits >> 16 == start] & (HALF - 1))
    last, within = _bin_of(lower, zeros - below)
    counts = {name: int(upper[name][:start].sum() + lower[name][:last].sum()) for name in weights}
    ties = zeros - below - within
    for name in reversed(list(weights)):
        share = min(int(lower[name][last]), ties)
        counts[name] += share
        ties -= share
    return counts


def _bits(weight: Tensor) -> Tensor:
    """The bit patterns of |W|, int32 (N K,)."""
    return weight.float().abs().flatten().view(torch.int32)


def _histogram(values: Tensor) -> Tensor:
    """How often each value of 16 bits occurs, int64 (65536,)."""
    return torch.bincount(values, minlength=HALF).cpu()


def _bin_of(histograms: Mapping[str, Tensor], count: int) -> tuple[int, int]:
    """The bin in which the ``count``-th smallest value lies, and the number of values in the bins before."""
    cumulative = torch.stack(list(histograms.values())).sum(0).cumsum(0)
    number = int(torch.searchsorted(cumulative, count))
    return number, int(cumulative[number - 1]) if number else 0
