"""Round to nearest: every weight to the closest value of its grid, knowing nothing of the data. The base
line of all others."""

from __future__ import annotations

from torch import Tensor

from attar.quantization.grids import Grid, QuantizedTensor, TileParameters


def rtn(weight: Tensor, grid: Grid, parameters: TileParameters | None = None) -> QuantizedTensor:
    """Round a weight (N, K) to nearest. Does not modify its inputs.

    Args:
        weight: (N, K), any float type.
        parameters: of each tile; None: what the grid chooses.
    """
    return grid.quantize(weight, parameters or grid.choose(weight))
