"""Attention over a prompt of which every head keeps another number of places.

A packed sequence has m places of every layer and head: m x layers x kv_heads cells, whose order is
(layer, head, place). What the heads keep lies there without gaps, one head after the other, so that a head
that keeps more than m uses cells of its neighbours: head i has cells [bounds[i], bounds[i + 1]). Tokens that
follow lie at their places [m, end), as ever.

Letters: m places kept in the mean, n_i of head i, t tokens of a span, g heads of queries for one of keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attar.runtime.kv.blocks import Packing
from attar.runtime.kv.pool import KVPool
from attar.runtime.kv.store.geometry import Cells, PlaneStore
from attar.runtime.runner.attention import AttentionObserver, AttentionOptions, AttentionPass, attention
from attar.runtime.runner.view import SpanView
from attar.runtime.step import StepInput


@dataclass(frozen=True)
class Shares:
    """How the cells of a packed sequence are divided.

    Args:
        places: m.
        bounds: int64 (layers x kv_heads + 1,), ascending, from 0 to m x layers x kv_heads.
    """

    places: int
    bounds: NDArray[np.int64]

    @staticmethod
    def of(keep: NDArray[np.bool_]) -> Shares:
        """Of the choice bool (layers, kv_heads, n)."""
        counts = keep.sum(axis=2).ravel()
        places, rest = divmod(int(counts.sum()), len(counts))
        assert rest == 0, f"{places} places for each head, and {rest} cells more"
        return Shares(places, np.concatenate([[0], np.cumsum(counts)]))

    def cells(self, start: int, stop: int, kv_heads: int, blocks: Sequence[int] | Tensor, size: int) -> Cells:
        """Cells [start, stop) in a block table of blocks of ``size`` places."""
        cells = torch.arange(start, stop)
        head, place = cells // self.places, cells % self.places
        table = torch.as_tensor(blocks, dtype=torch.int64)
        return head // kv_heads, table[place // size] * size + place % size, head % kv_heads


def pack(pool: KVPool, packing: Packing, keep: NDArray[np.bool_]) -> Shares:
    """Moves what is kept, bool (layers, kv_heads, n), of a sequence together."""
    geometry, shares = pool.geometry, Shares.of(keep)
    assert shares.places == packing.kept, f"{shares.places} places chosen, not {packing.kept}"
    size, device = geometry.block_size, pool.device
    layers, heads, places = torch.from_numpy(keep).nonzero(as_tuple=True)
    slots = torch.tensor(packing.old)[places // size] * size + places % size
    targets = shares.cells(0, len(layers), geometry.kv_heads, packing.new, size)
    sources = (layers, slots, heads)
    moved = [tuple(x.to(device) for x in cells) for cells in (sources, targets)]
    planes(pool).move_cells_(*moved)  # type: ignore[arg-type]
    return shares


class SharedPass(AttentionPass):
    """A pass in which packed sequences have shares.

    Args:
        packed: the shares of sequences that were packed.
    """

    def __init__(
        self, step: StepInput, pool: KVPool, watch: AttentionObserver | None, packed: Mapping[int, Shares]
    ) -> None:
        super().__init__(step, pool, watch)
        self.packed = packed

    def see(self, layer: int, view: SpanView, q: Tensor, how: AttentionOptions) -> Tensor:
        """Attention of one span; q and the result (t, h, d)."""
        shares = self.packed.get(view.span.sequence)
        if shares is None:
            return super().see(layer, view, q, how)
        later, values = self.pool.gather(layer, view.blocks, view.span.end, shares.places)
        kv_heads = later.shape[1]
        mask = view.mask(None)
        out = torch.empty_like(q).unflatten(1, (kv_heads, -1))
        for head, (queries, k, v) in enumerate(
            zip(q.unflatten(1, (kv_heads, -1)).unbind(1), later.unbind(1), values.unbind(1), strict=True)
        ):
            keys_kept, values_kept = self.kept(shares, layer * kv_heads + head, view)
            seen = None if mask is None else _behind(mask[:, shares.places :], len(keys_kept))
            out[:, head] = attention(
                queries,
                torch.cat([keys_kept, k])[:, None],
                torch.cat([values_kept, v])[:, None],
                seen,
                scaling=how.scaling,
                softcap=how.softcap,
            )
        return out.flatten(1, 2)

    def kept(self, shares: Shares, index: int, view: SpanView) -> tuple[Tensor, Tensor]:
        """Keys and values (n_i, d) of head ``index`` = layer x kv_heads + head."""
        start, stop = (int(bound) for bound in shares.bounds[index : index + 2])
        geometry, device = self.pool.geometry, self.pool.device
        cells = shares.cells(start, stop, geometry.kv_heads, view.blocks.cpu(), geometry.block_size)
        layers, slots, heads = (x.to(device) for x in cells)
        return planes(self.pool).read_cells((layers, slots, heads), self.pool.dtype)


def planes(pool: KVPool) -> PlaneStore:
    """The pool's store, whose numbers can be moved one by one."""
    assert isinstance(pool.store, PlaneStore), "KIVI's groups are not taken apart"
    return pool.store


def _behind(mask: Tensor, count: int) -> Tensor:
    """A mask (t, n) behind ``count`` columns that all tokens see."""
    return torch.cat([mask.new_ones(len(mask), count), mask], dim=1)
