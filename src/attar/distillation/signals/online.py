"""The online signal: the teacher runs in every step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attar.data.examples import Examples
from attar.distillation.objectives import OBJECTIVES
from attar.distillation.objectives.chunked import LossAndGrad, blockwise
from attar.distillation.outputs import Intermediates, ModelOutputs, run_model
from attar.distillation.settings import LearnSettings
from attar.distillation.signals.aligned import aligned_signal
from attar.distillation.signals.target import Signal, SignalSource
from attar.models.head import Head, head_of


def online_signal(source: SignalSource, student: Any, settings: LearnSettings) -> Signal:
    """The settings' objective on the logits of both models."""
    if source.tokens.retokenizer is not None:
        return aligned_signal(source, student, settings)
    objective = partial(OBJECTIVES[settings.soft_loss], **vars(settings.loss))
    head, vocabulary = head_of(source.teacher), source.tokens.vocabulary
    return OnlineTeacher(source.teacher, objective, settings.temperature, head, vocabulary)


@dataclass(frozen=True)
class OnlineTeacher:
    """A teacher that runs for each batch.

    Attributes:
        objective: of the logits of both models.
        head: of the teacher, where its logits need not be made at once.
        vocabulary: columns of the logits that are compared; None: all that both have.
    """

    model: Any
    objective: LossAndGrad
    temperature: float
    head: Head | None = None
    vocabulary: int | None = None

    def target(self, batch: Examples, intermediates: Intermediates) -> OnlineTarget:
        """See :class:`attar.distillation.signals.target.Signal`."""
        with torch.no_grad():
            outputs = run_model(self.model, batch, intermediates, self.head)
        return OnlineTarget(outputs, self.objective, self.temperature, self.vocabulary)


@dataclass(frozen=True)
class OnlineTarget:
    """The teacher's outputs of a batch. Columns of logits beyond the vocabulary pad it, to a width that
    models differ in: they are part of no distribution, and receive no gradient."""

    outputs: ModelOutputs
    objective: LossAndGrad
    temperature: float
    vocabulary: int | None = None

    def loss_and_grad(self, z: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        """See :class:`attar.distillation.signals.target.SoftTarget`."""
        t = self.outputs.logits(part)
        width = min(t.shape[-1], z.shape[-1], self.vocabulary or t.shape[-1])
        values, _ = blockwise(
            self.objective, z[:, :width], t[:, :width], T=self.temperature, out=z[:, :width]
        )
        z[:, width:] = 0.0
        return values, z
