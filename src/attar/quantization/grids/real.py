"""Real numbers: the grid of weights that are pruned and not quantized, for the loops of quantization."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attar.kernels.columns import CodeBook
from attar.quantization.grids.grid import Grid, TileParameters


@dataclass(frozen=True)
class RealGrid(Grid):
    """w = q: codes are float32 weights, and every weight is its own nearest code."""

    storage: torch.dtype = torch.float32
    group_size: int = 0
    rows: int = 1

    @property
    def code_dtype(self) -> torch.dtype:
        """Codes are weights."""
        return torch.float32

    def code_book(self) -> CodeBook:
        """Codes are not rounded."""
        return CodeBook(0, 0, numbers="real")

    def bits_per_weight(self, shape: tuple[int, int]) -> float:
        """Bits of the storage type."""
        return float(self.storage.itemsize * 8)

    def choose(
        self, weight: Tensor, shrink: float | Tensor = 1.0, importance: Tensor | None = None
    ) -> TileParameters:
        """A scale of 1 for each row."""
        return TileParameters(torch.ones(len(weight), 1, device=weight.device))

    def nearest(self, values: Tensor) -> Tensor:
        """The values."""
        return values

    def level(self, codes: Tensor) -> Tensor:
        """The code itself."""
        return codes.float()
