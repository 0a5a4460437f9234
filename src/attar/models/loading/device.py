"""Where a model runs, its memory, and the type of its matrix products: bfloat16 where the device has fast
products of it, else float32.

oneDNN and torch emulate bfloat16 where the processor lacks it, two to a hundred times slower than float32.
What ``auto`` means is decided when a run begins and kept in its work folder: a resumed run continues in the
same type, on any machine, and ends in the same bytes.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from attar import memory
from attar.checkpoint.atomic import write_bytes
from attar.errors import SettingsError


def pick_device(wanted: str) -> torch.device:
    """The device of a setting: ``auto`` is this process's GPU where there is one, else the CPU.

    Raises:
        SettingsError: torch sees no such device here.
    """
    if wanted == "auto":
        local = os.environ.get("LOCAL_RANK", "0")  # set by accelerate launch, one process a GPU
        return torch.device(f"cuda:{local}") if torch.cuda.is_available() else torch.device("cpu")
    try:
        torch.empty(0, device=wanted)
    except (RuntimeError, AssertionError) as problem:  # torch asserts that it was built with CUDA
        allowed = "auto, cpu, or a device that torch sees here, such as cuda"
        raise SettingsError("device", wanted, allowed) from problem
    return torch.device(wanted)


def free_memory(device: torch.device) -> int:
    """Bytes that a device has free now; of the CPU, what this process can have without swapping."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return memory.free_memory()


@cache
def _malloc_trim() -> Any:
    try:
        return ctypes.CDLL("libc.so.6").malloc_trim
    except (OSError, AttributeError):  # not glibc
        return None


def trim_memory() -> None:
    """Return freed memory to the system, where the C library is glibc: it keeps it in pieces that the
    tensors of a next block do not fit into."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


PRECISION_FILE = "precision"
WITHOUT_BF16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI")
"""oneDNN's names of the instruction sets that have no bfloat16 products."""


def resolve(precision: str, device: torch.device, work: Path | None = None) -> str:
    """The type of a run's products: ``bf16`` or ``fp32``.

    Args:
        precision: of the settings: ``auto``, ``bf16`` or ``fp32``.
        work: folder of the run's states. The first call writes its decision there, later calls read it. None:
            nothing is kept.
    """
    if precision != "auto":
        return precision
    file = work / PRECISION_FILE if work is not None else None
    if file is not None and file.exists():
        return "bf16" if file.read_text() == "bf16" else "fp32"
    decided = "bf16" if has_bfloat16(device) else "fp32"
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(file, decided.encode())
    return decided


def has_bfloat16(device: torch.device) -> bool:
    """Whether bfloat16 products are faster than float32 ones here: any GPU, processors with AVX-512 BF16 or
    AMX, unless torch or oneDNN are limited to less (``ATEN_CPU_CAPABILITY``, ``ONEDNN_MAX_CPU_ISA``)."""
    if device.type != "cpu":
        return True
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", ""))
    wide = "AVX512" in torch.backends.cpu.get_cpu_capability()
    return wide and limit.upper() not in WITHOUT_BF16 and _onednn_has_bfloat16() and _native_bfloat16()


def _onednn_has_bfloat16() -> bool:
    return bool(getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)())


def _native_bfloat16() -> bool:
    is_supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return bool(is_supported()) if is_supported is not None else False


@contextmanager
def bf16_products(device: torch.device, enabled: bool = True) -> Iterator[None]:
    """Products inside the context are bfloat16, where enabled; everything else stays float32."""
    with torch.autocast(device.type, torch.bfloat16, enabled=enabled, cache_enabled=False):
        yield
