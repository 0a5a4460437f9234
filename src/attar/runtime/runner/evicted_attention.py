"""Attention over caches that eviction has thinned out: StreamingLLM's, and those packed by Reread.

    StreamingLLM    out = softmax([ turned(q, -shift) k_sinks^T | q k_window^T ])  v
                    shift = max(0, p + 1 - S - w); kv/evict/streaming.py explains why queries are turned
    Reread          every head keeps another number of entries

A sequence packed by Reread has m entries of every layer and head: m x layers x kv_heads cells in the order
(layer, head, entry). What the heads keep is stored there without gaps, one head after the other, so a head
that keeps more than m uses cells of its neighbours: head i has cells [bounds[i], bounds[i + 1]). Tokens that
follow are stored at their entries [m, end) as usual.

Letters: S sinks, w window, p position; m entries kept on average, n_i of head i, t tokens of a span, g query
heads for one kv head, n columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attar.runtime.kv.blocks import Packing
from attar.runtime.kv.evict.streaming import Streaming
from attar.runtime.kv.pool import KVPool
from attar.runtime.kv.store.planes import Cells, PlaneStore
from attar.runtime.runner.attention import (
    AttentionObserver,
    AttentionOptions,
    AttentionPass,
    SpanView,
    attention,
    scores,
    softmax,
    weighted_sum,
)
from attar.runtime.runner.probe import Rotary
from attar.runtime.step import StepInput


class StreamingPass(AttentionPass):
    """Attention in which a token sees the sinks and a window.

    Args:
        streaming: S and w.
        rotary: turns the model's queries.
    """

    def __init__(self, step: StepInput, pool: KVPool, streaming: Streaming, rotary: Rotary) -> None:
        super().__init__(step, pool)
        self.streaming, self.rotary, self.evicting = streaming, rotary, True

    def attend_span(self, layer: int, view: SpanView, q: Tensor, options: AttentionOptions) -> Tensor:
        """Attention of one span; q (t, h, d), the result (t, h, e)."""
        span, S, w = view.span, self.streaming.sinks, self.streaming.window
        assert span.kept is None and options.window is None, "StreamingLLM with another window or packing"
        sinks = min(S, span.end)
        first = max(sinks, span.offset - w + 1)
        of_sinks, of_window = (0, sinks), (first, span.end)
        (ks, vs), (kw, vw) = (
            view.gathered(self.pool, layer, start, stop) for start, stop in (of_sinks, of_window)
        )
        shifted = self.rotary.turned(q, -(span.start + view.depths + 1 - S - w).clamp(min=0), layer)
        parts = [
            scores(x.transpose(0, 1), k.transpose(0, 1), scaling=options.scaling, softcap=options.softcap)
            for x, k in ((shifted, ks), (q, kw))
        ]
        columns = torch.cat([torch.arange(*ends, device=q.device) for ends in (of_sinks, of_window)])
        hidden = ~visible(view, columns, self.streaming)
        p = softmax(torch.cat(parts, dim=-1).masked_fill(hidden, -math.inf), options.sinks)
        return weighted_sum(p, torch.cat([vs, vw]))


def visible(view: SpanView, columns: Tensor, streaming: Streaming) -> Tensor:
    """bool (t, n): which of the entries ``columns`` int64 (n,) each token of the span sees."""
    span = view.span
    fresh = (columns - span.offset).clamp(min=0)
    before = columns < span.offset
    positions = torch.where(before, columns, span.start + view.depths[fresh])
    near = positions > (span.start + view.depths)[:, None] - streaming.window
    return (before | view.inside[:, fresh]) & (near | (columns < streaming.sinks))


@dataclass(frozen=True)
class HeadShares:
    """How the cells of a packed sequence are divided among its heads.

    Args:
        mean: m.
        bounds: int64 (layers x kv_heads + 1,), ascending, from 0 to m x layers x kv_heads.
    """

    mean: int
    bounds: NDArray[np.int64]

    @staticmethod
    def of(keep: NDArray[np.bool_]) -> HeadShares:
        """Of the choice bool (layers, kv_heads, n)."""
        counts = keep.sum(axis=2).ravel()
        mean, remainder = divmod(int(counts.sum()), len(counts))
        assert remainder == 0, f"{mean} entries for each head, and {remainder} cells more"
        return HeadShares(mean, np.concatenate([[0], np.cumsum(counts)]))

    def cells(self, start: int, stop: int, kv_heads: int, blocks: Sequence[int] | Tensor, size: int) -> Cells:
        """Cells [start, stop) in a block table with blocks of ``size`` slots."""
        cells = torch.arange(start, stop)
        head, entry = cells // self.mean, cells % self.mean
        table = torch.as_tensor(blocks, dtype=torch.int64)
        return head // kv_heads, table[entry // size] * size + entry % size, head % kv_heads


def pack_heads(pool: KVPool, packing: Packing, keep: NDArray[np.bool_]) -> HeadShares:
    """Move the kept entries, bool (layers, kv_heads, n), of a sequence together."""
    geometry, shares = pool.geometry, HeadShares.of(keep)
    assert shares.mean == packing.kept, f"{shares.mean} entries chosen, not {packing.kept}"
    size, device = geometry.block_size, pool.device
    layers, heads, entries = torch.from_numpy(keep).nonzero(as_tuple=True)
    slots = torch.tensor(packing.old)[entries // size] * size + entries % size
    targets = shares.cells(0, len(layers), geometry.kv_heads, packing.new, size)
    sources = (layers, slots, heads)
    moved = [tuple(x.to(device) for x in cells) for cells in (sources, targets)]
    _plane_store(pool).move_cells_(*moved)  # type: ignore[arg-type]
    return shares


class SharedPass(AttentionPass):
    """Attention of steps in which some sequences were packed by :func:`pack_heads`.

    Args:
        packed: the shares of these sequences.
    """

    def __init__(
        self,
        step: StepInput,
        pool: KVPool,
        observer: AttentionObserver | None,
        packed: Mapping[int, HeadShares],
    ) -> None:
        super().__init__(step, pool, observer)
        self.packed, self.evicting = packed, True

    def attend_span(self, layer: int, view: SpanView, q: Tensor, options: AttentionOptions) -> Tensor:
        """Attention of one span; q (t, h, d), the result (t, h, e)."""
        shares = self.packed.get(view.span.sequence)
        if shares is None:
            return super().attend_span(layer, view, q, options)
        keys, values = view.gathered(self.pool, layer, shares.mean)
        kv_heads = keys.shape[1]
        mask = view.mask(None)
        out = q.new_empty(*q.shape[:2], values.shape[-1]).unflatten(1, (kv_heads, -1))
        sinks = None if options.sinks is None else options.sinks.unflatten(0, (kv_heads, -1))
        by_head = zip(q.unflatten(1, (kv_heads, -1)).unbind(1), keys.unbind(1), values.unbind(1), strict=True)
        for head, (queries, k, v) in enumerate(by_head):
            keys_kept, values_kept = self._kept(shares, layer * kv_heads + head, view)
            head_mask = None if mask is None else _prepend_seen(mask[:, shares.mean :], len(keys_kept))
            out[:, head] = attention(
                queries,
                torch.cat([keys_kept, k])[:, None],
                torch.cat([values_kept, v])[:, None],
                head_mask,
                scaling=options.scaling,
                softcap=options.softcap,
                sinks=None if sinks is None else sinks[head],
            )
        return out.flatten(1, 2)

    def _kept(self, shares: HeadShares, index: int, view: SpanView) -> tuple[Tensor, Tensor]:
        """Keys and values (n_i, d) of head ``index`` = layer x kv_heads + head."""
        start, stop = (int(bound) for bound in shares.bounds[index : index + 2])
        geometry, device = self.pool.geometry, self.pool.device
        cells = shares.cells(start, stop, geometry.kv_heads, view.blocks.cpu(), geometry.block_size)
        layers, slots, heads = (x.to(device) for x in cells)
        owner = divmod(index, geometry.kv_heads)
        return _plane_store(self.pool).read_cells((layers, slots, heads), owner, self.pool.dtype)


def _plane_store(pool: KVPool) -> PlaneStore:
    """The pool's store, whose numbers can be moved one by one."""
    assert isinstance(pool.store, PlaneStore), "KIVI's groups are not taken apart"
    return pool.store


def _prepend_seen(mask: Tensor, count: int) -> Tensor:
    """A mask (t, n) after ``count`` columns that all tokens see."""
    return torch.cat([mask.new_ones(len(mask), count), mask], dim=1)
