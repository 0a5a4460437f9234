"""What a signal gives for a batch: the teacher's predictions, and its insides where it runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from attar.data.examples import Examples
from attar.distillation.outputs import Insides, ModelOutputs

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


class SoftTarget(Protocol):
    """A teacher's answer to a batch."""

    @property
    def outputs(self) -> ModelOutputs | None:
        """Of the teacher; None where it did not run."""

    def slopes(self, z: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        """The soft loss of each of some predictions, and its gradient.

        Args:
            z: the student's logits (c, V), of any float type; may be overwritten.
            part: which of the batch's n predictions they belong to.

        Returns:
            values (c,) and dz (c, V), see :mod:`attar.distillation.objectives.chunked`.
        """


class Signal(Protocol):
    """A source of targets."""

    def target(self, batch: Examples, insides: Insides) -> SoftTarget:
        """The target of a batch on the student's device, without gradients.

        Args:
            insides: of the teacher that features need.
        """
