"""Logits to the distribution that tokens are sampled from.

    l' = penalties, bias, bans (penalties.py)
    x = l' / T                                  temperature; T = 0 is one-hot at the largest l'
    top-k   keep x_v >= the k-th largest x
    top-p   keep the likeliest until their mass reaches top_p: those whose likelier ones sum to less
    min-p   keep p_v >= min_p max(p)
    p = what was kept, divided by its sum

Letters: R rows (positions of sequences), V vocabulary, l logits (R, V), p probabilities (R, V).

The order is transformers'. Every cut is a threshold, and values equal to it stay: the result depends neither
on how ties are sorted nor on the other rows of the batch. (transformers keeps ties at top-k and splits them,
by the order of its sort, at top-p.) Speculation calls the same function for draft and target distributions,
with the history of one draft position.

A sort of the vocabulary costs more than a small model's step. So on a CPU the cuts examine only values near
the largest, down to a distance below it that grows until enough are included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attar.errors import NumericsError
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.sampling.penalties import TokenHistory, ban_, bias_, penalise_

FloatRow = NDArray[np.float32]
_DEPTHS = (-4.0, -8.0, -16.0, -np.inf)  # below the largest logit
_PARTS = (2.0**-6, 2.0**-12, 2.0**-18, 0.0)  # of the largest probability
_TINY, _HUGE = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class SamplingRow:
    """What decides one row besides its logits.

    Attributes:
        history: the tokens before; needed where there are penalties.
        banned: tokens that may not be sampled here.
        allowed: bool (V,) of a grammar; None allows all.
    """

    params: SamplingParams
    history: TokenHistory | None = None
    banned: Sequence[int] = ()
    allowed: Tensor | None = None

    @property
    def adjusts(self) -> bool:
        """Whether the logits change before the temperature."""
        return bool(self.params.penalises or self.params.biases or self.banned or self.allowed is not None)


def warp(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """The distributions. Returns float32 (R, V), one row of sum 1.

    Args:
        logits: (R, V); not modified.
        rows: one for one row.

    Raises:
        NumericsError: a row's logits are NaN or +infinity, or no token can be sampled in it.
    """
    x = adjust(logits, rows)
    if all(row.params.greedy for row in rows):
        return one_hot(x)
    top = x.amax(-1, keepdim=True)
    check_finite(bool(top.isfinite().all()))  # NaN spreads to the largest
    p = truncate(scale_by_temperature(x, top, rows), [row.params for row in rows])
    greedy = [number for number, row in enumerate(rows) if row.params.greedy]
    if greedy:
        p[greedy] = one_hot(x[greedy])
    return p


def adjust(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Penalties, biases and bans: float32 (R, V); the input itself where nothing applies."""
    assert len(rows) == len(logits), f"{len(rows)} rows for {len(logits)} rows of logits"
    logits = logits.float()
    if not any(row.adjusts for row in rows):
        return logits
    adjusted = logits.clone()
    for x, row in zip(adjusted, rows, strict=True):
        if row.params.penalises:
            assert row.history is not None, "penalties need the history"
            penalise_(x, row.params, row.history)
        bias_(x, row.params)
        ban_(x, row.banned, row.allowed)
    return adjusted


def check_finite(finite: bool) -> None:
    """Raises NumericsError where the largest logit of a row is not finite."""
    if not finite:
        raise NumericsError(
            "the model's logits are NaN or infinite, or every token is banned",
            hint="check the checkpoint with attar inspect, or try dtype float32",
        )


def one_hot(logits: Tensor) -> Tensor:
    """1 at the largest of one row, the lowest id among equals; float32 (R, V)."""
    p = torch.zeros_like(logits)
    p[range(len(logits)), likeliest(logits)] = 1.0
    return p


def likeliest(logits: Tensor) -> list[int]:
    """The largest of one row of (R, V), the lowest id among equals.

    Raises:
        NumericsError: a row's logits are NaN or +infinity, or no token can be sampled in it.
    """
    tokens, largest = argmax(logits)
    check_finite(all(map(math.isfinite, largest)))
    return tokens


def argmax(logits: Tensor) -> tuple[list[int], list[float]]:
    """The largest of one row of (R, V), the lowest id among equals, and its logit: NaN where a row has one.

    NumPy's argmax is ten times faster than torch's on a CPU.
    """
    if logits.device.type == "cpu":
        rows = logits.numpy()
        tokens = rows.argmax(-1)
        return tokens.tolist(), rows[np.arange(len(rows)), tokens].tolist()
    largest, indices = torch.stack([part.double() for part in logits.max(-1)]).tolist()  # one copy
    return [int(index) for index in indices], largest


def scale_by_temperature(logits: Tensor, top: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """(l - max l) / T, a new tensor (R, V). The maximum is subtracted first, so that a tiny temperature
    cannot overflow; temperatures outside float32 are clamped to its normal numbers, so that none becomes 0.

    Args:
        top: max l, (R, 1).
    """
    T = [min(max(row.params.temperature, _TINY), _HUGE) if row.params.temperature else 1.0 for row in rows]
    x = logits - top
    return x if set(T) == {1.0} else x.div_(_column(T, x))


def truncate(x: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """softmax(x) cut by top-k, top-p and min-p and made to sum to 1; float32 (R, V). Changes x."""
    if x.device.type != "cpu":
        return _truncate_anywhere(x, params)
    for row, row_params in zip(x.numpy(), params, strict=True):
        cut_top_k_(row, row_params.top_k)
    p = x.softmax(-1)
    for row, row_params in zip(p.numpy(), params, strict=True):
        cut_top_p_(row, row_params.top_p, row_params.min_p)
    return p


def _truncate_anywhere(x: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The same in torch's operators, row by row."""
    V = x.shape[-1]
    for row, row_params in zip(x, params, strict=True):
        if 0 < row_params.top_k < V:
            row.masked_fill_(row < row.topk(row_params.top_k).values[-1], -torch.inf)
    p = x.softmax(-1)
    for row, row_params in zip(p, params, strict=True):
        if row_params.top_p < 1.0:
            values = row.sort(descending=True).values.double()
            kept = int((values.cumsum(-1) - values < row_params.top_p).sum())
            row.masked_fill_(row < values[kept - 1].float(), 0.0)
        row.masked_fill_(row < row.max() * row_params.min_p, 0.0)
        if row_params.top_p < 1.0 or row_params.min_p > 0.0:
            row.div_(row.sum())
    return p


def cut_top_k_(x: FloatRow, k: int) -> None:
    """Set to -infinity what top-k drops of a row (V,) whose largest is 0; k = 0 keeps all."""
    if not 0 < k < len(x):
        return
    for depth in _DEPTHS:
        near = x[x >= depth]
        if len(near) >= k:
            break
    np.putmask(x, x < np.partition(near, len(near) - k)[len(near) - k], -np.inf)


def largest_indices(x: FloatRow, count: int) -> NDArray[np.int64]:
    """Indices of the ``count`` largest of a row (V,), the largest first, the lowest index among equals."""
    if count == 1:
        return np.array([x.argmax()])
    left, indices = x.copy(), np.empty(count, dtype=np.int64)
    for rank in range(count):
        indices[rank] = left.argmax()
        left[indices[rank]] = -np.inf
    return indices


def cut_top_p_(p: FloatRow, top_p: float, min_p: float) -> None:
    """Set to 0 what top-p and then min-p drop of a row (V,) of sum 1, and normalise the row."""
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


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(-1)
