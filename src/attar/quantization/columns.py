"""The loop that the second-order roundings share: one column after the other, each error handed on to the
columns still to come.

    for column i:   q_i = round(w_i) ;  e_i = (w_i - q_i) / U_ii ;  w_j -= e_i U_ij   for j > i

Letters: W (N, K) weight, N outputs, K inputs; U (K, K) upper triangular; E (B, N) errors of a block of B
columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attar.quantization.grids import Grid, Parameters

BLOCK = 128  # B: columns whose updates are applied to the rest in one matrix product


def round_columns(
    W: Tensor,
    U: Tensor,
    grid: Grid,
    parameters: Parameters,
    group: Tensor,
    mask: Tensor | None = None,
    first: Tensor | None = None,
) -> Tensor:
    """Codes (N, K), float32, of the columns in the order they stand in; W is not modified.

    Works on transposed blocks, so that a column is contiguous. Inside a block a column collects what the
    errors before it owe it in one product; the columns after the block get theirs in one matrix product.

    Args:
        W: (N, K) float32.
        U: (K, K) upper triangular.
        parameters: (N, G), a row for each output.
        group: int64 (K,), the tile that each column belongs to.
        mask: bool (N, K); False: stays zero.
        first: (N,), what is rounded in the first column in place of W's, whose error still is what the others
            make up for.
    """
    columns = W.shape[1]
    Wt = W.T.clone(memory_format=torch.contiguous_format)
    codes = torch.empty_like(Wt)
    kept = None if mask is None else mask.T.contiguous()
    for start in range(0, columns, BLOCK):
        end = min(start + BLOCK, columns)
        block, factor = Wt[start:end], U[start:end, start:end].contiguous()
        at_block = group[start:end]
        spread = parameters.each(lambda value, at=at_block: value.T[at].contiguous())  # type: ignore[misc]
        errors = torch.empty_like(block)
        steps = [1.0 / value for value in factor.diagonal().tolist()]
        for i in range(end - start):
            column = block[i]
            if i:
                column = torch.addmv(column, errors[:i].T, factor[:i, i], alpha=-1.0)
            at = spread.each(lambda value, i=i: value[i])  # type: ignore[misc]
            target = column if first is None or start + i else first
            if kept is not None:
                target = target * kept[start + i]
            codes[start + i] = grid.encode(target, at)
            torch.mul(column - grid.decode(codes[start + i], at), steps[i], out=errors[i])
        if end < columns:
            Wt[end:].addmm_(U[start:end, end:].T, errors, alpha=-1.0)
    return codes.T
