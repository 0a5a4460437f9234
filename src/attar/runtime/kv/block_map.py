"""A map of the pool's blocks, for people: what each block is used for.

    free      without holders                          f
    cached    held by the prefix tree alone            c
    owned     held by one sequence                     o
    shared    held by several                          s

A capital letter says that the block is quantized. Where a pool has more blocks than the map has cells, a cell
stands for neighbouring blocks: the state of most blocks that are not free.

The engine's thread goes on meanwhile, and never waits: the reader copies its lists, so a map may mix two
neighbouring steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attar.runtime.kv.block_manager import BlockManager

STATES = ("free", "cached", "owned", "shared")
LETTERS = "fcosfCOS"  # of a state, then of the same quantized; a free block holds nothing
MAX_CELLS = 1024
QUANTIZED = ("int8", "fp8", "int4", "kivi")  # formats of the pool


@dataclass(frozen=True)
class BlockMap:
    """What the blocks of a pool are used for.

    Attributes:
        block_size: tokens of a block.
        states: number of blocks by state.
        quantized: blocks with quantized keys and values, free ones not counted.
        cell_blocks: blocks of a cell; the last cell may have fewer.
        cells: a letter for each cell.
    """

    block_size: int
    states: dict[str, int]
    quantized: int
    cell_blocks: int
    cells: str


def block_map(
    manager: BlockManager, kv_dtype: str = "", unquantized: Iterable[int] = (), max_cells: int = MAX_CELLS
) -> BlockMap:
    """The map of a pool.

    Args:
        kv_dtype: format of its entries.
        unquantized: blocks of a quantized pool in full precision: the blocks that KIVI is filling.
    """
    counts, published = manager.holders()
    codes = block_codes(counts, published)
    quantized = (codes > 0) & kv_dtype.startswith(QUANTIZED)
    quantized[list(unquantized)] = False
    sizes = np.bincount(codes, minlength=len(STATES)).tolist()
    width = -(-len(codes) // max_cells)
    cells = cell_codes(codes + len(STATES) * quantized, width)
    return BlockMap(
        block_size=manager.block_size,
        states=dict(zip(STATES, sizes, strict=True)),
        quantized=int(quantized.sum()),
        cell_blocks=width,
        cells="".join(LETTERS[code] for code in cells),
    )


def block_codes(counts: Sequence[int], published: Collection[int]) -> NDArray[np.int64]:
    """The index in STATES of each block.

    Args:
        counts: holders of each block.
        published: blocks of which the prefix tree is a holder.
    """
    holders = np.array(counts, dtype=np.int64)
    in_tree = np.zeros(len(holders), dtype=np.int64)
    in_tree[list(published)] = 1
    sequences = np.clip(holders - in_tree, 0, 2)
    return np.where(holders == 0, 0, sequences + 1)


def cell_codes(codes: NDArray[np.int64], width: int) -> list[int]:
    """The most frequent code that is not 0 in each run of ``width`` blocks; 0 where there is none."""
    if width == 1:
        return [int(code) for code in codes]
    padded = np.pad(codes, (0, -len(codes) % width)).reshape(-1, width)
    frequency = np.stack([(padded == code).sum(axis=1) for code in range(1, len(LETTERS))])
    return [int(code) for code in np.where(frequency.any(axis=0), frequency.argmax(axis=0) + 1, 0)]
