"""Bytes of a checkpoint, from its headers, and peak memory of this process.

On Linux the kernel keeps the high-water mark of the resident set (``VmHWM``) and resets it when 5 is written
to ``/proc/self/clear_refs``, so one long process can measure several pieces of work. Elsewhere the mark
covers the whole life of the process. Device memory is torch's own count.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from attar.checkpoint import Checkpoint
from attar.checkpoint.parts import count
from attar.measure.subject import Subject

CLEAR = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Size:
    """Bytes of the stored tensors, parameters of the dense model, and 8 * bytes / parameters.

    Scales and zero points are bytes but not parameters, so they add to the bits per weight.
    """

    bytes: int
    parameters: int
    bits_per_weight: float


def measure_size(subject: Checkpoint | Subject) -> Size:
    """The size of a checkpoint, or of a model in memory where there is none (tied weights count once)."""
    checkpoint = subject.checkpoint if isinstance(subject, Subject) else subject
    if checkpoint is not None:
        stored, parameters = checkpoint.nbytes, count(checkpoint).parameters
    else:
        assert isinstance(subject, Subject)
        tensors = list(subject.model.parameters())
        stored = sum(tensor.nbytes for tensor in tensors)
        parameters = sum(tensor.numel() for tensor in tensors)
    return Size(stored, parameters, 8 * stored / parameters if parameters else 0.0)


def reset_peak(device: str = "cpu") -> bool:
    """Reset the peaks; False where the system cannot, and later readings cover the life of the process."""
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device)
    try:
        CLEAR.write_text("5")
    except OSError:
        return False
    return True


def peak_device_bytes(device: str) -> int | None:
    """Peak memory that torch held on a CUDA device since the last reset; None on a CPU."""
    return int(torch.cuda.max_memory_allocated(device)) if device.startswith("cuda") else None
