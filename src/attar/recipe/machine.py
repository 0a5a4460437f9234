"""What a run ran on, for run.json; and how fast the machine multiplies, for estimates."""

from __future__ import annotations

import os
import platform
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = (
    "attar",
    "torch",
    "transformers",
    "compressed-tensors",
    "safetensors",
    "tokenizers",
    "accelerate",
    "numpy",
)


def machine() -> dict[str, Any]:
    """Processor, cores, memory and system; the GPU where torch is loaded and has one."""
    found = {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": memory_bytes(),
    }
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def versions() -> dict[str, str]:
    """Version of Python and of the packages whose results a run depends on."""
    return {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES}


def memory_bytes() -> int | None:
    """Memory of the machine, or None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def multiply_rate(size: int = 512, seconds: float = 0.05) -> float:
    """Floating-point operations per second of float32 matrix products, measured in a blink."""
    import numpy as np

    matrix = np.full((size, size), 0.5, dtype=np.float32)
    np.matmul(matrix, matrix)  # the first product starts the threads
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        np.matmul(matrix, matrix)
        count += 1
    return 2.0 * size**3 * count / (time.perf_counter() - start)


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        if package == "attar":
            from attar import __version__

            return __version__
        return "not installed"
