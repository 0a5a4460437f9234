"""The loss of distillation: what the predictions and the insides of student and teacher differ by.

    alpha * soft(teacher, student) + (1 - alpha) * cross-entropy + sum of w_f * feature_f(teacher, student)

The soft loss is an objective (``objectives/``) on what a signal (``signals/``) knows of the teacher; features
are in ``features/``. All are means over the predictions (features: over real tokens, or as they say).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attar.data.examples import Examples
from attar.distillation.features import Feature
from attar.distillation.learner import projections_of
from attar.distillation.outputs import Insides, run_model
from attar.distillation.signals.target import Signal


@dataclass(frozen=True)
class DistillationLoss:
    """A loss for the train walk, see :data:`attar.walks.objectives.Loss`.

    Attributes:
        signal: None: cross-entropy alone.
        alpha: weight of the soft loss; without a signal it counts as 0.
    """

    signal: Signal | None
    alpha: float = 1.0
    features: Sequence[Feature] = field(default=())

    def __call__(self, model: Any, batch: Examples) -> Tensor:
        insides = Insides(
            states=any(feature.insides.states for feature in self.features),
            attentions=any(feature.insides.attentions for feature in self.features),
        )
        alpha = 0.0 if self.signal is None else self.alpha
        student = run_model(model, batch, insides)
        target = None if self.signal is None else self.signal.target(batch, insides)
        total = torch.zeros((), dtype=torch.float32, device=student.logits.device)
        if target is not None and alpha > 0.0:
            total = total + alpha * target.soft_loss(student.logits)
        if alpha < 1.0:
            total = total + (1.0 - alpha) * F.cross_entropy(student.logits.float(), batch.labels)
        for feature in self.features:
            assert target is not None and target.outputs is not None, "features need a teacher that runs"
            total = total + feature.weight * feature.loss(student, target.outputs, projections_of(model))
        return total
