"""Peak memory of this process, in bytes.

On Linux the kernel keeps the high-water mark of the resident set (``VmHWM``) and lets a process set it back
by writing 5 to ``/proc/self/clear_refs``, so that one long process can measure several pieces of work.
Elsewhere the mark is that of the whole life of the process. Device memory is torch's own count.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

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
