"""The compiled planes of ggml's blocks, and a histogram of bytes.

attar/formats/gguf/planes.py has the formula of the planes, and the same in torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attar.kernels.build import load

Numbers = Sequence[tuple[int, int, int, int]]
"""Of each plane its first byte, bits, run and shift."""


def join(out: Tensor, planes: Numbers, codes: Tensor) -> bool:
    """Write codes (B, n), uint8, contiguous, into the blocks ``out`` (B, bytes), whose rows may lie apart.
    False: there is no library, or a tensor is not on the CPU."""
    function = _function("attar_planes_join", out, codes)
    if function is None:
        return False
    numbers = torch.tensor(planes, dtype=torch.int32)
    shape = len(numbers), codes.shape[0], codes.shape[1]
    function(numbers.data_ptr(), *shape, codes.data_ptr(), out.data_ptr(), out.stride(0))
    return True


def cut(blocks: Tensor, planes: Numbers, codes: Tensor) -> bool:
    """The inverse: fill codes (B, n)."""
    function = _function("attar_planes_cut", blocks, codes)
    if function is None:
        return False
    numbers = torch.tensor(planes, dtype=torch.int32)
    shape = len(numbers), codes.shape[0], codes.shape[1]
    function(numbers.data_ptr(), *shape, blocks.data_ptr(), blocks.stride(0), codes.data_ptr())
    return True


def histogram(octets: Tensor) -> Tensor | None:
    """How often each of the 256 bytes occurs in uint8, contiguous: int64 (256,); None without a library."""
    library = load("planes") if octets.device.type == "cpu" else None
    if library is None:
        return None
    assert octets.is_contiguous()
    counts = torch.zeros(256, dtype=torch.int64)
    function = library.attar_histogram
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p], None
    function(octets.data_ptr(), octets.numel(), counts.data_ptr())
    return counts


def _function(name: str, blocks: Tensor, codes: Tensor) -> Any:
    library = load("planes") if blocks.device.type == codes.device.type == "cpu" else None
    if library is None:
        return None
    assert blocks.stride(1) == 1 and codes.is_contiguous()
    function = getattr(library, name)
    pointer, long, whole = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    last = [pointer, long] if name == "attar_planes_join" else [long, pointer]
    function.argtypes = [pointer, whole, long, long, pointer, *last]
    function.restype = None
    return function
