"""The nearest path on a trellis: tensors in, tensors out.

csrc/trellis.cpp describes the search. Without a compiler it runs in torch, here, with the same result but for
paths of the same length.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from attar.kernels.build import load, warn_slower, why_missing

STATES = 1 << 16
LENGTH = 256  # numbers of a tile
AROUND = 64  # numbers on each side of the seam that decide where a ring begins: 128 gain 0.2 % of the error
TILES = 16  # at a time, in torch


def nearest_paths(numbers: Tensor, values: Tensor, bits: int) -> Tensor:
    """The states, int64 (T, 256), of the ring whose values are nearest to each tile; modifies nothing.

    Args:
        numbers: (T, 256) float32.
        values: (65536,) float32, of the states.
        bits: of a step, 1 to 8.
    """
    function = _kernel() if numbers.device.type == "cpu" else None
    if function is None:
        return torch.cat([_in_torch(part, values, bits) for part in numbers.split(TILES)])
    numbers, values = numbers.contiguous(), values.contiguous()
    assert numbers.dtype == values.dtype == torch.float32 and numbers.shape[1] == LENGTH
    paths = torch.empty(numbers.shape, dtype=torch.int16)
    shape = (len(numbers), bits, AROUND, torch.get_num_threads())
    failed = function(values.data_ptr(), numbers.data_ptr(), *shape, paths.data_ptr())
    assert failed != 2, f"{bits} bits"
    if failed:
        raise MemoryError("the search on a trellis")
    return paths.to(torch.int64) & (STATES - 1)


def _kernel() -> Any:
    """The C function, with the types of its arguments; None: there is none."""
    library = load("trellis")
    if library is None:
        warn_slower(f"a trellis is searched in torch, which is slower: {why_missing('trellis')}")
        return None
    function = library.attar_trellis_search
    pointer, long, integer = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    function.argtypes = [pointer, pointer, long, integer, integer, integer, pointer]
    function.restype = integer
    return function


def _in_torch(numbers: Tensor, values: Tensor, bits: int) -> Tensor:
    nodes = STATES >> bits
    seam = numbers.roll(AROUND, 1)[:, : 2 * AROUND]
    costs, branches = _forward(seam, values, bits, torch.zeros(len(numbers), nodes, device=numbers.device))
    middle = _back(branches[AROUND:], costs.argmin(1), bits)[0]
    start = torch.full_like(costs, torch.inf).scatter_(1, middle[:, None], 0.0)
    _, branches = _forward(numbers, values, bits, start)
    return _back(branches, middle, bits)[1]


def _forward(numbers: Tensor, values: Tensor, bits: int, costs: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The cost of the best path to each node (T, nodes), and the high bits of its last state at each step."""
    table, branches = values.view(1 << bits, -1), []
    for number in numbers.T:
        before = costs.view(len(costs), 1 << bits, -1).repeat_interleave(1 << bits, 2)
        best, branch = torch.full_like(costs, torch.inf), torch.zeros_like(costs, dtype=torch.uint8)
        for high in range(1 << bits):
            cost = before[:, high] + (table[high] - number[:, None]).square()
            branch = torch.where(cost < best, high, branch)
            best = torch.minimum(cost, best)
        costs = best
        branches.append(branch)
    return costs, branches


def _back(branches: list[Tensor], node: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The node (T,) before the first step of the path that ends in a node, and its states (T, steps)."""
    path = []
    for branch in reversed(branches):
        high = branch.gather(1, node[:, None])[:, 0].to(torch.int64)
        path.append(high * branch.shape[1] + node)
        node = path[-1] >> bits
    return node, torch.stack(path[::-1], 1)
