"""Linear recurrences as the compiled step reads them: Mamba 2 and the gated delta rule, in the place of
attention or beside it. csrc/decode/recurrence.h has the formulas."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attar.errors import ModelError
from attar.kernels import structures
from attar.kernels.packed import PackedWeight

LANES = 16  # numbers in a vector


@dataclass(frozen=True, kw_only=True)
class RecurrenceShape:
    """Sizes, and where things are: in a row of the first product the channels of the convolution and the
    gate, in the channels q, k and v, in a row of ``steps`` (or of the first product) the steps.

    Attributes:
        heads: of v, each with a state (keys, values).
        groups: of q and k; divides heads.
        keys: numbers of q and of k.
        values: of v.
        delta: whether it is the delta rule.
        gated_norm: whether the gate comes before the norm.
        norm_size: numbers that are normed together.
        least, most: of Mamba 2's step.
    """

    heads: int
    groups: int
    keys: int
    values: int
    channels_at: int
    queries_at: int
    keys_at: int
    values_at: int
    gate_at: int
    steps_at: int
    delta: bool
    gated_norm: bool
    norm_size: int
    eps: float
    least: float = 0.0
    most: float = math.inf

    @property
    def channels(self) -> int:
        """Of the convolution."""
        return 2 * self.groups * self.keys + self.heads * self.values

    @property
    def carried(self) -> int:
        """Numbers of a token from which its part of a state can be computed again."""
        return self.channels + (2 if self.delta else 1) * self.heads

    @property
    def numbers(self) -> int:
        """Of a layer's states."""
        return self.heads * self.keys * self.values


@dataclass(frozen=True, kw_only=True)
class RecurrenceWeights:
    """A layer's. float32.

    Attributes:
        decay: A (heads,), positive.
        step_bias: (heads,).
        first, out: the products of the residual stream, and of what the heads give.
        norm: (heads values,); None: none.
        skip: D (heads,); None: none.
        steps: makes the steps: d (heads), and with the delta rule c (heads); None: the first product does.
    """

    shape: RecurrenceShape
    decay: Tensor
    step_bias: Tensor
    first: PackedWeight
    out: PackedWeight
    norm: Tensor | None = None
    skip: Tensor | None = None
    steps: PackedWeight | None = None

    @property
    def products(self) -> list[PackedWeight]:
        """Packed weights."""
        return [*filter(None, (getattr(self, name) for name in structures.RECURRENCE_PRODUCTS))]


def recurrence_struct(weights: RecurrenceWeights | None) -> tuple[structures.RecurrenceStruct] | None:
    """A recurrence as the library reads it."""
    if weights is None:
        return None
    result = structures.RecurrenceStruct()
    for name in (*structures.RECURRENCE_SIZES, "eps", "least", "most", "delta", "gated_norm"):
        setattr(result, name, getattr(weights.shape, name))
    for name in ("decay", "step_bias", "skip", "norm"):
        setattr(result, name, structures.address(getattr(weights, name)))
    for name in structures.RECURRENCE_PRODUCTS:
        if getattr(weights, name) is not None:
            setattr(result, name, structures.linear_struct(getattr(weights, name)))
    return (result,)


def check_recurrence(weights: RecurrenceWeights, hidden: int) -> None:
    """What the library does not check.

    Raises:
        ModelError: the sizes do not fit each other, or the library's vectors.
    """
    s = weights.shape
    width = s.heads * s.values
    if s.keys % LANES or s.values % LANES or s.heads % s.groups or width % s.norm_size or s.norm_size % LANES:
        raise ModelError(
            f"a recurrence of {s.heads} heads of {s.keys} x {s.values} numbers in {s.groups} groups",
            hint="the compiled runner takes multiples of 16",
        )
    rows, out = weights.first.rows, weights.out
    ends = [(s.channels_at + s.channels, rows), (s.gate_at + width, rows)]
    ends += [(s.queries_at + s.groups * s.keys, s.channels), (s.keys_at + s.groups * s.keys, s.channels)]
    ends += [(s.values_at + width, s.channels)]
    ends += [(s.steps_at + s.carried - s.channels, rows if weights.steps is None else weights.steps.rows)]
    if (weights.first.columns, out.rows, out.columns) != (hidden, hidden, width):
        raise ModelError(f"products {out.rows} x {out.columns} and {rows} x {weights.first.columns}")
    if any(end > size for end, size in ends):
        raise ModelError(f"products of {rows} rows for a recurrence of {s.channels} channels")
    shapes = {"decay": s.heads, "step_bias": s.heads, "skip": s.heads, "norm": width}
    for name, size in shapes.items():
        tensor = getattr(weights, name)
        if tensor is not None and (tensor.shape != (size,) or tensor.dtype != torch.float32):
            raise ModelError(f"{name} of a recurrence is {tensor.dtype} {tuple(tensor.shape)}, not ({size},)")
