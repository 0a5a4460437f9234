"""How big a checkpoint is: from its headers, whatever its size."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

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


STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")


def reset_peak(device: str = "cpu") -> bool:
    """Forget the peak so far; False where the system cannot: later readings are then of the whole life."""
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device)
    try:
        CLEAR.write_text("5")
    except OSError:
        return False
    return True


def peak_rss_bytes() -> int:
    """The most resident memory since the last reset, in bytes."""
    try:
        for line in STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # no /proc: ask the C library
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, the others KiB


def peak_device_bytes(device: str) -> int | None:
    """The most memory torch held on a CUDA device since the last reset; None on a CPU."""
    return int(torch.cuda.max_memory_allocated(device)) if device.startswith("cuda") else None
