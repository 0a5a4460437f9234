"""The online signal: the teacher runs in every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attar.data.examples import Examples
from attar.distillation.objectives import OBJECTIVES
from attar.distillation.outputs import Insides, ModelOutputs, run_model
from attar.distillation.settings import LearnSettings
from attar.distillation.signals.target import SignalSource
from attar.walks.objectives import Objective


def online_signal(source: SignalSource, student: Any, settings: LearnSettings) -> OnlineTeacher:
    """The settings' objective on the logits of both models."""
    return OnlineTeacher(source.teacher, OBJECTIVES[settings.soft_loss], settings.temperature)


@dataclass(frozen=True)
class OnlineTeacher:
    """A teacher that runs for each batch."""

    model: Any
    objective: Objective
    temperature: float

    def target(self, batch: Examples, insides: Insides) -> OnlineTarget:
        """See :class:`attar.distillation.signals.target.Signal`."""
        with torch.no_grad():
            outputs = run_model(self.model, batch, insides)
        return OnlineTarget(outputs, self.objective, self.temperature)


@dataclass(frozen=True)
class OnlineTarget:
    """The teacher's outputs of a batch. Vocabularies padded to different widths are compared over the common
    part."""

    outputs: ModelOutputs
    objective: Objective
    temperature: float

    def soft_loss(self, logits: Tensor) -> Tensor:
        """See :class:`attar.distillation.signals.target.SoftTarget`."""
        teacher = self.outputs.logits
        width = min(teacher.shape[-1], logits.shape[-1])
        return self.objective(logits[:, :width], teacher[:, :width], self.temperature)
