"""Where the parents of a merge disagree: their task vectors compared pair by pair, tensor by tensor.

    d_i = x_i - b                                   the task vector of model i
    cosine_ij     = <d_i, d_j> / (|d_i| |d_j|)      1 the same change, 0 unrelated, -1 opposite
    agreement_ij  = share of the entries that both changed in which the signs agree; 1/2 is chance
    norm_i        = |d_i| / |b|                     how far the model went
    overruled_i   = share of the entries it changed whose sign is not that of sum_j d_j

The last is what the vote of TIES (Yadav et al. 2023, arXiv 2306.01708, section 3, "elect sign") would take
away before any trimming; as there, a sum of exactly zero elects +1. Weights of the merge do not enter: the
parents are compared, not the recipe.

Everything is kept as sums, so that tensors add up to a layer and layers to the model with each entry counted
once. A large tensor is sampled evenly: every s-th entry, s without a common factor with the last dimension
(else the same few columns would be all that is seen), and its sums are scaled to the tensor's size. Sums are
float64 by numpy, whose order of addition does not depend on the number of threads.

Letters: m models, n entries sampled, P = m (m - 1) / 2 pairs in the order (0, 1), (0, 2), ..., (1, 2), ...
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attar.checkpoint.parts import part_of
from attar.errors import ModelError

SAMPLE = 65_536  # entries of a tensor that are looked at
WHOLE = "all"  # the part's name in the row of the whole model
DIGITS = 4


@dataclass(frozen=True)
class Conflict:
    """Sums over the entries of one tensor, or of many.

    Attributes:
        size: entries they stand for.
        base: sum of b^2.
        squares: sum of d_i^2, one a model.
        changed: entries with d_i other than 0, one a model.
        overruled: of these, entries whose sign the vote overrules, one a model.
        dots: sum of d_i d_j, one a pair.
        shared: entries that both changed, one a pair.
        agreeing: of these, entries in which the signs agree, one a pair.
    """

    size: float
    base: float
    squares: tuple[float, ...]
    changed: tuple[float, ...]
    overruled: tuple[float, ...]
    dots: tuple[float, ...]
    shared: tuple[float, ...]
    agreeing: tuple[float, ...]

    def __add__(self, other: Conflict) -> Conflict:
        """Both together; of the same models."""
        sums: list[Any] = [_plus(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)]
        return Conflict(*sums)

    def row(self) -> dict[str, list[float | None]]:
        """``cosine`` and ``agreement`` by pair, ``norm`` and ``overruled`` by model; None where the quotient
        does not exist (nothing changed, or the base is zero)."""
        lengths = [math.sqrt(square) for square in self.squares]
        products = [a * b for a, b in combinations(lengths, 2)]
        return {
            "cosine": _quotients(self.dots, products),
            "agreement": _quotients(self.agreeing, self.shared),
            "norm": _quotients(lengths, [math.sqrt(self.base)] * len(lengths)),
            "overruled": _quotients(self.overruled, self.changed),
        }

    def plain(self) -> list[Any]:
        """The sums as a list that JSON keeps exactly."""
        return [list(v) if isinstance(v, tuple) else v for v in (getattr(self, f.name) for f in fields(self))]

    @classmethod
    def from_plain(cls, values: Sequence[Any]) -> Conflict:
        """What :meth:`plain` gave."""
        sums: list[Any] = [tuple(value) if isinstance(value, list) else value for value in values]
        return cls(*sums)


def measure_conflicts(tensors: Sequence[Tensor], base: Tensor, sample: int = SAMPLE) -> Conflict:
    """Compare the task vectors of one tensor. Does not modify its inputs.

    Args:
        tensors: one a model, of the base's shape, any float dtypes; differences are taken in float32.
        base: any shape.
        sample: how many entries are looked at, at most.

    Raises:
        ModelError: a tensor's shape is not the base's.
    """
    for number, tensor in enumerate(tensors):
        if tensor.shape != base.shape:
            raise ModelError(
                f"the tensor of model {number} is {list(tensor.shape)}, the base's is {list(base.shape)}"
            )
    step = stride(tuple(base.shape), sample)
    b = _sampled(base, step)
    deltas = [_sampled(tensor, step) - b for tensor in tensors]
    scale = base.numel() / max(b.size, 1)
    signs = [np.sign(d).astype(np.int8) for d in deltas]
    vote = np.where(sum(d.astype(np.float64) for d in deltas) >= 0, 1, -1).astype(np.int8)
    pairs = list(combinations(range(len(deltas)), 2))
    return Conflict(
        float(base.numel()),
        scale * _dot(b, b),
        tuple(scale * _dot(d, d) for d in deltas),
        tuple(scale * _count(s != 0) for s in signs),
        tuple(scale * _count((s != 0) & (s != vote)) for s in signs),
        tuple(scale * _dot(deltas[i], deltas[j]) for i, j in pairs),
        tuple(scale * _count(signs[i] * signs[j] != 0) for i, j in pairs),
        tuple(scale * _count(signs[i] * signs[j] > 0) for i, j in pairs),
    )


def stride(shape: tuple[int, ...], sample: int = SAMPLE) -> int:
    """The step of the sample: at least entries / sample, with no factor of the last dimension."""
    step = max(-(-math.prod(shape) // sample), 1)
    while shape and math.gcd(step, shape[-1]) > 1:
        step += 1
    return step


def summary(found: Iterable[tuple[str, int | None, Conflict]]) -> list[dict[str, Any]]:
    """Rows for the card: one for each part (attention, mlp, norm, ...) of each layer, one for each part
    outside the layers, and one of the whole model, which comes first.

    Args:
        found: name of the output tensor, its layer or None, and what was measured; of the same models, in any
            order (sums are added in the order of the names).

    Returns:
        plain dicts: ``layer`` (None outside the layers), ``part``, ``stack`` (only where the model has
        several stacks of layers: the name before the number), ``size`` and what :meth:`Conflict.row` gives,
        rounded to four significant digits. Layers in order, then the rest. Empty where nothing was measured
        or there is a single model.
    """
    ordered = sorted(found, key=lambda each: each[0])
    if not ordered or len(ordered[0][2].squares) < 2:
        return []
    stacks = dict.fromkeys(_stack(name, layer) for name, layer, _ in ordered if layer is not None)
    sums: dict[tuple[str, int, str], Conflict] = {}
    whole: Conflict | None = None
    for name, layer, conflict in ordered:
        key = (_stack(name, layer), -1 if layer is None else layer, part_of(name))
        sums[key] = sums[key] + conflict if key in sums else conflict
        whole = conflict if whole is None else whole + conflict
    assert whole is not None
    rows = [{"layer": None, "part": WHOLE, **_numbers(whole)}]
    for (stack, layer, part), conflict in sorted(sums.items(), key=lambda item: (item[0][1] < 0, item[0])):
        place: dict[str, Any] = {"layer": None if layer < 0 else layer, "part": part}
        if len(stacks) > 1 and layer >= 0:
            place["stack"] = stack
        rows.append({**place, **_numbers(conflict)})
    return rows


def _numbers(conflict: Conflict) -> dict[str, Any]:
    return {"size": int(conflict.size), **conflict.row()}


def _stack(name: str, layer: int | None) -> str:
    """What stands before a layer's number: ``encoder.block`` of ``encoder.block.3.layer.0.weight``."""
    return "" if layer is None else name.partition(f".{layer}.")[0]


def _sampled(tensor: Tensor, step: int) -> Any:
    """Every ``step``-th entry, float32 (n,)."""
    return tensor.detach().reshape(-1)[::step].to("cpu", torch.float32).numpy()


def _dot(a: Any, b: Any) -> float:
    return float(np.add.reduce(np.multiply(a, b, dtype=np.float64)))


def _count(mask: Any) -> int:
    return int(np.count_nonzero(mask))


def _plus(a: Any, b: Any) -> Any:
    return tuple(x + y for x, y in zip(a, b, strict=True)) if isinstance(a, tuple) else a + b


def _quotients(above: Iterable[float], below: Iterable[float]) -> list[float | None]:
    """Quotients to four significant digits; None for those that are no number."""
    return [_quotient(x, y) for x, y in zip(above, below, strict=True)]


def _quotient(above: float, below: float) -> float | None:
    if not (below > 0 and math.isfinite(above) and math.isfinite(below)):
        return None
    return float(f"{above / below:.{DIGITS}g}")
