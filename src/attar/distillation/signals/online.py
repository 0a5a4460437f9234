"""The online signal: the teacher runs in every step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attar.data.examples import Examples
from attar.distillation.objectives import OBJECTIVES
from attar.distillation.objectives.chunked import Slopes, blockwise
from attar.distillation.outputs import Insides, ModelOutputs, run_model
from attar.distillation.settings import LearnSettings
from attar.distillation.signals.target import SignalSource
from attar.models.head import Head, head_of


def online_signal(source: SignalSource, student: Any, settings: LearnSettings) -> OnlineTeacher:
    """The settings' objective on the logits of both models."""
    slopes = partial(OBJECTIVES[settings.soft_loss], **vars(settings.loss))
    return OnlineTeacher(source.teacher, slopes, settings.temperature, head_of(source.teacher))


@dataclass(frozen=True)
class OnlineTeacher:
    """A teacher that runs for each batch.

    Attributes:
        objective: of the logits of both models.
        head: of the teacher, where its logits need not be made at once.
    """

    model: Any
    objective: Slopes
    temperature: float
    head: Head | None = None

    def target(self, batch: Examples, insides: Insides) -> OnlineTarget:
        """See :class:`attar.distillation.signals.target.Signal`."""
        with torch.no_grad():
            outputs = run_model(self.model, batch, insides, self.head)
        return OnlineTarget(outputs, self.objective, self.temperature)


@dataclass(frozen=True)
class OnlineTarget:
    """The teacher's outputs of a batch. Vocabularies padded to different widths are compared over the common
    part."""

    outputs: ModelOutputs
    objective: Slopes
    temperature: float

    def slopes(self, z: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        """See :class:`attar.distillation.signals.target.SoftTarget`."""
        t = self.outputs.logits(part)
        width = min(t.shape[-1], z.shape[-1])
        values, _ = blockwise(
            self.objective, z[:, :width], t[:, :width], T=self.temperature, out=z[:, :width]
        )
        z[:, width:] = 0.0
        return values, z
