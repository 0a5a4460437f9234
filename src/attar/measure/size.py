"""How big a checkpoint is: from its headers, whatever its size."""

from __future__ import annotations

from dataclasses import dataclass

from attar.checkpoint import Checkpoint
from attar.checkpoint.parts import count
from attar.measure.subject import Subject


@dataclass(frozen=True)
class Size:
    """Bytes of the stored tensors, parameters of the model they stand for, and 8 * bytes / parameters.

    Scales, zero points and the like are bytes but no parameters, so they make the bits of a weight more.
    """

    bytes: int
    parameters: int
    bits_per_weight: float


def measure_size(subject: Checkpoint | Subject) -> Size:
    """The size of a checkpoint, or of a model in memory where there is none (tied weights once)."""
    checkpoint = subject.checkpoint if isinstance(subject, Subject) else subject
    if checkpoint is not None:
        return _size(checkpoint.nbytes, count(checkpoint).parameters)
    assert isinstance(subject, Subject)
    tensors = list(subject.model.parameters())
    return _size(sum(tensor.nbytes for tensor in tensors), sum(tensor.numel() for tensor in tensors))


def _size(stored: int, parameters: int) -> Size:
    return Size(stored, parameters, 8 * stored / parameters if parameters else 0.0)
