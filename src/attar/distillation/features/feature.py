"""What a feature is, and what the features share: positions, pairs of layers, projections.

    loss = mean over pairs (i, j) of layers of mean over compared tokens of distance(student_i, teacher_j)

Where widths differ, the student's states pass through a matrix that is trained with it and thrown away:
h W^T, W (H', H), one for all layers, because all of them write into one residual stream (Jiao et al. 2020,
"TinyBERT", arXiv 1909.10351, eq. 8; Romero et al. 2015, "FitNets", arXiv 1412.6550, eq. 3).

Letters: H and H' widths of student and teacher, m compared tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from attar.distillation.feature_settings import FeatureSettings
from attar.distillation.outputs import Insides, ModelOutputs

FeatureLoss = Callable[[ModelOutputs, ModelOutputs, Mapping[str, nn.Module]], Tensor]
"""``loss(student, teacher, projections)``: a scalar, the mean over compared tokens."""


@dataclass(frozen=True)
class Feature:
    """One comparison of the insides of both models.

    Attributes:
        insides: what it needs of both.
        projections: trained with the student, by name.
        weight: in the sum of losses.
    """

    name: str
    loss: FeatureLoss
    insides: Insides
    weight: float = 1.0
    projections: Mapping[str, nn.Module] = field(default_factory=dict)


@dataclass(frozen=True)
class ComparedModels:
    """What features must know of both models before training.

    Attributes:
        student: its outputs for a few tokens.
        pairs: (student layer, teacher layer), counted from 0.
        seed: of projections that are drawn.
    """

    student: ModelOutputs
    teacher: ModelOutputs
    settings: FeatureSettings
    pairs: Sequence[tuple[int, int]]
    seed: int = 0

    def projection(self, name: str) -> dict[str, nn.Module]:
        """The projection of a feature's states, under its name; none where it needs none."""
        widths = self.student.states[0].shape[-1], self.teacher.states[0].shape[-1]
        if widths[0] == widths[1] and self.settings.projection == "auto":
            return {}
        return {name: make_projection(*widths, self.seed).to(self.student.states[0].device)}


def make_projection(student: int, teacher: int, seed: int = 0) -> nn.Linear:
    """W (H', H): the identity, or between different widths a draw of orthogonal columns (rows)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        linear = nn.Linear(student, teacher, bias=False)
        if student == teacher:
            nn.init.eye_(linear.weight)
        else:
            nn.init.orthogonal_(linear.weight)
    return linear


def project(projections: Mapping[str, nn.Module], name: str, states: Tensor) -> Tensor:
    """States (m, H) in the teacher's width, float32."""
    return (projections[name](states) if name in projections else states).float()


def mean_of_pairs(pairs: Sequence[tuple[int, int]], distance: Callable[[int, int], Tensor]) -> Tensor:
    """The mean over pairs of layers and tokens of ``distance(i, j)`` (m,); 0 of no tokens."""
    return torch.stack([mean_of(distance(i, j)) for i, j in pairs]).mean()


def mean_of(values: Tensor) -> Tensor:
    """Their mean; 0 of none."""
    return values.sum() / max(values.numel(), 1)
