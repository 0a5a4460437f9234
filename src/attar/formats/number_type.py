"""The number type of a checkpoint's dense weights, for layouts that do not say in which type they decode."""

from __future__ import annotations

from typing import Any

import torch

from attar.checkpoint.tensors import TORCH

FLOATS = ("F64", "F32", "F16", "BF16")


def weight_dtype(checkpoint: Any) -> torch.dtype:
    """What config.json names as ``dtype`` (older files: ``torch_dtype``); else the type of most stored bytes
    of numbers; bfloat16 where there are none."""
    for key in ("dtype", "torch_dtype"):
        found = getattr(torch, str(checkpoint.config.get(key)).removeprefix("torch."), None)
        if isinstance(found, torch.dtype):
            return found
    stored = dict.fromkeys(FLOATS, 0)
    for info in checkpoint.tensors.values():
        if info.dtype in stored:
            stored[info.dtype] += info.nbytes
    most = max(stored, key=lambda kind: stored[kind])
    return getattr(torch, TORCH[most]) if stored[most] else torch.bfloat16  # type: ignore[no-any-return]
