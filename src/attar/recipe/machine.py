"""The machine of a run, for run.json, and its speed, for estimates."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "compressed-tensors", "safetensors", "tokenizers", "accelerate", "numpy")
"""The packages that a run's results depend on."""


def machine() -> dict[str, Any]:
    """Processor, cores, memory and system; the GPU if torch is loaded and has one."""
    description = {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu(),
        "cores": _cores(),
        "memory_bytes": memory_bytes(),
    }
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        description["gpu"] = torch.cuda.get_device_name()
    return description


def memory_bytes() -> int | None:
    """Memory of the machine, or None if unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


@dataclass(frozen=True)
class Rates:
    """The speed of this machine, per second.

    Attributes:
        products: floating-point operations of float32 matrix products, on all processors of this process.
        elements: numbers that an element-wise operation reads and writes.
        calls: sequential operations on a few hundred numbers, as solvers do column by column.
    """

    products: float
    elements: float
    calls: float


def measure_rates(seconds: float = 0.1) -> Rates:
    """Measure each rate for ``seconds`` with numpy: plans import no torch.

    Products small enough for one thread are measured and multiplied by the number of threads: on a busy
    machine, threads that wait for each other vary by a factor of 100.
    """
    import numpy as np

    size = 64
    matrix = np.full((size, size), 0.5, dtype=np.float32)
    many, few = np.full(1 << 20, 0.5, dtype=np.float32), np.full(256, 0.5, dtype=np.float32)
    result, product = np.empty_like(many), np.empty_like(matrix)
    per_thread = (
        2.0 * size**3 * _per_second(lambda: np.matmul(matrix, matrix, out=product), seconds, repeat=20)
    )
    alone = free_share(1)
    return Rates(
        per_thread * threads() * free_share(threads()),
        many.size * _per_second(lambda: np.exp(many, out=result), seconds) * alone,
        _per_second(lambda: np.add(few, few), seconds, repeat=100) * alone,
    )


def load() -> float:
    """Threads that wanted a processor in the last minute, in the mean; 0 where the system does not say."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def free_share(wanted: int) -> float:
    """The share of its time that each of ``wanted`` threads gets a processor, beside other work."""
    return min(1.0, _cores() / (load() + wanted))


def threads() -> int:
    """The number of threads that torch will use: ``OMP_NUM_THREADS``, or one for each processor."""
    wanted = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(wanted) if wanted.isdigit() and int(wanted) else _cores()


def _per_second(work: Callable[[], object], seconds: float, repeat: int = 1) -> float:
    """Repetitions per second, by the fastest try."""
    work()  # starts threads
    tries: list[float] = []
    begun = time.perf_counter()
    while len(tries) < 5 or time.perf_counter() - begun < seconds:
        start = time.perf_counter()
        for _ in range(repeat):
            work()
        tries.append((time.perf_counter() - start) / repeat)
    return 1 / min(tries)


def _cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"
