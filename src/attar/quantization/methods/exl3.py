"""EXL3 for a Linear: rotated on both sides, rounded to a trellis tile by tile, each error corrected in the
inputs that are not rounded yet.

turboderp, ExLlamaV3, ``exl3_lib/quantize.py``, after QTIP (Tseng et al. 2024, arXiv 2406.11235).

    T = P diag(su)^-1 W^T diag(sv)^-1 P     sv: rms of an output, su: of an input over SPREAD, random signs
    for each 16 inputs a, from the first:   T'_a = the nearest rings of its tiles (kernels/trellis.py)
                                            T_b -= U_ab^T U_aa^-T (T_a - T'_a)  for the inputs b after it
    then  sv, su = least squares of the output error, one after the other, the rings as they are

Letters: W (N, K) weight, N outputs, K inputs, both filled up with zeros to multiples of 128; P blocks of the
Hadamard matrix of 128; H (K, K) from hessian.py, G = P diag(su) H diag(su) P the same for the rows of T;
U (K, K) upper, U^T U = (G + lambda I)^-1. The codebook is mul1, whose values have a deviation of 1; SPREAD is
what is best for normal numbers, as rotated weights nearly are.

Differs from the reference: su counts in G for every Linear; the size of T is SPREAD, and not searched; inputs
are rounded from the first to the last.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attar.formats import exl3
from attar.formats.exl3 import BLOCK, CODEBOOK, INPUTS, OUTPUTS, TILE, TRELLIS, over_inputs, over_outputs
from attar.kernels.trellis import nearest_paths
from attar.quantization.hessian import check_finite, fill_unseen_, inverse_factor_, output_error

SPREAD = {1: 1.1, 2: 1.0, 3: 0.9, 4: 0.87, 5: 0.85, 6: 0.82, 7: 0.8, 8: 0.78}
"""Deviation of the rounded numbers by bits."""
SMALL = 1e-30


@dataclass(frozen=True)
class EXL3Layer:
    """A Linear in EXL3.

    Attributes:
        tensors: by the last part of their names, as in attar.formats.exl3.layout.
        weight: (N, K) float32, as a reader decodes it.
        report: bits (stored, a weight), error (relative, of the output), damp.
    """

    tensors: dict[str, Tensor]
    weight: Tensor
    report: dict[str, Any]


def quantize_layer(weight: Tensor, H: Tensor, bits: int, *, damp: float = 0.01, seed: int = 0) -> EXL3Layer:
    """Round a weight so that the layer's output changes least. Does not modify its inputs.

    Args:
        weight: W (N, K), any float type.
        H: (K, K) float32, not damped.
        bits: of a weight, 1 to 8.
        damp: lambda as a fraction of the mean of G's diagonal.
        seed: of the signs.

    Raises:
        NumericsError: W or H is not finite, or no damping up to 1 makes G invertible.
    """
    check_finite(weight, H)
    W, filled_H = _filled(weight, H)
    T, su, sv = _rotated(W, SPREAD[bits], seed)
    G = over_outputs(over_inputs(filled_H * su * su[:, None]))
    U, used = inverse_factor_(G.contiguous(), damp)
    states, rounded = round_tiles(T, U, bits)
    su, sv = _fitted(W, rounded, filled_H, su, sv, used)
    tensors = {TRELLIS: exl3.pack(states, bits), INPUTS: su.half(), OUTPUTS: sv.half()}
    tensors[CODEBOOK] = torch.tensor(exl3.MULTIPLIERS[CODEBOOK] - (1 << 32), dtype=torch.int32)
    decoded = exl3.decode(tensors, (weight.shape[0], weight.shape[1])).float()
    stored = sum(8 * tensor.nbytes for tensor in tensors.values())
    report = {
        "bits": stored / weight.numel(),
        "error": output_error(weight.float(), decoded, H),
        "damp": used,
    }
    return EXL3Layer(tensors, decoded, report)


def round_tiles(T: Tensor, U: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """States (K / 16, N / 16, 256) and the numbers (K, N) that they stand for. Does not modify its inputs.

    Args:
        T: (K, N) float32.
        U: (K, K) upper triangular.
        bits: of a number.
    """
    left, rounded, states = T.clone(), torch.empty_like(T), []
    values, order = exl3.codebook(CODEBOOK).float(), exl3.tile_order()
    back = order.argsort()
    for start in range(0, len(T), TILE):
        a, after = slice(start, start + TILE), slice(start + TILE, None)
        tiles = left[a].unflatten(1, (-1, TILE)).transpose(0, 1).flatten(1)
        path = nearest_paths(tiles[:, order].contiguous(), values, bits)
        rounded[a] = values[path][:, back].view(-1, TILE, TILE).transpose(0, 1).flatten(1)
        E = torch.linalg.solve_triangular(U[a, a].T, left[a] - rounded[a], upper=False)
        left[after].addmm_(U[a, after].T, E, alpha=-1.0)
        states.append(path)
    return torch.stack(states), rounded


def _filled(weight: Tensor, H: Tensor) -> tuple[Tensor, Tensor]:
    """W^T (K, N) and H, float32, filled up to multiples of 128; new inputs count like a usual one."""
    rows, columns = (-size % BLOCK for size in weight.shape)
    W = torch.nn.functional.pad(weight.float(), (0, columns, 0, rows)).T.contiguous()
    H = torch.nn.functional.pad(H.float(), (0, columns, 0, columns)).contiguous()
    fill_unseen_(H)
    return W, H


def _rotated(W: Tensor, spread: float, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """T (K, N), su (K,) and sv (N,), of which 0 are those of outputs that are 0."""
    rms = W.square().mean(0).sqrt()
    live = rms > SMALL
    size = rms / rms[live].mean() if live.any() else rms
    sv = torch.where(live, size, 1.0) * _signs(W.shape[1], seed)
    T = over_outputs(W / sv)
    rms = T.square().mean(1).sqrt() / spread
    su = torch.where(rms > SMALL, rms, 1.0) * _signs(len(W), seed + 1)
    return over_inputs(T / su[:, None]), su, torch.where(live, sv, 0.0)


@functools.cache
def _signs(count: int, seed: int) -> Tensor:
    """1 and -1 at random; not to be modified."""
    generator = torch.Generator().manual_seed(seed)
    return 2.0 * torch.randint(0, 2, (count,), generator=generator).float() - 1.0


def _fitted(
    W: Tensor, rounded: Tensor, H: Tensor, su: Tensor, sv: Tensor, damp: float
) -> tuple[Tensor, Tensor]:
    """The scales of least output error under the damped H: of the outputs, then of the inputs."""
    H = H + torch.diag(damp * H.diagonal().mean().expand(len(H)))
    Q = over_outputs(over_inputs(rounded) * su[:, None]) * sv
    HW = H @ W
    factor = (Q * HW).sum(0) / (Q * (H @ Q)).sum(0).clamp(min=SMALL)
    factor = torch.where(factor > 0, factor, 1.0)
    Q = Q * factor
    A = (Q @ Q.T) * H
    A.diagonal().add_(1e-6 * A.diagonal().mean() + SMALL)
    change = torch.linalg.solve(A, (Q * HW).sum(1))
    return su * torch.where(change > 0, change, 1.0), sv * factor
