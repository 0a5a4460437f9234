"""What a layer's inputs say about its weights: H = 2 / T * sum over tokens of x x^T, accumulated batch by
batch.

Letters: X (T, K) inputs of a Linear, T tokens; H (K, K). The output error of a changed weight is
|| (W - W') X^T ||^2 = T / 2 * tr((W - W') H (W - W')^T): everything the second-order roundings know of the
data.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Hessian:
    """Accumulates H in float32 over any number of batches; the same batches in the same order give the same
    bytes."""

    def __init__(self, inputs: int) -> None:
        self.sum = torch.zeros(inputs, inputs, dtype=torch.float32)
        self.tokens = 0

    def add(self, x: Tensor) -> None:
        """Add a batch of inputs (..., K)."""
        rows = x.reshape(-1, x.shape[-1]).float()
        self.sum = self.sum.to(x.device)
        self.sum.addmm_(rows.T, rows)
        self.tokens += rows.shape[0]

    def value(self) -> Tensor:
        """H, float32 (K, K)."""
        return self.sum * (2.0 / max(self.tokens, 1))

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return int(self.sum.nbytes)


def output_error(weight: Tensor, rounded: Tensor, H: Tensor) -> float:
    """Relative output error || (W - W') X ||^2 / || W X ||^2 of a rounded weight, from H alone (0: exact)."""
    W, E = weight.double(), weight.double() - rounded.double()
    H = H.double()
    lost = torch.einsum("nk,kl,nl->", E, H, E)
    whole = torch.einsum("nk,kl,nl->", W, H, W)
    return float(lost / whole.clamp(min=1e-30))
