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

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attar.errors import NumericsError
from attar.runtime.sampling.cuts import mass_, top_k_
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.sampling.penalties import TokenHistory, ban_, bias_, penalise_

_TINY, _HUGE = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class SamplingRow:
    """What decides one row beside its logits.

    Attributes:
        params: of the row's request.
        history: the tokens before; needed where the parameters penalise.
        banned: tokens that may not be drawn here.
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
    if all(row.params.greedy for row in rows):
        return one_hot(x)
    top = x.amax(-1, keepdim=True)
    check(top)
    p = truncate(heat(x, top, rows), [row.params for row in rows])
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


def check(largest: Tensor) -> None:
    """Raise where a row's largest logit is not finite: NaN spreads to it."""
    check_finite(bool(largest.isfinite().all()))


def check_finite(finite: bool) -> None:
    """Raises NumericsError where the largest logit of a row is not finite."""
    if not finite:
        raise NumericsError(
            "the model's logits are NaN or infinite, or every token is banned",
            hint="check the checkpoint with attar inspect, or try dtype float32",
        )


def one_hot(logits: Tensor) -> Tensor:
    """1 at the largest of each row, the lowest id among equals; float32 (R, V)."""
    made = torch.zeros_like(logits)
    made[range(len(logits)), likeliest(logits)] = 1.0
    return made


def likeliest(logits: Tensor) -> list[int]:
    """The largest of each row of (R, V), the lowest id among equals.

    Raises:
        NumericsError: a row's logits are NaN or +infinity, or nothing can be drawn in it.
    """
    tokens, largest = argmax(logits)
    check_finite(all(map(math.isfinite, largest)))
    return tokens


def argmax(logits: Tensor) -> tuple[list[int], list[float]]:
    """The largest of each row of (R, V), the lowest id among equals, and its logit: NaN where a row has one.

    NumPy's argmax is ten times faster than torch's on a CPU.
    """
    if logits.device.type == "cpu":
        rows = logits.numpy()
        tokens = rows.argmax(-1)
        return tokens.tolist(), rows[np.arange(len(rows)), tokens].tolist()
    largest, indices = logits.max(-1)
    return indices.tolist(), largest.tolist()


def heat(logits: Tensor, top: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """(l - max l) / T, newly made (R, V): subtracted first, so that a tiny temperature cannot overflow; of
    numbers that float32 does not have the nearest normal one is taken, so that none becomes 0.

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
    for row, each in zip(x.numpy(), params, strict=True):
        top_k_(row, each.top_k)
    p = x.softmax(-1)
    for row, each in zip(p.numpy(), params, strict=True):
        mass_(row, each.top_p, each.min_p)
    return p


def _truncate_anywhere(x: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The same in torch's operators, row by row."""
    V = x.shape[-1]
    for row, each in zip(x, params, strict=True):
        if 0 < each.top_k < V:
            row.masked_fill_(row < row.topk(each.top_k).values[-1], -torch.inf)
    p = x.softmax(-1)
    for row, each in zip(p, params, strict=True):
        if each.top_p < 1.0:
            values = row.sort(descending=True).values.double()
            kept = int((values.cumsum(-1) - values < each.top_p).sum())
            row.masked_fill_(row < values[kept - 1].float(), 0.0)
        row.masked_fill_(row < row.max() * each.min_p, 0.0)
        if each.top_p < 1.0 or each.min_p > 0.0:
            row.div_(row.sum())
    return p


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(-1)
