"""What eviction records of each sequence while it runs: H2O's sums, SnapKV's last queries, Reread's queries.

The choice itself is pure (``kv/evict``); these are the tensors that it is made from. Letters: h heads, d
head_dim, n cache entries, t tokens of a span.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from attar.runtime.kv.blocks import Packing
from attar.runtime.kv.evict import H2O, Reread, SnapKV
from attar.runtime.kv.evict.h2o import EntryIndices, Scores
from attar.runtime.kv.evict.reread import PIECE
from attar.runtime.runner.attention import AttentionOptions, weights
from attar.runtime.runner.probe import Rotary
from attar.runtime.step import TokenSpan

ReadKeys = Callable[[int], Tensor]
"""The first n keys (n, kv_heads, d) of a layer and sequence, from n."""
QueryChunk = tuple[int, Tensor]
"""Entry of the first query, and every ``stride``-th query (m, h, d) from there."""
QUERIES = 256  # whose weights are in memory at once

T = TypeVar("T")


class _Records(Generic[T]):
    """A record for each sequence and layer."""

    def __init__(self) -> None:
        self.records: dict[int, dict[int, T]] = {}

    def fork(self, sequence: int, child: int) -> None:
        """The child starts with the same records."""
        if sequence in self.records:
            self.records[child] = dict(self.records[sequence])

    def forget(self, sequence: int) -> None:
        """The sequence ended or was preempted."""
        self.records.pop(sequence, None)


class AttentionSums(_Records[Scores]):
    """H2O: sums of softmax weights, float32 (kv_heads, n)."""

    def __init__(self, method: H2O) -> None:
        super().__init__()
        self.method = method

    def observe(
        self,
        layer: int,
        span: TokenSpan,
        q: Tensor,
        k: Tensor,
        mask: Tensor | None,
        options: AttentionOptions,
    ) -> None:
        """Add the weights of the span's queries."""
        by_layer = self.records.setdefault(span.sequence, {})
        before = by_layer.get(layer, np.zeros((k.shape[1], 0), dtype=np.float32))
        known = before.shape[1]
        assert known == span.offset, f"H2O saw {known} of {span.offset} entries: a prefix hit?"
        total = column_sums(q, k, mask, options).cpu().numpy()
        total[:, : span.offset] += before
        by_layer[layer] = total

    def choose(self, packing: Packing, layer: int, keys: ReadKeys) -> EntryIndices:
        """Entries that are kept, int64 (kv_heads, kept), with their sums."""
        by_layer = self.records[packing.sequence]
        keep = self.method.choose(by_layer[layer])
        by_layer[layer] = np.take_along_axis(by_layer[layer], keep, axis=1)
        return keep


