"""Similarity of tokens to each other: what is alike for the teacher is to be so for the student. Widths may
differ, and no projection is trained.

    G = rows of X X^T, each divided by its norm ;   sum over columns (G - G')^2 of each row

Tung, Mori 2019, "Similarity-Preserving Knowledge Distillation", arXiv 1907.09682, eqs. 1 to 4.

Differs from the paper: the rows are tokens of a batch, drawn where there are many, not images; the mean over
rows is not divided by their number again.

Letters: X (m, H) and X' (m, H') states of m tokens of student and teacher.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn import functional as F

from attar.distillation.features.feature import ComparedModels, Feature, drawn_tokens
from attar.distillation.outputs import Intermediates, ModelOutputs


def similarity(states: Tensor) -> Tensor:
    """G float32 (m, m) of states (m, H)."""
    x = states.float()
    return F.normalize(x @ x.T, dim=-1)


def similarity_distance(student: Tensor, teacher: Tensor) -> Tensor:
    """Of each row, float32 (m,); states (m, H) and (m, H')."""
    return (similarity(student) - similarity(teacher)).square().sum(-1)


def relation(models: ComparedModels) -> Feature:
    """The similarities among drawn tokens in all pairs of layers."""

    def loss(student: ModelOutputs, teacher: ModelOutputs, projections: Mapping[str, nn.Module]) -> Tensor:
        tokens = drawn_tokens(student)

        def of_pair(i: int, j: int) -> Tensor:
            return similarity_distance(student.states[i + 1][tokens], teacher.states[j + 1][tokens])

        return models.mean(of_pair, projections)

    return Feature("relation", loss, Intermediates(states=True), projections=models.weights)
