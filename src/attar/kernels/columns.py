"""The compiled loop over a block of columns that the second-order roundings and coordinate descent share.

csrc/columns.cpp describes the loop; on a GPU it is triton/columns.py. quantization's columns.py and refine.py
have the same in torch, for machines without a compiler, other devices, and grids without a :class:`CodeBook`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attar.kernels import triton
from attar.kernels.build import load, warn_slower, why_missing

NUMBERS = {"real": -1, "e2m1": -2, "e4m3fn": -3, "e5m2": -4}  # as columns.cpp knows them
WEIGHTS_PER_THREAD = 1 << 19  # fewer do not pay: torch's threads still spin after its products


@dataclass(frozen=True)
class CodeBook:
    """A grid's codes, for the compiled encode and decode.

        q = clamp(round((w + m) / s + z), low, high) ,   w' = s (q - z) - m
        q = the nearest of T to (w + m) / s ,            w' = s T[q] - m
        q = (w + m) / s + z                              real
        q = float((w + m) / s)                           e2m1, e4m3fn, e5m2

    Attributes:
        high: of e4m3fn and e5m2 the largest value.
        zero: z of tiles without their own.
        levels: T, ascending, from code 0 on; ties go to the upper. Empty: uniform levels.
        numbers: of :data:`NUMBERS`; empty: integers, or levels. Codes of e2m1 are its four bits, those of the
            others the values.
    """

    low: int
    high: int
    zero: int = 0
    levels: tuple[int, ...] = ()
    numbers: str = ""


@dataclass(frozen=True)
class TileScales:
    """Scales that decode the codes of N rows.

    Attributes:
        scale: s, float32 (G, N).
        zero: z, float32 (G, N); None: the book's.
        minimum: m, float32 (G, N); None: 0.
        group: int64 (K,), the tile of each column.
    """

    book: CodeBook
    scale: Tensor
    zero: Tensor | None
    minimum: Tensor | None
    group: Tensor


def available(device: torch.device) -> bool:
    """Whether the loop runs compiled; warns once if not."""
    return triton.available(device) or (device.type == "cpu" and _columns() is not None)


def round_block(
    tiles: TileScales,
    at: slice,
    weights: Tensor,
    factor: Tensor,
    codes: Tensor,
    errors: Tensor,
    *,
    mask: Tensor | None = None,
    first: Tensor | None = None,
    choose: tuple[int, int] = (0, 0),
) -> None:
    """Round a block of columns, each error propagated inside the block. All tensors are contiguous float32.

    Args:
        at: the block's columns.
        weights: (n, N), not modified.
        factor: (n, n) upper triangular, [j, i]: times the error of column j is subtracted from column i; the
            diagonal divides errors.
        codes: (n, N), written.
        errors: (n, N), written.
        mask: bool (n, N); False: becomes zero.
        first: (N,), rounded instead of the first column's weights.
        choose: N and M: the mask is narrowed until at most N of each M columns are True; M divides n.
    """
    step = factor.diagonal().reciprocal()
    _run(tiles, at, factor.T.contiguous(), step, None, weights, mask, first, codes, errors, choose)


def descend_block(
    tiles: TileScales,
    at: slice,
    gradient: Tensor,
    H: Tensor,
    current: Tensor,
    codes: Tensor,
    moved: Tensor,
    *,
    mask: Tensor | None = None,
) -> None:
    """Coordinate descent on a block of columns. All tensors are contiguous float32.

    Args:
        at: the block's columns.
        gradient: (n, N), not modified.
        H: (n, n), the block on the diagonal.
        current: (n, N), decoded weights, replaced by the new ones.
        codes: (n, N), written.
        moved: (n, N), new minus old weights, written.
        mask: bool (n, N); False: becomes zero.
    """
    step = H.diagonal().reciprocal()
    _run(tiles, at, H.T.contiguous(), step, gradient, current, mask, None, codes, moved)


def descend_rows(
    tiles: TileScales,
    at: slice,
    gradient: Tensor,
    H: Tensor,
    output: Tensor,
    current: Tensor,
    codes: Tensor,
    moved: Tensor,
    *,
    mask: Tensor | None = None,
) -> None:
    """Coordinate descent on a block of columns, whose rows depend on each other. On a CPU; all tensors are
    contiguous float32.

    Args:
        at: the block's columns.
        gradient: (n, N), not modified.
        H: (n, n), the block on the diagonal.
        output: H_O (N, N).
        current: (n, N), decoded weights, replaced by the new ones.
        codes: (n, N) of ``current``, replaced.
        moved: (n, N), H_O times new minus old weights, written.
        mask: bool (n, N); False: becomes zero.
    """
    function = _function("attar_descend_rows", [ctypes.c_int64, ctypes.c_int], 12)
    assert function is not None, "call available() first"
    table, group = torch.tensor(tiles.book.levels, dtype=torch.float32), tiles.group[at].contiguous()
    N, n = current.shape[1], current.shape[0]
    _expect((gradient, mask, codes, moved), current.shape)
    _expect((tiles.scale, tiles.zero, tiles.minimum), (len(tiles.scale), N))
    for tensor, size in ((group, (n,)), (H, (n, n)), (output, (N, N))):
        _expect((tensor,), size)
    assert 0 <= int(group.min()) <= int(group.max()) < len(tiles.scale), "a column's tile is none"
    step = H.diagonal().reciprocal()
    inputs = (tiles.scale, tiles.zero, tiles.minimum, group, H.T.contiguous(), step, output, gradient)
    numbers = _numbers(tiles.book, current.numel())
    _check(function(N, n, *numbers, *_addresses(table, *inputs, current, mask, codes, moved)))


def tile_errors(book: CodeBook, weight: Tensor, blocks: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """E_ng H_gg E_ng^T of each row's tiles rounded to nearest, float32 (T, G, N), under T trials of scales.

    Args:
        weight: (N, K) float32.
        blocks: (G, c, c) float32, the blocks on H's diagonal.
        scale: (T, N, G) float32.
        zero: the same; None: the book's.
    """
    function = _function("attar_tile_errors", [ctypes.c_int64] * 5, 5)
    assert function is not None, "call available() first"
    across, scales = weight.T.contiguous(), scale.transpose(1, 2).contiguous()
    zeros = None if zero is None else zero.transpose(1, 2).contiguous()
    table, errors = torch.tensor(book.levels, dtype=torch.float32), torch.empty_like(scales)
    shape = weight.shape[0], blocks.shape[1], weight.shape[1], len(blocks), len(scale)
    assert blocks.shape[2] == shape[1] and shape[1] * shape[3] - shape[2] in range(shape[1]), "other tiles"
    _expect((scale, zero), (shape[4], shape[0], shape[3]))
    _check(
        function(
            *shape,
            *_numbers(book, scales.numel() * blocks.shape[1]),
            *_addresses(table, across, blocks.contiguous(), scales, zeros, errors),
        )
    )
    return errors


def _run(
    tiles: TileScales,
    at: slice,
    inner: Tensor,
    step: Tensor,
    gradient: Tensor | None,
    current: Tensor,
    mask: Tensor | None,
    first: Tensor | None,
    codes: Tensor,
    errors: Tensor,
    choose: tuple[int, int] = (0, 0),
) -> None:
    if triton.available(current.device):
        from attar.kernels.triton.columns import run_block

        assert not choose[1], "N of M is chosen in torch on a GPU"
        book, constants = tiles.book, (tiles.scale, tiles.zero, tiles.minimum, tiles.group[at])
        numbers = (0.0 if book.levels else float(book.low), float(book.high), float(book.zero))
        run_block(
            book.levels,
            numbers,
            book.numbers == "real",
            constants,
            inner,
            step,
            gradient,
            current,
            mask,
            first,
            codes,
            errors,
        )
        return
    function = _columns()
    assert function is not None, "call available() first"
    assert not choose[1] or (mask is not None and len(mask) % choose[1] == 0)
    table = torch.tensor(tiles.book.levels, dtype=torch.float32)
    group = tiles.group[at].contiguous()
    inputs = (tiles.scale, tiles.zero, tiles.minimum, group, inner, step, gradient, current, mask, first)
    shape = current.shape[1], current.shape[0]
    _expect((gradient, mask, codes, errors), current.shape)
    _expect((tiles.scale, tiles.zero, tiles.minimum), (len(tiles.scale), shape[0]))
    for tensor, size in ((group, shape[1:]), (first, shape[:1]), (step, shape[1:]), (inner, 2 * shape[1:])):
        _expect((tensor,), size)
    inside = not len(group) or 0 <= int(group.min()) <= int(group.max()) < len(tiles.scale)
    assert inside, f"a column's tile is none of {len(tiles.scale)}"
    _check(
        function(
            *shape,
            *choose,
            *_numbers(tiles.book, current.numel()),
            *_addresses(table, *inputs, codes, errors),
        )
    )


def _expect(tensors: Sequence[Tensor | None], shape: Sequence[int]) -> None:
    """What the library does not check."""
    for tensor in tensors:
        assert tensor is None or tensor.shape == tuple(shape), f"{tuple(tensor.shape)}, not {tuple(shape)}"
        dtypes = (torch.float32, torch.int64, torch.bool)
        assert tensor is None or (tensor.dtype in dtypes and tensor.device.type == "cpu"), f"{tensor.dtype}"


def _numbers(book: CodeBook, weights: int) -> tuple[float, ...]:
    """Threads, and the code book's arguments."""
    low = 0 if book.levels else book.low
    threads = min(torch.get_num_threads(), max(1, weights // WEIGHTS_PER_THREAD))
    return threads, low, book.high, book.zero, NUMBERS.get(book.numbers, len(book.levels))


def _addresses(*tensors: Tensor | None) -> list[int | None]:
    assert all(value is None or value.is_contiguous() for value in tensors)
    return [None if value is None else value.data_ptr() for value in tensors]


def _check(failed: int) -> None:
    assert failed != 2, "too many levels"
    if failed:
        raise MemoryError("rounding columns")


def _columns() -> Callable[..., int] | None:
    return _function("attar_columns", [ctypes.c_int64, *[ctypes.c_int] * 3], 12)


def _function(name: str, shape: list[Any], pointers: int) -> Callable[..., int] | None:
    """A C function with the types of its arguments: a shape, a code book, its table and ``pointers`` more."""
    library = load("columns")
    if library is None:
        why = why_missing("columns")
        warn_slower(f"columns are rounded in torch, several times slower than compiled: {why}")
        return None
    function: Any = getattr(library, name)
    number, integer = ctypes.c_float, ctypes.c_int
    function.argtypes = [
        *shape,
        integer,
        number,
        number,
        number,
        integer,
        *[ctypes.c_void_p] * (pointers + 1),
    ]
    function.restype = integer
    return function  # type: ignore[no-any-return]
