"""What a signal gives for a batch: the teacher's predictions, and its intermediates where it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from attar.checkpoint.open import Checkpoint
from attar.data.examples import Examples
from attar.distillation.outputs import Intermediates, ModelOutputs
from attar.distillation.signals.alignment.route import TokenizerPair
from attar.progress import SILENT, Progress


@dataclass(frozen=True)
class SignalSource:
    """The inputs of a signal.

    Attributes:
        teacher: the model, gives ``.logits``; None: the text alone teaches.
        cache: folder of its stored predictions; several stages may share it.
        tokens: what the tokenizers of both have in common.
        rows: all that will be learned from and measured on, as far as they are known.
    """

    teacher: Any
    checkpoint: Checkpoint | None
    cache: Path
    work: Path
    tokens: TokenizerPair = field(default_factory=TokenizerPair)
    rows: Sequence[Examples] = ()
    progress: Progress = SILENT


class SoftTarget(Protocol):
    """A teacher's answer to a batch. A target with ``unchunked = True`` gets all predictions at once."""

    @property
    def outputs(self) -> ModelOutputs | None:
        """Of the teacher; None where it did not run."""

    def loss_and_grad(self, z: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        """The soft loss of each of some predictions, and its gradient.

        Args:
            z: the student's logits (c, V), of any float type; may be overwritten.
            part: which of the batch's n predictions they belong to.

        Returns:
            values (c,) and dz (c, V), see :mod:`attar.distillation.objectives.chunked`.
        """


class Signal(Protocol):
    """A source of targets."""

    def target(self, batch: Examples, intermediates: Intermediates) -> SoftTarget:
        """The target of a batch on the student's device, without gradients.

        Args:
            intermediates: of the teacher that features need.
        """
