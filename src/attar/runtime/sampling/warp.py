"""Logits to the distribution that tokens are drawn from.

    l' = penalties, bias, bans (penalties.py)
    x = l' / T                                  temperature; T = 0 is one-hot at the largest l'
    top-k   keep x_v >= the k-th largest x
    top-p   keep the likeliest until their mass reaches top_p: those whose likelier ones sum to less
    min-p   keep p_v >= min_p max(p)
    p = what was kept, divided by its sum

Letters: R rows (positions of sequences), V vocabulary, l logits (R, V), p probabilities (R, V).

The order is transformers'. Every cut is a value, and what equals it stays: the result does not depend on how
ties are sorted, nor on the other rows of the batch. (transformers keeps ties at top-k and splits them, by the
order of its sort, at top-p.) Speculation calls the same function for drafts and for targets, with the history
of each drafted position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attar.errors import NumericsError
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.sampling.penalties import History, ban_, bias_, penalise_


@dataclass(frozen=True)
class Row:
    """What decides one row beside its logits.

    Attributes:
        params: of the row's request.
        history: the tokens before; needed where the parameters penalise.
        banned: tokens that may not be drawn here.
        allowed: bool (V,) of a grammar; None allows all.
    """

    params: SamplingParams
    history: History | None = None
    banned: Sequence[int] = ()
    allowed: Tensor | None = None

    @property
    def adjusts(self) -> bool:
        """Whether the logits change before the temperature."""
        return bool(self.params.penalises or self.params.biases or self.banned or self.allowed is not None)


def warp(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """The distributions.

    Args:
        logits: (R, V); not modified.
        rows: one for each row.

    Returns:
        float32 (R, V), each row of sum 1.

    Raises:
        NumericsError: a row's logits are NaN or +infinity, or nothing can be drawn in it.
    """
    x = adjust(logits, rows)
    check(x)
    if all(row.params.greedy for row in rows):
        return one_hot(x)
    p = truncate(heat(x, rows), [row.params for row in rows])
    greedy = [number for number, row in enumerate(rows) if row.params.greedy]
    if greedy:
        p[greedy] = one_hot(x[greedy])
    return p


def adjust(logits: Tensor, rows: Sequence[Row]) -> Tensor:
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


def check(logits: Tensor) -> None:
    """Raise where a row (of (R, V)) has no finite largest logit: NaN spreads to it."""
    if not bool(logits.amax(-1).isfinite().all()):
        raise NumericsError(
            "the model's logits are NaN or infinite, or every token is banned",
            hint="check the checkpoint with attar inspect, or try dtype float32",
        )


def one_hot(logits: Tensor) -> Tensor:
    """1 at the largest of each row, the lowest id among equals; float32 (R, V)."""
    return torch.zeros_like(logits).scatter_(-1, greedy(logits).unsqueeze(-1), 1.0)


def greedy(logits: Tensor) -> Tensor:
    """The largest of each row (R,), the lowest id among equals."""
    return logits.argmax(-1)


def heat(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """(l - max l) / T, newly made (R, V): subtracted first, so that a tiny temperature cannot overflow."""
    T = [row.params.temperature or 1.0 for row in rows]
    x = logits - logits.amax(-1, keepdim=True)
    return x if set(T) == {1.0} else x.div_(_column(T, x))


def truncate(x: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """softmax(x) cut by top-k, top-p and min-p and made to sum to 1; float32 (R, V). Changes x."""
    V = x.shape[-1]
    if any(0 < each.top_k < V for each in params):
        x.masked_fill_(x < _top_k_cut(x, [min(each.top_k, V) for each in params]), -torch.inf)
    p = x.softmax(-1)
    top_p = [each.top_p for each in params]
    min_p = [each.min_p for each in params]
    for row, mass in zip(p, top_p, strict=True):
        if mass < 1.0:
            row.masked_fill_(row < _top_p_cut(row, mass), 0.0)
    if max(min_p) > 0.0:
        p.masked_fill_(p < p.amax(-1, keepdim=True) * _column(min_p, p), 0.0)
    cut = [each.top_p < 1.0 or each.min_p > 0.0 for each in params]
    if any(cut):
        uncut = torch.tensor([not each for each in cut], device=p.device).unsqueeze(-1)
        p.div_(p.sum(-1, keepdim=True).masked_fill_(uncut, 1.0))
    return p


def _top_k_cut(x: Tensor, k: Sequence[int]) -> Tensor:
    """The k-th largest of each row, -infinity where k is 0: (R, 1)."""
    largest = x.topk(max(k), dim=-1).values
    index = torch.tensor(k, device=x.device).unsqueeze(-1)
    cut = largest.gather(-1, (index - 1).clamp_min(0))
    return torch.where(index > 0, cut, -torch.inf)


def _top_p_cut(p: Tensor, mass: float) -> Tensor:
    """The smallest probability that a row (V,) keeps.

    Only candidates are sorted: tokens below (1 - mass) / V sum to less than 1 - mass all together, so the
    likelier ones of any of them have the mass. The half is room for rounding.
    """
    candidates = p[p >= 0.5 * (1.0 - mass) / len(p)]
    values = _descending(candidates)
    before = values.cumsum(-1, dtype=torch.float64) - values
    return values[int((before < mass).sum()) - 1]


def _descending(values: Tensor) -> Tensor:
    """Sorted; NumPy's sort is several times faster than torch's on a CPU."""
    if values.device.type != "cpu":
        return values.sort(descending=True).values
    return torch.from_numpy(np.sort(values.numpy())).flip(0)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(-1)
