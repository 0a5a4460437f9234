"""Round to nearest: every weight to the closest value of its grid, knowing nothing of the data. The base
line of all others."""

from __future__ import annotations

import torch
from torch import Tensor

from attar.quantization.grids import IntGrid, Parameters, Quantized


def rtn(weight: Tensor, grid: IntGrid) -> Quantized:
    """Round a weight (N, K) to nearest. Does not modify the input.

    Args:
        weight: (N, K), any float type; g divides K.
        grid: the number format.
    """
    parameters = grid.choose(weight)
    rows, columns = weight.shape
    grouped = weight.float().reshape(rows, grid.groups(columns), -1)
    zero = parameters.zero
    spread = Parameters(parameters.scale[..., None], None if zero is None else zero[..., None])
    codes = grid.encode(grouped, spread).reshape(rows, columns)
    return Quantized(grid, codes.to(torch.int8), parameters)
