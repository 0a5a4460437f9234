"""The online signal: the teacher runs in every step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attar.distillation.settings import LearnSettings
from attar.walks.objectives import Objective, SoftLoss, soft_loss

if TYPE_CHECKING:
    from attar.checkpoint import Checkpoint


@dataclass(frozen=True)
class SignalSource:
    """The inputs of a signal.

    Attributes:
        teacher: the model, gives ``.logits``; None: the text alone teaches.
        cache: folder of its stored predictions; several stages may share it.
    """

    teacher: Any
    checkpoint: Checkpoint | None
    cache: Path
    work: Path


def online_signal(
    source: SignalSource, student: Any, settings: LearnSettings, objective: Objective
) -> SoftLoss:
    """The objective on the logits of both models, at the temperature of the settings."""
    return soft_loss(source.teacher, settings.temperature, objective)
