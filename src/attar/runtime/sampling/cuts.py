"""Where top-k, top-p and min-p cut rows of a distribution, on a CPU.

    top-k   keep x_v >= the k-th largest x
    top-p   keep the likeliest until their mass reaches top_p: those whose likelier ones sum to less
    min-p   keep p_v >= min_p max(p)

A sort of the vocabulary costs more than a small model's step. So only those near the largest are looked at:
down to a distance below it, which grows until enough are in.

Letters: V vocabulary, x logits less their largest, p probabilities.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FloatRow = NDArray[np.float32]
_DEPTHS = (-4.0, -8.0, -16.0, -np.inf)  # below the largest logit
_PARTS = (2.0**-6, 2.0**-12, 2.0**-18, 0.0)  # of the largest probability


def top_k_(x: FloatRow, k: int) -> None:
    """Make -infinity what top-k drops of a row (V,) whose largest is 0; 0 keeps all."""
    if not 0 < k < len(x):
        return
    for depth in _DEPTHS:
        near = x[x >= depth]
        if len(near) >= k:
            break
    np.putmask(x, x < np.partition(near, len(near) - k)[len(near) - k], -np.inf)


def top(x: FloatRow, count: int) -> NDArray[np.int64]:
    """Where the ``count`` largest of a row (V,) are, the largest first, the lowest id among equals."""
    if count == 1:
        return np.array([x.argmax()])
    left, found = x.copy(), np.empty(count, dtype=np.int64)
    for rank in range(count):
        found[rank] = left.argmax()
        left[found[rank]] = -np.inf
    return found


def mass_(p: FloatRow, top_p: float, min_p: float) -> None:
    """Make 0 what top-p and then min-p drop of a row (V,) of sum 1, and the sum 1 again."""
    if top_p >= 1.0 and min_p <= 0.0:
        return
    if top_p < 1.0:
        p *= p >= _top_p_cut(p, top_p)
    if min_p > 0.0:
        p *= p >= p.max() * np.float32(min_p)
    p /= p.sum()


def _top_p_cut(p: FloatRow, mass: float) -> np.float32:
    """The smallest probability that stays."""
    top = p.max()
    for part in _PARTS:
        near = p[p >= top * np.float32(part)]
        values = np.sort(near)[::-1]
        sums = values.cumsum(dtype=np.float64)
        if sums[-1] >= mass:
            break
    kept: np.float32 = values[int((sums - values < mass).sum()) - 1]
    return kept
