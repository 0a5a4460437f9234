"""A learned layer map: each student layer chooses the teacher layers that it is compared with.

    A = softmax over j of c theta ;   loss_i = sum over j A_ij distance(i, j)  ;   + w mean over i of H(A_i)

H the entropy: it lets a row come down to one layer. A starts at the uniform map with weight FIRST, the rest
spread evenly. Chen et al. 2021, "Cross-Layer Distillation with Semantic Calibration", arXiv 2012.03236, eq. 6
weighs pairs of layers so.

Differs from the paper: theta is trained itself, the same for all inputs, so that a map can be read off and
given by hand; the entropy is added. c lets theta move as fast as weights do under Adam, whose steps have the
size of the learning rate.

Letters: i one of l student layers, j one of L teacher layers; theta (l, L).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

SCALE = 50.0  # c
FIRST = 0.5  # weight of the uniform map's layer at the start


class LearnedMap(nn.Module):  # type: ignore[misc]
    """A of all layers.

    Args:
        pairs: the map to start near, one teacher layer for each student layer in order.
        teacher: L.
    """

    def __init__(self, pairs: Sequence[tuple[int, int]], teacher: int) -> None:
        super().__init__()
        self.shape = (len(pairs), teacher)
        others = (1.0 - FIRST) / max(teacher - 1, 1)
        theta = torch.full(self.shape, math.log(others) / SCALE)
        for i, j in pairs:
            theta[i, j] = math.log(FIRST) / SCALE
        self.theta = nn.Parameter(theta.flatten())  # a vector: the optimizers treat matrices otherwise

    def forward(self) -> Tensor:
        """A (l, L)."""
        return (SCALE * self.theta).view(self.shape).softmax(-1)

    def entropy(self) -> Tensor:
        """The mean over rows of H(A_i), in nats."""
        weights = self()
        return -torch.special.xlogy(weights, weights).sum(-1).mean()

    def matrix(self) -> list[list[float]]:
        """A as numbers."""
        return [[round(weight, 4) for weight in row] for row in self().detach().tolist()]


def hard_map(matrix: Sequence[Sequence[float]]) -> str:
    """The heaviest teacher layer of each student layer, as a map is given by hand: ``0:1,1:3``."""
    return ",".join(f"{i}:{max(range(len(row)), key=row.__getitem__)}" for i, row in enumerate(matrix))
