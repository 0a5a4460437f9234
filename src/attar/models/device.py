"""Where a model runs."""

from __future__ import annotations

import os

import psutil
import torch

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
    """Bytes that a device has free now; of the CPU, what can be had without swapping."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)
