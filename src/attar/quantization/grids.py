"""Grids: which values a code can take, and how scale and zero are chosen. Knows nothing of how weights are
rounded.

Letters: W (N, K) weight, N outputs, K inputs; g group size along K; G = K / g groups a row; b bits.

Any rounding (nearest, GPTQ, ...) runs on any grid through three functions: ``choose`` the parameters of each
group from the weight, ``encode`` values to codes, ``decode`` codes to values. A rounding that works column by
column calls encode and decode on columns with the parameters of the column's group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Parameters:
    """What decodes the codes of each group.

    Attributes:
        scale: float32 (N, G), already rounded to the type it is stored in.
        zero: float32 (N, G) whole numbers, or None for a symmetric grid.
    """

    scale: Tensor
    zero: Tensor | None = None

    def column(self, group: int | Tensor) -> Parameters:
        """The parameters of one group (N,), or one per column for a tensor of group numbers (N, columns)."""
        return Parameters(self.scale[:, group], None if self.zero is None else self.zero[:, group])


@dataclass(frozen=True)
class IntGrid:
    """Whole numbers times a scale: w = s * (q - z), q from -2^(b-1) to 2^(b-1) - 1.

    Attributes:
        bits: b, 2 to 8.
        group_size: g inputs share a scale; 0: the whole row.
        symmetric: z = 0.
        storage: the type in which scales are stored; they are rounded to it before any code is chosen.
    """

    bits: int
    group_size: int = 128
    symmetric: bool = True
    storage: torch.dtype = torch.float32

    @property
    def low(self) -> int:
        """Smallest code."""
        return -(1 << (self.bits - 1))

    @property
    def high(self) -> int:
        """Largest code."""
        return (1 << (self.bits - 1)) - 1

    def groups(self, inputs: int) -> int:
        """G, the groups of a row of K inputs. The caller has checked that g divides K."""
        return inputs // self.group_size if self.group_size else 1

    def bits_per_weight(self, shape: tuple[int, int]) -> float:
        """Stored bits of a weight: codes, scales and zeros."""
        extra: int = self.storage.itemsize * 8 + (0 if self.symmetric else self.bits)
        return self.bits + extra * self.groups(shape[1]) / shape[1]

    def choose(self, weight: Tensor, shrink: float = 1.0) -> Parameters:
        """Scale (and zero) of each group from the largest magnitude (or the range) of its weights.

        Symmetric, as compressed-tensors and llm-compressor choose it: s = 2 max|w| / (2^b - 1), so that
        neither end of the codes is wasted.

        Args:
            weight: (N, K), any float type.
            shrink: the range is multiplied by this before the scale is taken (clip search).
        """
        grouped = weight.float().reshape(weight.shape[0], self.groups(weight.shape[1]), -1)
        steps = float(2**self.bits - 1)
        if self.symmetric:
            scale = grouped.abs().amax(-1) * shrink * 2.0 / steps
            return Parameters(self._stored(scale))
        top, bottom = grouped.amax(-1).clamp(min=0.0) * shrink, grouped.amin(-1).clamp(max=0.0) * shrink
        scale = self._stored((top - bottom) / steps)
        return Parameters(scale, (self.low - bottom / scale).round().clamp(self.low, self.high))

    def _stored(self, scale: Tensor) -> Tensor:
        """The scale as it will be read back; a group of zeros gets scale 1, and tiny scales the smallest
        normal number."""
        kept = torch.where(scale > 0, scale, torch.ones_like(scale))
        return kept.clamp(min=torch.finfo(self.storage).tiny).to(self.storage).float()

    def encode(self, values: Tensor, parameters: Parameters) -> Tensor:
        """Nearest codes, float32 whole numbers of the shape of ``values``; parameters broadcast against
        it."""
        codes = values / parameters.scale
        if parameters.zero is not None:
            codes = codes + parameters.zero
        return codes.round_().clamp_(self.low, self.high)

    def decode(self, codes: Tensor, parameters: Parameters) -> Tensor:
        """Values of codes, float32; parameters broadcast against the codes."""
        shifted = codes if parameters.zero is None else codes - parameters.zero
        return shifted * parameters.scale


@dataclass(frozen=True)
class Quantized:
    """A weight as codes on a grid.

    Attributes:
        grid: the number format.
        codes: int8 (N, K), signed codes in the original column order.
        parameters: scale and zero (N, G).
    """

    grid: IntGrid
    codes: Tensor
    parameters: Parameters

    def dequantize(self) -> Tensor:
        """The weight that a reader of the codes gets: float32 (N, K), each value rounded once to the storage
        type."""
        rows, columns = self.codes.shape
        grouped = self.codes.float().reshape(rows, self.grid.groups(columns), -1)
        zero = self.parameters.zero
        spread = Parameters(self.parameters.scale[..., None], None if zero is None else zero[..., None])
        return self.grid.decode(grouped, spread).to(self.grid.storage).float().reshape(rows, columns)
