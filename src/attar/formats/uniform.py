"""A weight on an even grid, w = s (q - z), of whatever layout: what a kernel of integers can multiply.

Letters: q whole codes of b bits, signed; s scale and z zero of a group of inputs. z is a whole number in the
layouts of integers, and any number where a file stores a minimum instead (llama.cpp's Q4_K: z = m / s).

Codes of 4-bit floats are even too, once doubled: 0, 1, 2, 3, 4, 6, 8, 12 and their negatives, under half the
scale. FP8 and NF4 are not: their steps grow with the number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attar.formats.coded import Coded
from attar.formats.layouts import FP4
from attar.formats.rules import WeightRule

FP4_BITS = 5  # of a doubled code, which is at most 12


@dataclass(frozen=True)
class UniformWeight:
    """A weight (N, K).

    Attributes:
        codes: q, int8 (N, K), from -2^(b-1) to 2^(b-1) - 1.
        bits: b, at most 8.
        scale: s, float32 (P, G): P rows of tiles, G groups of inputs.
        zero: z, float32 (P, G); None: 0.
        width: inputs of a group.
        order: int (K,), the group of each input; None: neighbours.
    """

    codes: Tensor
    bits: int
    scale: Tensor
    zero: Tensor | None = None
    width: int = 0
    order: Tensor | None = None


def uniform_weight(reader: Any, name: str) -> UniformWeight | None:
    """A stored weight on its grid, out x in, as the reader of its checkpoint finds it; None for any other
    tensor, and for weights whose grid is not even.

    Raises:
        CheckpointError: the tensors of the weight do not fit together.
    """
    own = getattr(reader, "uniform", None)
    if own is not None:
        found: UniformWeight | None = own(name)
        return found
    coded = reader.codes(name)
    return None if coded is None else uniform_of_codes(*coded)


def uniform_of_codes(weight: Coded, rule: WeightRule) -> UniformWeight | None:
    """Codes of an integer or FP4 layout on their grid; None for float8. Does not modify its inputs."""
    shape = (weight.codes.shape[0], weight.codes.shape[1])
    width = rule.tile(shape)[1]
    if rule.kind == "int" and rule.bits <= 8:
        return UniformWeight(weight.codes, rule.bits, weight.scale, weight.zero, width, weight.order)
    if rule.kind == "float" and rule.bits == 4:
        doubled = torch.tensor([*FP4, *(-level for level in FP4)]).mul_(2).to(torch.int8)
        return UniformWeight(doubled[weight.codes.int()], FP4_BITS, weight.scale / 2, width=width)
    return None
