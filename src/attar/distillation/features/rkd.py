"""Relational distillation: distances between tokens, and angles of three tokens, as the teacher has them.
Widths may differ, and no projection is trained.

    distance   huber( |x_i - x_j| / mu  -  |x'_i - x'_j| / mu' )         mu: the mean of all pairs' distances
    angle      huber( cos(x_i, x_j, x_k) - cos(x'_i, x'_j, x'_k) )       at x_j, of distinct i, j, k

Park, Kim, Lu, Cho 2019, "Relational Knowledge Distillation", arXiv 1904.05068, eqs. 4 to 9, huber with delta
1. Neither changes when all states are turned, moved or scaled.

Differs from the paper: the points are tokens, as many as ``RELATED_TOKENS`` drawn from a batch, because all
triples of them are compared: m^3 numbers a pair of layers, whatever the width.

Letters: x (m, H) and x' (m, H') states of m tokens of student and teacher.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attar.distillation.features.feature import ComparedModels, Feature, drawn_tokens
from attar.distillation.outputs import Intermediates, ModelOutputs

SMALLEST = 1e-12  # of a squared distance, by the mean of all


def squared_distances(states: Tensor) -> tuple[Tensor, Tensor]:
    """Gram matrix of the centred states, and |x_i - x_j|^2, both float64 (m, m) divided by the mean of the
    latter."""
    x = states.double()
    x = x - x.mean(0)
    gram = x @ x.T
    norms = gram.diagonal()
    squares = norms[:, None] + norms - 2 * gram
    mean = squares.mean().clamp(min=torch.finfo(torch.float64).tiny)
    return gram / mean, squares / mean


def distances(states: Tensor) -> Tensor:
    """|x_i - x_j| / mu, float64 (m, m), 0 where i = j, of states (m, H)."""
    _, squares = squared_distances(states)
    apart = ~torch.eye(len(states), dtype=torch.bool, device=states.device)
    roots = torch.where(apart, squares.clamp(min=SMALLEST).sqrt(), 0.0)
    return roots / (roots.sum() / apart.sum().clamp(min=1)).clamp(min=SMALLEST)


def angles(states: Tensor) -> Tensor:
    """Cosines of the angles at x_j, float64 (j, i, k), of states (m, H):

    (x_i - x_j)(x_k - x_j) = G_ik - G_ij - G_jk + G_jj
    """
    gram, squares = squared_distances(states)
    products = gram - gram[:, :, None] - gram[:, None] + gram.diagonal()[:, None, None]
    roots = squares.clamp(min=SMALLEST).sqrt()
    return products / (roots[:, :, None] * roots[:, None])


def distance_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Of each token, mean over the others, float32 (m,); states (m, H) and (m, H')."""
    errors = F.huber_loss(distances(student), distances(teacher), reduction="none")
    return (errors.sum(-1) / max(len(errors) - 1, 1)).float()


def angle_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Of each vertex, mean over pairs of others, float32 (m,); states (m, H) and (m, H')."""
    m = len(student)
    errors = F.huber_loss(angles(student), angles(teacher), reduction="none")
    same = torch.eye(m, dtype=torch.bool, device=errors.device)
    distinct = ~(same | same[:, :, None] | same[:, None])
    return (torch.where(distinct, errors, 0.0).sum((1, 2)) / max((m - 1) * (m - 2), 1)).float()


def _relational(name: str, difference: Callable[[Tensor, Tensor], Tensor], models: ComparedModels) -> Feature:
    def loss(student: ModelOutputs, teacher: ModelOutputs, projections: Mapping[str, nn.Module]) -> Tensor:
        tokens = drawn_tokens(student)

        def of_pair(i: int, j: int) -> Tensor:
            return difference(student.states[i + 1][tokens], teacher.states[j + 1][tokens])

        return models.mean(of_pair, projections)

    return Feature(name, loss, Intermediates(states=True), projections=models.weights)


distance = partial(_relational, "distance", distance_loss)
angle = partial(_relational, "angle", angle_loss)
