"""The number type of a checkpoint's weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from attar.checkpoint import Checkpoint

KINDS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def stored_precision(checkpoint: Checkpoint) -> torch.dtype:
    """The floating-point type that holds most of a checkpoint's numbers (of a packed one: its scales and
    dense tensors)."""
    sizes = dict.fromkeys(KINDS, 0)
    for info in checkpoint.tensors.values():
        if info.dtype in sizes:
            sizes[info.dtype] += info.nbytes
    return KINDS[max(sizes, key=lambda name: sizes[name])]
