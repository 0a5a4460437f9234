"""y = x W^T for a packed weight and a few rows x: compiled, or in torch without a compiler.

With one row the product runs at memory bandwidth; a model's step (decode.py) uses the same C++ product.
"""

from __future__ import annotations

import ctypes
import os
from types import TracebackType

import torch
from torch import Tensor

from attar.kernels.build import warn_slower, why_missing
from attar.kernels.packed import PackedWeight, unpack
from attar.kernels.structures import library, linear_struct, raise_for

ACTIVATION_BITS = (8, 16)


class ThreadPool:
    """Threads for products. Use it in a ``with``, or ``close`` it.

    Args:
        threads: their number; None: ``default_threads()``.
    """

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads or default_threads()
        self._library = library()
        self._handle = None if self._library is None else self._library.attar_thread_pool(self.threads)
        raise_for(int(self._library is not None and self._handle is None), "threads for products")
        if self._library is None:
            why = why_missing("decode")
            warn_slower(f"products of packed weights run in torch, slower than compiled: {why}")

    def __enter__(self) -> ThreadPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the threads."""
        if self._library is not None and self._handle is not None:
            self._library.attar_thread_pool_free(self._handle)
        self._handle = None

    def multiply(self, x: Tensor, packed: PackedWeight, *, bits: int = 16) -> Tensor:
        """y (T, N) float32 of x (T, K), any float type. Does not modify its inputs.

        Args:
            x: a row per token.
            packed: W (N, K).
            bits: 8 or 16. int4 and int8 weights multiply rows quantized to integers, a scale per group; bf16
                weights multiply bfloat16 or float32 rows.
        """
        assert bits in ACTIVATION_BITS, f"activations of {bits} bits"
        assert x.dim() == 2 and x.shape[1] == packed.columns, f"{tuple(x.shape)} times K = {packed.columns}"
        x = x.float().contiguous()
        if self._library is None or self._handle is None:
            return reference(x, packed)
        y = torch.empty(len(x), packed.rows)
        weight = ctypes.byref(linear_struct(packed))
        code = self._library.attar_multiply(self._handle, weight, x.data_ptr(), len(x), bits, y.data_ptr())
        raise_for(code, "a product")
        return y

    def read(self, data: Tensor) -> int:
        """Read uint8 ``data`` once with all threads, to measure memory bandwidth; the sum of its words.

        Raises:
            RuntimeError: there is no compiled library.
        """
        if self._library is None:
            raise RuntimeError("no compiled library")
        assert data.is_contiguous() and data.dtype == torch.uint8, f"{data.dtype}"
        return int(self._library.attar_read(self._handle, data.data_ptr(), len(data)))


def reference(x: Tensor, packed: PackedWeight) -> Tensor:
    """The same in torch, with rows that are not rounded."""
    return torch.nn.functional.linear(x.float(), unpack(packed), packed.bias)


def default_activation_bits() -> int:
    """Default bits of activations: 16 where the library multiplies and sums bytes in one instruction (VNNI,
    NEON's dot product), or where products are torch's; else 8.

    With such instructions a second plane of codes costs decode at batch 1 a few per cent, which memory
    bandwidth hides; without them arithmetic is the bound, and batches lose a third of their speed.
    """
    lib = library()
    return 16 if lib is None or lib.attar_dot_products() else 8


def default_threads() -> int:
    """``OMP_NUM_THREADS``, or one per processor that this process may use."""
    value = os.environ.get("OMP_NUM_THREADS", "")
    if value.isdigit() and int(value) > 0:
        return int(value)
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1
