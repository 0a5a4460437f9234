"""The loss of distillation: what the predictions and the intermediates of student and teacher differ by.

    w (alpha soft(teacher, student) + (1 - alpha) cross-entropy) + sum of w_f feature_f(teacher, student)
      + the routers' losses, in training, where the student is a mixture (router_loss.py)

The soft loss is an objective (``objectives/``) on what a signal (``signals/``) knows of the teacher; features
are in ``features/``. All are means over the predictions (features: over real tokens, or as they say).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attar.data.examples import Examples
from attar.distillation.features.feature import Feature
from attar.distillation.learner import projections_of
from attar.distillation.objectives import hard
from attar.distillation.objectives.chunked import ChunkLoss, blockwise
from attar.distillation.outputs import Intermediates, run_model
from attar.distillation.router_loss import RouterLoss
from attar.distillation.signals.target import Signal, SoftTarget
from attar.models.head import Head


@dataclass(frozen=True)
class DistillationLoss:
    """A loss for the train walk, see :data:`attar.walks.objectives.Loss`.

    Attributes:
        signal: None: cross-entropy alone.
        alpha: weight of the soft loss; without a signal it counts as 0.
        head: of the student, where its logits need not be made at once.
        weight: of the predictions besides the features.
        routers: of the student; None: no loss of theirs.
    """

    signal: Signal | None
    alpha: float = 1.0
    features: Sequence[Feature] = ()
    head: Head | None = None
    weight: float = 1.0
    routers: RouterLoss | None = None

    @property
    def partial(self) -> bool:
        """Whether it leaves parameters without a gradient: those after the last feature."""
        return not self.weight

    def __call__(self, model: Any, batch: Examples) -> Tensor:
        intermediates = Intermediates.all_of(feature.intermediates for feature in self.features)
        target = None if self.signal is None else self.signal.target(batch, intermediates)
        unchunked = getattr(target, "unchunked", False)
        routed = self.routers if torch.is_grad_enabled() else None  # held-out losses compare predictions
        recording: AbstractContextManager[list[Tensor]] = routed.recording() if routed else nullcontext([])
        with recording as logits:
            student = run_model(model, batch, intermediates, None if unchunked else self.head)
        total = torch.zeros((), dtype=torch.float32, device=student.mask.device)
        if self.weight:
            total = self.weight * student.mean(self._chunk_loss(target, batch.labels), unchunked=unchunked)
        with torch.autocast(student.mask.device.type, enabled=False):  # small, and differences of large sums
            for feature in self.features:
                assert target is not None and target.outputs is not None, "features need a teacher that runs"
                total = total + feature.weight * feature.loss(student, target.outputs, projections_of(model))
        if routed is not None:
            total = total + routed.loss(logits, student.mask.flatten())
        return total

    def _chunk_loss(self, target: SoftTarget | None, labels: Tensor) -> ChunkLoss:
        """alpha * soft + (1 - alpha) * hard of some predictions, with labels (n,)."""
        alpha = 0.0 if target is None else self.alpha

        def chunk_loss(z: Tensor, part: slice) -> tuple[Tensor, Tensor]:
            if target is None or not alpha:
                return blockwise(hard.loss_and_grad, z, labels[part], out=z)
            if alpha == 1.0:
                return target.loss_and_grad(z, part)
            values, dz = blockwise(hard.loss_and_grad, z, labels[part])
            soft_values, soft_dz = target.loss_and_grad(z, part)
            return torch.lerp(values, soft_values, alpha), dz.lerp_(soft_dz, alpha)

        return chunk_loss
