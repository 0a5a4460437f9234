"""The compiled search for the scales of llama.cpp's block formats: tensors in, tensors out.

The algorithm is told in csrc/ggml_search.cpp. It is that of attar/quantization/grids/ggml_search.py with more
trials, and its error is lower; where there is no compiler, that file is the fallback.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from attar.errors import NumericsError
from attar.kernels.build import load, missing, slower
from attar.kernels.threads import one_thread

EFFORT = 4  # codes of scales tried to either side; benchmarks/ggml_search.py prints what each is worth
CHUNK = 1 << 20  # weights converted to float32 at a time
ROWS = 16  # rows that the kernel takes at a time, at most


class Layout(Protocol):
    """What this room needs to know of a format: attar.quantization.grids.ggml_search.GGMLLayout."""

    @property
    def block(self) -> int:
        """Weights that share d."""

    @property
    def tile(self) -> int:
        """Weights that share a scale."""

    @property
    def low(self) -> int:
        """Smallest code."""

    @property
    def minimum(self) -> bool:
        """Tiles have a minimum."""

    @property
    def codes(self) -> tuple[int, int] | None:
        """Ends of c - k; None: one level of scales."""

    @property
    def bias(self) -> int:
        """k."""


@dataclass(frozen=True)
class Found:
    """What the search ends with, for a weight (N, K).

    Attributes:
        stored: what the file holds, by name, as ``TileParameters.stored`` of a GGMLGrid has it.
        codes: (N, K), int8 for Q8_0 and uint8 for the others, those that the grid's ``encode`` gives; None
            where they were not asked for.
    """

    stored: dict[str, Tensor]
    codes: Tensor | None


def search(
    kind: str,
    layout: Layout,
    weight: Tensor,
    v: Tensor,
    *,
    shrink: Tensor | None = None,
    codes: bool = False,
    effort: int = EFFORT,
) -> Found | None:
    """Scales of least error of a weight, and its nearest codes; None where the fallback has to do it: no
    compiled kernel, or a weight that is not on the CPU. Does not modify its inputs.

    Args:
        kind: the format's name.
        layout: what it stores; its block divides K.
        weight: (N, K), any float type.
        v: (K,) float32, at least 0, the importance of each input's squared error.
        shrink: (N, K / tile), each tile is clipped to this part of its range first; None: nothing is clipped.
        codes: also return codes, of the weights as clipped.
        effort: how many codes of scales and minimums are tried to either side of those that are nearest.

    Raises:
        NumericsError: a weight or an importance is not finite.
    """
    kernel = _kernel() if weight.device.type == "cpu" else None
    if kernel is None:
        return None
    if not torch.isfinite(v).all():
        raise NumericsError("an importance is not finite")
    found = _empty(layout, weight.shape[0], weight.shape[1], codes)
    v = v.float().contiguous()
    clip = None if shrink is None else shrink.float().contiguous()
    for rows, part in _float32(weight.detach()):
        places = [None if value is None else value[rows].data_ptr() for value in (clip, *_outputs(found))]
        shape = (part.shape[0], part.shape[1], effort, torch.get_num_threads())
        failed = kernel(kind.encode(), part.data_ptr(), v.data_ptr(), *shape, *places)
        assert failed != 2, f"{kind} for {tuple(part.shape)}"
        if failed == 3:
            raise MemoryError("the search for scales")
        if failed:
            raise NumericsError("a weight is not finite", hint="look for NaN and infinity in the checkpoint")
    return found


def _kernel() -> Callable[..., int] | None:
    """The C function, with the types of its arguments."""
    library = load("ggml_search")
    if library is None:
        why = missing("ggml_search")
        slower(f"scales are searched in torch: slower than compiled, and with more error: {why}")
        return None
    function: Any = library.attar_ggml_search
    pointer, long, whole = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    function.argtypes = [ctypes.c_char_p, pointer, pointer, long, long, whole, whole, *[pointer] * 6]
    function.restype = whole
    return function  # type: ignore[no-any-return]


def _empty(layout: Layout, rows: int, columns: int, codes: bool) -> Found:
    """Room for what the search ends with."""
    blocks, tiles = (rows, columns // layout.block), (rows, columns // layout.tile)
    stored = {"d": torch.empty(blocks, dtype=torch.float16)}
    if layout.minimum:
        stored["m" if layout.codes is None else "dmin"] = torch.empty(blocks, dtype=torch.float16)
    if layout.codes is not None:
        signed = layout.codes[0] + layout.bias < 0
        stored["scale_codes"] = torch.empty(tiles, dtype=torch.int8 if signed else torch.uint8)
        if layout.minimum:
            stored["minimum_codes"] = torch.empty(tiles, dtype=torch.uint8)
    kept = torch.int8 if layout.low < 0 else torch.uint8
    return Found(stored, torch.empty(rows, columns, dtype=kept) if codes else None)


def _outputs(found: Found) -> tuple[Tensor | None, ...]:
    """In the order of the C function's arguments."""
    get = found.stored.get
    return get("d"), get("dmin", get("m")), get("scale_codes"), get("minimum_codes"), found.codes


def _float32(weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Rows of a weight in float32, all at once where they are so already."""
    step = max(CHUNK // weight.shape[1] // ROWS, 1) * ROWS
    if weight.dtype == torch.float32 and weight.is_contiguous():
        step = max(len(weight), 1)
    for start in range(0, len(weight), step):
        rows = slice(start, start + step)
        with one_thread():
            part = weight[rows].float().contiguous()
        yield rows, part
