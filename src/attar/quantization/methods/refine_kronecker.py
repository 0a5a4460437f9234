"""Refinement of given codes under the Hessian of the whole model's KL: coordinate descent on

    f(W') = 1/2 tr(E^T H_O E H_I) ,  E = W' - V

    codes:    w'_ik <- round(w'_ik - G_ik / (H_O,ii H_I,kk))     each entry in turn, the others fixed
    gradient: G = H_O E H_I ;  G <- G + H_O,:i (change of w'_ik) H_I,k:

YAQA (yaqa.py) visits an entry once, while those after it may still become any number; here each is visited
again among the others as they were rounded, and no step raises f. H_O = 1 is the descent of refine.py, by
which the scales are refitted between two passes: each row's as if the others stayed, all kept where f falls.

Letters: W' (N, K) decoded codes, V what they should be; H_O (N, N), H_I (K, K), both damped; U (n, N) what a
block of n columns has moved, times H_O.

An entry that stays costs a comparison, one that moves a row of H_O; a block of columns reaches the others in
one product, H_I U. The loop inside a block is compiled (kernels/columns.py): one entry after the other is no
work for torch, nor for a GPU, whose layers come to the CPU. Without a compiler, or on a grid without a code
book (NF4), codes stay as they are.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attar.kernels import columns as kernel
from attar.quantization.columns import compiled_tiles
from attar.quantization.grids import QuantizedTensor
from attar.quantization.hessian import damped
from attar.quantization.methods.refine import BLOCK, Descent, refit_scales, start


def refine_kronecker(
    quantized: QuantizedTensor,
    H_O: Tensor,
    H_I: Tensor,
    target: Tensor,
    *,
    sweeps: int = 4,
    damp: float = 0.01,
    damp_output: float = 0.1,
    mask: Tensor | None = None,
) -> QuantizedTensor:
    """Better codes and scales for the same layer. Does not modify its inputs, but that diagonals are damped
    meanwhile.

    Args:
        quantized: codes (N, K) to start from; its groups follow the column order.
        H_O: (N, N) float32, symmetric, not damped.
        H_I: (K, K), the same.
        target: V (N, K).
        sweeps: passes over all entries, at most: a pass in which none moves is the last. The scales are
            refitted between two.
        damp: added to H_I's diagonal, as a fraction of its mean.
        damp_output: the same for H_O.
        mask: bool (N, K); False: stays zero.
    """
    H_O, H_I, target = (value.float().cpu() for value in (H_O, H_I, target))
    on_cpu = QuantizedTensor(
        quantized.grid, quantized.codes.cpu(), quantized.parameters.map(lambda value: value.cpu())
    )
    ridge_output, ridge = damp_output * H_O.diagonal().mean(), damp * H_I.diagonal().mean()
    with damped(H_O, ridge_output) as output, damped(H_I, ridge) as H:
        descent = start(on_cpu, H, None, target, None if mask is None else mask.cpu())
        descent.gradient = descent.gradient @ output
        while sweeps and sweep_entries(descent, output):
            sweeps -= 1
            if sweeps:
                refit_scales(descent, output)
    device, codes = quantized.codes.device, descent.quantized().codes
    parameters = replace(quantized.parameters, scale=descent.parameters.scale.to(device))
    return QuantizedTensor(quantized.grid, codes.to(device), parameters)


def sweep_entries(descent: Descent, output: Tensor) -> bool:
    """One pass of coordinate descent over all entries, column by column, in place; whether one moved.

    Args:
        descent: its gradient is G, (K, N), transposed as the rest of it.
        output: H_O (N, N), damped.
    """
    H, gradient, K = descent.H, descent.gradient, len(descent.codes)
    tiles = compiled_tiles(descent.grid, descent.rows(), descent.group)
    if tiles is None:
        return False
    before = descent.codes.clone()
    for begin in range(0, K, BLOCK):
        at = slice(begin, min(begin + BLOCK, K))
        moved = torch.zeros_like(gradient[at])
        inner, kept = H[at, at].contiguous(), None if descent.mask is None else descent.mask[at]
        parts = gradient[at], inner, output, descent.current[at], descent.codes[at], moved
        kernel.descend_rows(tiles, at, *parts, mask=kept)
        gradient.addmm_(H[:, at], moved)
    return not torch.equal(before, descent.codes)