class LastQueries(_Records[tuple[Tensor, AttentionOptions, int]]):
    """SnapKV: the last w queries (w, h, d), their options and the number of entries, until the packing."""

    def __init__(self, method: SnapKV) -> None:
        super().__init__()
        self.method = method

    def observe(
        self,
        layer: int,
        span: TokenSpan,
        q: Tensor,
        k: Tensor,
        mask: Tensor | None,
        options: AttentionOptions,
    ) -> None:
        """Keep the span's last queries; a packed sequence needs none."""
        if span.kept is not None:
            return
        by_layer = self.records.setdefault(span.sequence, {})
        before = without_rejected(*by_layer[layer], span.offset) if layer in by_layer else q[:0]
        by_layer[layer] = (torch.cat([before, q])[-self.method.window :].clone(), options, span.end)

    def choose(self, packing: Packing, layer: int, keys: ReadKeys) -> EntryIndices:
        """Entries that are kept, int64 (kv_heads, kept)."""
        record, n = self.records[packing.sequence].pop(layer), packing.length
        q, options = without_rejected(*record, n), record[1]
        w = len(q)
        k = keys(n)
        mask = torch.ones(w, n, dtype=torch.bool, device=q.device).tril(diagonal=n - w)
        votes = column_sums(q, k, mask, options)[:, : n - w] / (q.shape[1] // k.shape[1])
        return self.method.choose(votes.cpu().numpy(), w)


class StridedQueries(_Records[tuple[QueryChunk, ...]]):
    """Reread: every ``stride``-th query of a prompt, in bfloat16, in ascending chunks, until the packing."""

    def __init__(self, method: Reread, rotary: Rotary) -> None:
        super().__init__()
        self.method, self.rotary = method, rotary
        self.options: dict[int, AttentionOptions] = {}  # by layer

    def observe(
        self,
        layer: int,
        span: TokenSpan,
        q: Tensor,
        k: Tensor,
        mask: Tensor | None,
        options: AttentionOptions,
    ) -> None:
        """Keep queries of the span, and drop those of rejected drafts."""
        if span.kept is not None:
            return
        by_layer, stride = self.records.setdefault(span.sequence, {}), self.method.stride
        before = tuple(_until(chunk, span.offset, stride) for chunk in by_layer.get(layer, ()))
        start = span.offset + -span.offset % stride
        chunk = (start, q[start - span.offset :: stride].bfloat16())
        by_layer[layer], self.options[layer] = (*before, chunk), options

    def scores(self, packing: Packing, layer: int, keys: ReadKeys) -> Scores:
        """s of a layer, float32 (kv_heads, n): the queries attend again from positions after the prompt."""
        n, stride = packing.length, self.method.stride
        chunks = [_until(chunk, n, stride) for chunk in self.records[packing.sequence].pop(layer)]
        q = torch.cat([queries for _, queries in chunks]).float()
        t = torch.cat([start + stride * torch.arange(len(queries)) for start, queries in chunks])
        turned = self.rotary.turned(q, (n + t % PIECE - t).to(q.device), layer)
        s: Scores = column_largest(turned, keys(n), self.options[layer]).cpu().numpy()
        return s


def _until(chunk: QueryChunk, stop: int, stride: int) -> QueryChunk:
    """A chunk without queries from entry ``stop`` on, of rejected drafts."""
    start, q = chunk
    return start, q[: max(-((start - stop) // stride), 0)]


def without_rejected(q: Tensor, options: AttentionOptions, entries: int, length: int) -> Tensor:
    """The last queries without those of rejected drafts, which were at entries [length, entries)."""
    return q[: max(len(q) - (entries - length), 0)]


def column_sums(q: Tensor, k: Tensor, mask: Tensor | None, options: AttentionOptions) -> Tensor:
    """Softmax weights summed over queries and over the group's heads; float32 (kv_heads, n)."""
    if mask is None and options.causal:
        mask = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril()
    total = torch.zeros(k.shape[1], len(k), device=q.device)
    for start in range(0, len(q), QUERIES):
        part = slice(start, start + QUERIES)
        p = _weights(q[part], k, None if mask is None else mask[part], options)
        total += p.sum(dim=1).unflatten(0, (k.shape[1], -1)).sum(dim=1)
    return total


def column_largest(q: Tensor, k: Tensor, options: AttentionOptions) -> Tensor:
    """The largest softmax weight of each entry over queries and the group's heads; float32 (kv_heads, n).

    Every query of q (t, h, d) sees every entry of k (n, kv_heads, d).
    """
    largest = torch.zeros(k.shape[1], len(k), device=q.device)
    for part in q.to(k.dtype).split(QUERIES):
        p = _weights(part, k, None, options)
        torch.maximum(largest, p.amax(dim=1).unflatten(0, (k.shape[1], -1)).amax(dim=1), out=largest)
    return largest


def _weights(q: Tensor, k: Tensor, mask: Tensor | None, options: AttentionOptions) -> Tensor:
    q, k = q.transpose(0, 1), k.transpose(0, 1)
    return weights(q, k, mask, options._replace(causal=False))
