"""The compiled search for the scales of llama.cpp's block formats: tensors in, tensors out.

csrc/ggml_search.h describes the algorithm of quantization/grids/ggml_search.py with more trials and a
lower error. Without a compiler that file is the fallback.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from attar.errors import NumericsError
from attar.kernels.build import load, warn_slower, why_missing
from attar.kernels.threads import one_thread

EFFORT = 4  # codes of scales tried to either side; benchmarks/ggml_search.py prints the gain of each
CHUNK = 1 << 20  # weights converted to float32 at a time
ROWS = 16  # that the kernel searches at a time, at most


class SearchLayout(Protocol):
    """The parts of a block format that the search uses; quantization's grids have them."""

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
class BlockScales:
    """The result of the search for a weight (N, K).

    Attributes:
        stored: the fields of the file by name, as ``stored`` of a GGMLGrid's parameters has them.
        codes: (N, K), int8 for Q8_0 and uint8 for the others, equal to the grid's ``encode``; None
            unless requested.
    """

    stored: dict[str, Tensor]
    codes: Tensor | None


def search(
    kind: str,
    layout: SearchLayout,
    weight: Tensor,
    v: Tensor,
    *,
    shrink: Tensor | None = None,
    codes: bool = False,
    effort: int = EFFORT,
) -> BlockScales | None:
    """Scales of least error of a weight, and its nearest codes; None without a compiled kernel, or for a
    weight that is not on the CPU. Does not modify its inputs.

    Args:
        layout: of the format; its block divides K.
        weight: (N, K), any float type.
        v: (K,) float32, at least 0, the importance of each input's squared error.
        shrink: (N, K / tile), each tile is first clipped to this fraction of its range; None: no clipping.
        codes: also return the codes of the clipped weights.
        effort: codes of scales and minimums tried to either side of the nearest ones.

    Raises:
        NumericsError: a weight or an importance is not finite.
    """
    kernel = _kernel() if weight.device.type == "cpu" else None
    if kernel is None:
        return None
    if not torch.isfinite(v).all():
        raise NumericsError("an importance is not finite")
    assert v.shape == weight.shape[1:], f"{tuple(v.shape)} importances of {weight.shape[1]} inputs"
    tiles = (weight.shape[0], weight.shape[1] // layout.tile)
    assert shrink is None or shrink.shape == tiles, f"{tuple(shrink.shape)} fractions of {tiles} tiles"
    result = _empty(layout, weight.shape[0], weight.shape[1], codes)
    v = v.float().contiguous()
    clip = None if shrink is None else shrink.float().contiguous()
    for rows, part in _float32(weight.detach()):
        addresses = [None if x is None else x[rows].data_ptr() for x in (clip, *_outputs(result))]
        shape = (part.shape[0], part.shape[1], effort, torch.get_num_threads())
        failed = kernel(kind.encode(), part.data_ptr(), v.data_ptr(), *shape, *addresses)
        assert failed != 2, f"{kind} for {tuple(part.shape)}"
        if failed == 3:
            raise MemoryError("the search for scales")
        if failed:
            raise NumericsError("a weight is not finite", hint="look for NaN and infinity in the checkpoint")
    return result


def _kernel() -> Callable[..., int] | None:
    """The C function, with the types of its arguments."""
    library = load("ggml_search")
    if library is None:
        why = why_missing("ggml_search")
        warn_slower(f"scales are searched in torch: slower than compiled, and with more error: {why}")
        return None
    function: Any = library.attar_ggml_search
    pointer, long, integer = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    function.argtypes = [ctypes.c_char_p, pointer, pointer, long, long, integer, integer, *[pointer] * 6]
    function.restype = integer
    return function  # type: ignore[no-any-return]


def _empty(layout: SearchLayout, rows: int, columns: int, codes: bool) -> BlockScales:
    """The result, uninitialized."""
    blocks, tiles = (rows, columns // layout.block), (rows, columns // layout.tile)
    stored = {"d": torch.empty(blocks, dtype=torch.float16)}
    if layout.minimum:
        stored["m" if layout.codes is None else "dmin"] = torch.empty(blocks, dtype=torch.float16)
    if layout.codes is not None:
        signed = layout.codes[0] + layout.bias < 0
        stored["scale_codes"] = torch.empty(tiles, dtype=torch.int8 if signed else torch.uint8)
        if layout.minimum:
            stored["minimum_codes"] = torch.empty(tiles, dtype=torch.uint8)
    dtype = torch.int8 if layout.low < 0 else torch.uint8
    return BlockScales(stored, torch.empty(rows, columns, dtype=dtype) if codes else None)


def _outputs(result: BlockScales) -> tuple[Tensor | None, ...]:
    """In the order of the C function's arguments."""
    get = result.stored.get
    return get("d"), get("dmin", get("m")), get("scale_codes"), get("minimum_codes"), result.codes


def _float32(weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Rows of a weight in float32, all at once if they already are."""
    step = max(CHUNK // weight.shape[1] // ROWS, 1) * ROWS
    if weight.dtype == torch.float32 and weight.is_contiguous():
        step = max(len(weight), 1)
    for start in range(0, len(weight), step):
        rows = slice(start, start + step)
        with one_thread():
            part = weight[rows].float().contiguous()
        yield rows, part
