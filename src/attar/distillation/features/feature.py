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
from attar.distillation.features.learned_map import LearnedMap
from attar.distillation.outputs import Intermediates, ModelOutputs

FeatureLoss = Callable[[ModelOutputs, ModelOutputs, Mapping[str, nn.Module]], Tensor]
"""``loss(student, teacher, projections)``: a scalar, the mean over compared tokens."""

PairDistance = Callable[[int, int], Tensor]
RELATED_TOKENS = 64  # of a batch, among which relation, distance and angle are compared
LAYER_WEIGHTS = "layer_weights"  # their name among the projections


@dataclass(frozen=True)
class Feature:
    """One comparison of the intermediates of both models.

    Attributes:
        intermediates: what it needs of both.
        projections: trained with the student, by name.
        weight: in the sum of losses.
    """

    name: str
    loss: FeatureLoss
    intermediates: Intermediates
    weight: float = 1.0
    projections: Mapping[str, nn.Module] = field(default_factory=dict)


@dataclass(frozen=True)
class ComparedModels:
    """What features must know of both models before training.

    Attributes:
        student: its outputs for a few tokens.
        pairs: (student layer, teacher layer), counted from 0.
        seed: of projections that are drawn.
        learned: weights of the pairs that are trained.
    """

    student: ModelOutputs
    teacher: ModelOutputs
    settings: FeatureSettings
    pairs: Sequence[tuple[int, int]]
    seed: int = 0
    learned: LearnedMap | None = None

    @property
    def weights(self) -> dict[str, nn.Module]:
        """The weights of the pairs, where they are trained."""
        return {} if self.learned is None else {LAYER_WEIGHTS: self.learned}

    def mean(self, distance: PairDistance, projections: Mapping[str, nn.Module]) -> Tensor:
        """The mean over student layers, or as the trained weights have it, and over tokens of
        ``distance(i, j)`` (m,)."""
        values = [mean_of(distance(i, j)) for i, j in self.pairs]
        if LAYER_WEIGHTS not in projections:
            return torch.stack(values).mean()
        weights = projections[LAYER_WEIGHTS]()
        parts = [weights[pair] * value for pair, value in zip(self.pairs, values, strict=True)]
        return torch.stack(parts).sum() / len({i for i, _ in self.pairs})

    def projection(self, name: str) -> dict[str, nn.Module]:
        """The projection of a feature's states, under its name, where it needs one; and :attr:`weights`."""
        widths = self.student.states[0].shape[-1], self.teacher.states[0].shape[-1]
        if widths[0] == widths[1]:
            return self.weights
        return self.weights | {name: make_projection(*widths, self.seed).to(self.student.states[0].device)}


def make_projection(student: int, teacher: int, seed: int = 0) -> nn.Linear:
    """W (H', H), a draw of orthogonal columns (rows)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        linear = nn.Linear(student, teacher, bias=False)
        nn.init.orthogonal_(linear.weight)
    return linear


def project(projections: Mapping[str, nn.Module], name: str, states: Tensor) -> Tensor:
    """States (m, H) in the teacher's width, float32."""
    return projections[name](states.float()) if name in projections else states.float()  # type: ignore[no-any-return]


def mean_of(values: Tensor) -> Tensor:
    """Their mean; 0 of none."""
    return values.sum() / max(values.numel(), 1)


def drawn_tokens(outputs: ModelOutputs, limit: int = RELATED_TOKENS) -> tuple[Tensor, Tensor]:
    """Rows and positions of at most ``limit`` compared tokens, drawn by the batch's own seed: the same for
    both models, and again when a killed run resumes."""
    compared = outputs.compared.nonzero()
    if len(compared) > limit:
        order = torch.randperm(len(compared), generator=torch.Generator().manual_seed(outputs.seed))
        compared = compared[order[:limit].sort().values.to(compared.device)]
    rows, positions = compared.unbind(1)
    return rows, positions
