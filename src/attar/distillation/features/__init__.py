"""Features: ways to compare the insides of student and teacher. One file each, and the table of their names.

A feature is a function of the settings and both models that returns a :data:`FeatureLoss` and the projections
that it trains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from attar.distillation.outputs import Insides, ModelOutputs

FeatureLoss = Callable[[ModelOutputs, ModelOutputs, Mapping[str, nn.Module]], Tensor]
"""``loss(student, teacher, projections)``: a scalar, the mean over real tokens (or rows, or pairs)."""


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


FEATURES: dict[str, Callable[..., Any]] = {}
"""name -> function(student, teacher, settings, weight) -> Feature"""
