"""float32 matrix products whose factors may be rounded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def reduced_products(enabled: bool = True) -> Iterator[None]:
    """Inside, where enabled, factors of float32 products may be rounded to bfloat16 (on a GPU: TF32); sums
    stay float32."""
    before = torch.get_float32_matmul_precision()
    if enabled:
        torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
