"""y = x W^T for a packed weight and a few rows x: compiled, or in torch where there is no compiler.

A matrix of one row is read at the memory's speed; the whole step of a model (decode.py) calls the same
product from C++.
"""

from __future__ import annotations

import ctypes
import os
from types import TracebackType

import torch
from torch import Tensor

from attar.kernels.build import missing, slower
from attar.kernels.packed import Packed, unpack
from attar.kernels.structures import library, linear, raise_for

ACTIVATION_BITS = (8, 16)


class Team:
    """Threads that wait for products. Use it in a ``with``, or ``close`` it.

    Args:
        threads: how many; None: what ``OMP_NUM_THREADS`` says, or one for each processor that may be used.
    """

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads or default_threads()
        self._library = library()
        self._handle = None if self._library is None else self._library.attar_team(self.threads)
        raise_for(int(self._library is not None and self._handle is None), "threads for products")
        if self._library is None:
            slower(f"products of packed weights run in torch, slower than compiled: {missing('decode')}")

    def __enter__(self) -> Team:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the threads."""
        if self._library is not None and self._handle is not None:
            self._library.attar_team_free(self._handle)
        self._handle = None

    def multiply(self, x: Tensor, packed: Packed, *, bits: int = 16) -> Tensor:
        """y (T, N) float32 of x (T, K), any float type. Does not modify its inputs.

        Args:
            x: a row for each token.
            packed: W (N, K).
            bits: 8 or 16. int4 and int8 weights take rows rounded to integers of so many, a scale for each
                group; bf16 weights take them in bfloat16 or float32.
        """
        assert bits in ACTIVATION_BITS, f"activations of {bits} bits"
        assert x.dim() == 2 and x.shape[1] == packed.columns, f"{tuple(x.shape)} times K = {packed.columns}"
        x = x.float().contiguous()
        if self._library is None or self._handle is None:
            return reference(x, packed)
        y = torch.empty(len(x), packed.rows)
        place = ctypes.byref(linear(packed))
        code = self._library.attar_multiply(self._handle, place, x.data_ptr(), len(x), bits, y.data_ptr())
        raise_for(code, "a product")
        return y

    def read(self, data: Tensor) -> int:
        """Reads uint8 ``data`` once with all threads, as fast as it goes; some number made of it.

        Raises:
            RuntimeError: there is no compiled library.
        """
        if self._library is None:
            raise RuntimeError("no compiled library")
        return int(self._library.attar_read(self._handle, data.data_ptr(), len(data)))


def reference(x: Tensor, packed: Packed) -> Tensor:
    """The same in torch: rows are not rounded, otherwise equal."""
    return torch.nn.functional.linear(x.float(), unpack(packed), packed.bias)


def usual_bits() -> int:
    """Bits of activations where nobody says: 16 where the library was compiled for a processor that
    multiplies bytes and sums them in one instruction (VNNI, NEON's dot product), or where products are
    torch's; else 8.

    There a second plane of codes costs a step that decodes one text a few per cent, which the memory hides;
    without such instructions arithmetic is the bound, and several texts lose a third of their speed.
    """
    found = library()
    return 16 if found is None or found.attar_dot_products() else 8


def default_threads() -> int:
    """What ``OMP_NUM_THREADS`` says, or one for each processor that this process may use."""
    said = os.environ.get("OMP_NUM_THREADS", "")
    if said.isdigit() and int(said) > 0:
        return int(said)
    able = getattr(os, "sched_getaffinity", None)
    return len(able(0)) if able else os.cpu_count() or 1
