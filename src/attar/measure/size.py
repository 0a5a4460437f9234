"""How big a checkpoint is: from its headers, whatever its size.

A packed weight counts as the weight it stands for: ``weight_shape`` (two numbers, the only thing read beside
the headers) says how large that is. Scales, zero points and the like are bytes but no parameters, so they
make the bits of a weight more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from attar.checkpoint import Checkpoint
from attar.measure.subject import Subject

PACKED, SHAPE = "weight_packed", "weight_shape"
BESIDE = (
    "weight_scale", "weight_zero_point", "weight_g_idx", "weight_global_scale",
    "input_scale", "input_zero_point", "input_global_scale", "output_scale", "k_scale", "v_scale", SHAPE,
)  # fmt: skip
"""Last parts of tensor names, in compressed-tensors' words, that describe a weight and are none."""


@dataclass(frozen=True)
class Size:
    """Bytes of the stored tensors, parameters of the model they stand for, and 8 * bytes / parameters."""

    bytes: int
    parameters: int
    bits_per_weight: float


def measure_size(subject: Checkpoint | Subject) -> Size:
    """The size of a checkpoint, or of a model in memory where there is none."""
    checkpoint = subject.checkpoint if isinstance(subject, Subject) else subject
    if checkpoint is not None:
        return _size(checkpoint.nbytes, sum(_parameters(checkpoint, name) for name in checkpoint.tensors))
    assert isinstance(subject, Subject)
    tensors = list(subject.model.parameters())
    return _size(sum(tensor.nbytes for tensor in tensors), sum(tensor.numel() for tensor in tensors))


def _parameters(checkpoint: Checkpoint, name: str) -> int:
    """Parameters that one stored tensor stands for."""
    base, _, leaf = name.rpartition(".")
    if leaf == PACKED:
        return math.prod(checkpoint.load(f"{base}.{SHAPE}").tolist())
    return 0 if leaf in BESIDE else math.prod(checkpoint.tensors[name].shape)


def _size(count: int, parameters: int) -> Size:
    return Size(count, parameters, 8 * count / parameters if parameters else 0.0)
