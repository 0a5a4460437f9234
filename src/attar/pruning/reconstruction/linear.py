"""Least squares after a cut or a mask: the weights of a Linear that stay, such that its outputs after the
pruned layers come closest to the original model's. One layer at a time, in closed form.

    minimise over W', b'   || (W X~^T + b) - (W' X^T + b') ||^2 + lambda T / 2 || W - W' ||^2
    W' zero where the mask is False

    whole columns are removed (units), S stay:   W'_S = (W C + lambda W)_S (H_SS + lambda I)^-1 ,  else 0
    any other mask:                              conjugate gradients, all rows at once (least_squares.py)

Letters: W (N, K) weight, b (N,) bias, of the original model; X~, X (T, K) inputs of the same T tokens in the
original model and after the pruned layers; H = 2 / T X^T X, C = 2 / T X~^T X, both (K, K). C = H where the
inputs are taken as they are: then the first form is W H_:S H_SS^-1, the restoration of FASP (Hu et al. 2025,
arXiv 2501.09412) after units are removed, the second the weight update of Boza 2024, arXiv 2401.02938.

A bias is one more column, whose input is 1 and which always stays: this is the compensation by means of FLAP
(An et al. 2023, arXiv 2312.11983) where only the bias is free. No module gets a bias that has none, because
no config can say so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attar.pruning.solvers.least_squares import masked_least_squares
from attar.quantization.hessian import (
    CrossHessian,
    Hessian,
    check_finite,
    informed,
    inverse_factor_,
    output_error,
)
from attar.walks.solvers import LinearSolver, Solution

ITERATIONS = 20  # of conjugate gradients
WEIGHTS = 1 << 25  # solved at a time: conjugate gradients hold eight tensors of their size

PrunedSource = Callable[[str], Tensor]
"""``pruned(name)``: the pruned weight (N, K) of a Linear in its stored type, by module name."""


@dataclass(frozen=True)
class LinearReconstructor(LinearSolver):
    """The sweep's solver.

    Attributes:
        pruned: a weight that is zero stays zero.
        biases: of the Linears that have one, by module name.
        originals: compare with the original model's inputs (C above), which also makes up for what the layers
            before lost; else with the layer's own (C = H), and layers without a zero stay as they are.
        damp: lambda, as a fraction of the mean of H's diagonal.
    """

    pruned: PrunedSource
    biases: Mapping[str, Tensor] = field(default_factory=dict)
    originals: bool = True
    damp: float = 0.01

    @property
    def original(self) -> bool:
        """Whether the sweep gives the original model's inputs too."""
        return self.originals

    def accumulator(self, names: Sequence[str], inputs: int) -> Hessian:
        """Empty statistics of a group, with a column of ones where a Linear has a bias."""
        ones = any(name in self.biases for name in names)
        if ones:
            return HessianWithBias(inputs + 1)
        return CrossHessian(inputs) if self.originals else Hessian(inputs)

    def solve(self, weights: dict[str, Tensor], statistics: Hessian) -> dict[str, Solution]:
        """New weights (N, K), and biases, of Linears that read the same inputs."""
        H = statistics.final()
        cross = statistics.cross() if isinstance(statistics, CrossHessian) and self.originals else None
        return {name: self._solution(name, weight, H, cross) for name, weight in weights.items()}

    def restore(self, name: str, tensors: dict[str, Tensor]) -> Tensor:
        """The stored weight (N, K)."""
        return tensors["weight"]

    def _solution(self, name: str, weight: Tensor, H: Tensor, cross: Tensor | None) -> Solution:
        inputs = weight.shape[1]
        stored = self.pruned(name).to(weight.device)
        original, mask, bias = weight, stored != 0, self.biases.get(name)
        if bias is None:
            H, cross = H[:inputs, :inputs], None if cross is None else cross[:inputs, :inputs]
        else:
            column = bias.to(weight)[:, None]
            original = torch.cat([original, column], 1)
            mask = torch.nn.functional.pad(mask, (0, 1), value=True)  # a bias always stays
        solved = reconstructed_weight(original, H, mask, cross=cross, damp=self.damp).to(stored.dtype)
        tensors = {"weight": solved[:, :inputs]}
        if bias is not None:
            tensors["bias"] = solved[:, inputs]
        new = solved[:, :inputs].to(weight.dtype)
        report = {"error": output_error(weight, new, H[:inputs, :inputs])}
        return Solution(new, tensors, report)


class HessianWithBias(CrossHessian):
    """Statistics of inputs (..., K) with a last one that is always 1: (K + 1, K + 1)."""

    def add(  # type: ignore[override]
        self, x: Tensor, original: Tensor | None = None, importance: Tensor | None = None
    ) -> None:
        """Add a batch of inputs (..., K) and the original model's inputs (None: the same)."""
        super().add(_with_one(x), None if original is None else _with_one(original), importance)


def _with_one(x: Tensor) -> Tensor:
    return torch.cat([x, torch.ones_like(x[..., :1])], -1)


def reconstructed_weight(
    weight: Tensor, H: Tensor, mask: Tensor, *, cross: Tensor | None = None, damp: float = 0.01
) -> Tensor:
    """W', float32 (N, K). Does not modify its inputs.

    Args:
        weight: W (N, K), any float type.
        H: (K, K) float32, symmetric, positive semi-definite.
        mask: bool (N, K), False where W' is zero.
        cross: C (K, K) float32, rows for the original inputs; None: H.
        damp: lambda as a fraction of the mean of H's diagonal.

    Raises:
        NumericsError: W, H or C is not finite, or no damping up to 1 makes H invertible.
    """
    W, C = weight.float(), H if cross is None else cross
    check_finite(W, H, C)
    if bool((H.diagonal() <= 0).any()):
        fill = (informed(H.diagonal()) - H.diagonal()).diag()
        H, C = H + fill, C + fill
    stays, solved = mask.all(0), torch.zeros_like(W)
    if bool(mask[:, ~stays].any()):
        step = max(1, WEIGHTS // W.shape[1])
        for start in range(0, len(W), step):
            at = slice(start, start + step)
            solved[at] = masked_least_squares(
                W[at], H, mask[at], iterations=ITERATIONS, damp=damp, target=W[at] @ C
            )
        return solved
    if cross is None and bool(stays.all()):
        return W
    if not bool(stays.any()):  # a Linear that is zero
        return solved
    target, kept = W @ C, W[:, stays]
    H_SS = H[stays][:, stays]
    U, _ = inverse_factor_(H_SS, damp)
    solved[:, stays] = kept + (target[:, stays] - kept @ H_SS) @ U.T @ U
    return solved
