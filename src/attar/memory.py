"""How much memory this process has taken and may still take, and the refusal of what would need more.

The least of what the machine has without swapping, what the process's own limits leave (``ulimit -d``,
``ulimit -v``), and what its control group leaves: a container's limit, which the machine's figures do not
show.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from attar.checkpoint.units import bytes_text
from attar.errors import MemoryNeededError

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
STATUS = Path("/proc/self/status")


def free_memory(*, swap: bool = False) -> int:
    """Bytes that this process can have without swapping; with ``swap``, at all."""
    machine = int(psutil.virtual_memory().available) + (int(psutil.swap_memory().free) if swap else 0)
    return max(min([machine, *_limits_left(), *_groups_left()]), 0)


def peak_rss_bytes() -> int:
    """Peak resident memory in bytes; on Linux since the mark was reset (measure/footprint.py). There
    ``ru_maxrss`` is of no use: a process begins with its parent's."""
    with suppress(OSError):  # no /proc
        for line in STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, the others KiB


def check_memory(name: str, needed: float, *, hint: str, free: int | None = None) -> None:
    """Refuse what cannot fit.

    Args:
        needed: bytes that will be in memory at least.
        free: bytes that a device has free; None: what this process can have.

    Raises:
        MemoryNeededError: fewer are free; names both amounts.
    """
    kind = "memory" if free is None else "the device's memory"
    free = free_memory(swap=True) if free is None else free
    if needed > free:
        amounts = f"needs {bytes_text(needed)} of {kind} at least, and {bytes_text(free)} are free"
        raise MemoryNeededError(f"{name} {amounts}", hint=hint)


def _limits_left() -> Iterator[int]:
    """Of the limits of the process on its data and on its address space."""
    if sys.platform != "linux":
        return
    import resource

    pages = [int(field) for field in Path("/proc/self/statm").read_text().split()]
    for limit, used in ((resource.RLIMIT_DATA, pages[5]), (resource.RLIMIT_AS, pages[0])):
        soft = resource.getrlimit(limit)[0]
        if soft != resource.RLIM_INFINITY:
            yield soft - used * resource.getpagesize()


def _groups_left() -> Iterator[int]:
    """Of the control groups of this process and of those above it, of both versions."""
    with suppress(OSError):
        for line in MEMBERSHIP.read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if kinds == "":
                root, files = CGROUPS, ("memory.max", "memory.current", "inactive_file")
            elif "memory" in kinds.split(","):
                root = CGROUPS / "memory"
                files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            else:
                continue
            folder = root / path.lstrip("/")
            for group in (folder, *folder.parents):
                if not group.is_relative_to(root):
                    break
                yield from _group_left(group, *files)


def _group_left(group: Path, limit: str, usage: str, reclaimable: str) -> Iterator[int]:
    """What one group leaves: cached files that nobody reads count as free. Nothing without a limit."""
    with suppress(OSError, ValueError):  # no such file; "max"
        most, used = int((group / limit).read_text()), int((group / usage).read_text())
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        yield most - used + int(statistics.get(reclaimable, 0))
