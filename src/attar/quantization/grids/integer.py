"""Integers times a scale: int2 to int8, symmetric or with a zero, by tensor, channel, group or block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attar.kernels.columns import CodeBook
from attar.quantization.grids.grid import Grid, TileParameters, stored_scale


@dataclass(frozen=True)
class IntGrid(Grid):
    """w = s * (q - z), q from -2^(b-1) to 2^(b-1) - 1.

    Attributes:
        bits: b, 2 to 8.
        group_size: inputs that share a scale; 0: the whole row.
        symmetric: z = 0.
        storage: the type in which scales are stored; they are rounded to it before any code is chosen.
        rows: outputs that share a scale; 0: all.
    """

    bits: int
    group_size: int = 128
    symmetric: bool = True
    storage: torch.dtype = torch.float32
    rows: int = 1

    @property
    def low(self) -> int:
        """Smallest code."""
        return -(1 << (self.bits - 1))

    @property
    def high(self) -> int:
        """Largest code."""
        return (1 << (self.bits - 1)) - 1

    @property
    def signed(self) -> bool:
        """Symmetric codes reach to -2^(b-1) and 2^(b-1) - 1: with few bits the sign of the scale matters."""
        return self.symmetric and self.bits < 8 and self.rows == 1

    def code_book(self) -> CodeBook:
        """Integers; z is 0 or the tile's own."""
        return CodeBook(self.low, self.high)

    def bits_per_weight(self, shape: tuple[int, int]) -> float:
        """Stored bits of a weight: codes, scales and zeros."""
        extra: int = self.storage.itemsize * 8 + (0 if self.symmetric else self.bits)
        tiles_down, tiles_across = self.tiles(shape)
        return self.bits + extra * tiles_down * tiles_across / (shape[0] * shape[1])

    def choose(
        self, weight: Tensor, shrink: float | Tensor = 1.0, importance: Tensor | None = None
    ) -> TileParameters:
        """Scale (and zero) of each tile from the largest magnitude (or the range) of its weights.

        Symmetric, as compressed-tensors and llm-compressor choose it: s = 2 max|w| / (2^b - 1), so that
        neither end of the codes is wasted.
        """
        tiled = self.tile(weight)
        steps = float(2**self.bits - 1)
        if self.symmetric:
            return TileParameters(stored_scale(tiled.abs().amax((1, 3)) * shrink * 2.0 / steps, self.storage))
        top = tiled.amax((1, 3)).clamp(min=0.0) * shrink
        bottom = tiled.amin((1, 3)).clamp(max=0.0) * shrink
        scale = stored_scale((top - bottom) / steps, self.storage)
        return TileParameters(scale, (self.low - bottom / scale).round().clamp(self.low, self.high))

    def rescaled(self, parameters: TileParameters, scale: Tensor) -> TileParameters | None:
        """Any scale but 0, in the storage type."""
        return TileParameters(stored_scale(scale, self.storage), parameters.zero)

    def nearest(self, values: Tensor) -> Tensor:
        """Rounded half to even, kept within the codes."""
        return values.round().clamp_(self.low, self.high)

    def level(self, codes: Tensor) -> Tensor:
        """The code itself."""
        return codes.float()
