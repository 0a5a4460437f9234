"""Bit planes of ggml's blocks, compiled, and a histogram of bytes.

attar/formats/gguf/planes.py has the formula, and the same in torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attar.kernels.build import load

PlaneTable = Sequence[tuple[int, int, int, int]]
"""First byte, bits, run and shift of each plane."""


def join(out: Tensor, planes: PlaneTable, codes: Tensor) -> bool:
    """Write codes (B, n), uint8, contiguous, into the blocks ``out`` (B, bytes), rows with any stride.
    False: there is no library, or a tensor is not on the CPU."""
    function = _function("attar_planes_join", out, codes, planes)
    if function is None:
        return False
    numbers = torch.tensor(planes, dtype=torch.int32)
    shape = len(numbers), codes.shape[0], codes.shape[1]
    function(numbers.data_ptr(), *shape, codes.data_ptr(), out.data_ptr(), out.stride(0))
    return True


def cut(blocks: Tensor, planes: PlaneTable, codes: Tensor) -> bool:
    """The inverse: fill codes (B, n)."""
    function = _function("attar_planes_cut", blocks, codes, planes)
    if function is None:
        return False
    numbers = torch.tensor(planes, dtype=torch.int32)
    shape = len(numbers), codes.shape[0], codes.shape[1]
    function(numbers.data_ptr(), *shape, blocks.data_ptr(), blocks.stride(0), codes.data_ptr())
    return True


def histogram(octets: Tensor) -> Tensor | None:
    """Counts of the 256 byte values in contiguous uint8: int64 (256,); None without a library."""
    library = load("planes") if octets.device.type == "cpu" else None
    if library is None:
        return None
    assert octets.is_contiguous()
    counts = torch.zeros(256, dtype=torch.int64)
    function = library.attar_histogram
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p], None
    function(octets.data_ptr(), octets.numel(), counts.data_ptr())
    return counts


def _function(name: str, blocks: Tensor, codes: Tensor, planes: PlaneTable) -> Any:
    library = load("planes") if blocks.device.type == codes.device.type == "cpu" else None
    if library is None:
        return None
    assert blocks.stride(1) == 1 and codes.is_contiguous()
    assert blocks.dtype == codes.dtype == torch.uint8 and len(blocks) == len(codes), "other blocks"
    for at, bits, run, shift in planes:
        assert at >= 0 and bits in (1, 2, 4, 8) and run > 0 and 0 <= shift < 8, f"a plane of {bits} bits"
        end = at + codes.shape[1] // (run * 8 // bits) * run
        assert end <= blocks.shape[1], f"a plane ends at byte {end} of {blocks.shape[1]}"
    function = getattr(library, name)
    pointer, long, integer = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    last = [pointer, long] if name == "attar_planes_join" else [long, pointer]
    function.argtypes = [pointer, integer, long, long, pointer, *last]
    function.restype = None
    return function
