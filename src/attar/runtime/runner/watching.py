"""What eviction keeps of each sequence while it runs: H2O's scores, SnapKV's last queries, Reread's queries.

The choice itself is pure (``kv/evict``); here are the tensors it is made of. Letters: h heads, d head_dim, n
places, t tokens of a span.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from attar.runtime.kv.blocks import Packing
from attar.runtime.kv.evict import H2O, Reread, SnapKV
from attar.runtime.kv.evict.h2o import EntryIndices, Scores
from attar.runtime.kv.evict.reread import PIECE as REREAD
from attar.runtime.runner.attention import AttentionOptions, weights
from attar.runtime.runner.rotary import Rotary
from attar.runtime.step import TokenSpan

ReadKeys = Callable[
    [int], Tensor
]  # places -> keys (places, kv_heads, d) of the layer and sequence in question
QueryChunk = tuple[int, Tensor]
PIECE = 256  # queries whose weights are held at once


class AttentionSums:
    """Sums of weights, float32 (kv_heads, n) for each sequence and layer."""

    def __init__(self, method: H2O) -> None:
        self.method = method
        self.sums: dict[int, dict[int, Scores]] = {}

    def see(
        self, layer: int, span: TokenSpan, q: Tensor, k: Tensor, mask: Tensor | None, how: AttentionOptions
    ) -> None:
        """Adds the weights of the span's queries."""
        mine = self.sums.setdefault(span.sequence, {})
        before = mine.get(layer, np.zeros((k.shape[1], 0), dtype=np.float32))
        assert before.shape[1] == span.place, (
            f"H2O saw {before.shape[1]} of {span.place} places: a prefix hit?"
        )
        total = column_sums(q, k, mask, how).cpu().numpy()
        total[:, : span.place] += before
        mine[layer] = total

    def choose(self, packing: Packing, layer: int, keys: ReadKeys) -> EntryIndices:
        """Places that stay, int64 (kv_heads, kept); their scores stay with them."""
        mine = self.sums[packing.sequence]
        keep = self.method.choose(mine[layer])
        mine[layer] = np.take_along_axis(mine[layer], keep, axis=1)
        return keep

    def fork(self, sequence: int, child: int) -> None:
        """The child has the same past."""
        if sequence in self.sums:
            self.sums[child] = dict(self.sums[sequence])

    def forget(self, sequence: int) -> None:
        """The sequence ended or starts anew."""
        self.sums.pop(sequence, None)


class LastQueries:
    """The last w queries (w, h, d) of each sequence and layer, until it is packed."""

    def __init__(self, method: SnapKV) -> None:
        self.method = method
        self.tails: dict[int, dict[int, tuple[Tensor, AttentionOptions, int]]] = {}  # queries, how, places

    def see(
        self, layer: int, span: TokenSpan, q: Tensor, k: Tensor, mask: Tensor | None, how: AttentionOptions
    ) -> None:
        """Keeps the span's last queries; those of a packed sequence are not needed."""
        if span.kept is not None:
            return
        mine = self.tails.setdefault(span.sequence, {})
        before = kept(*mine[layer], span.place) if layer in mine else q[:0]
        mine[layer] = (torch.cat([before, q])[-self.method.window :].clone(), how, span.end)

    def choose(self, packing: Packing, layer: int, keys: ReadKeys) -> EntryIndices:
        """Places that stay, int64 (kv_heads, kept)."""
        tail, n = self.tails[packing.sequence].pop(layer), packing.length
        q, how = kept(*tail, n), tail[1]
        w = len(q)
        k = keys(n)
        mask = torch.ones(w, n, dtype=torch.bool, device=q.device).tril(diagonal=n - w)
        votes = column_sums(q, k, mask, how)[:, : n - w] / (q.shape[1] // k.shape[1])
        return self.method.choose(votes.cpu().numpy(), w)

    def fork(self, sequence: int, child: int) -> None:
        """The child has the same past."""
        if sequence in self.tails:
            self.tails[child] = dict(self.tails[sequence])

    def forget(self, sequence: int) -> None:
        """The sequence ended or starts anew."""
        self.tails.pop(sequence, None)


class StridedQueries:
    """Every ``stride``-th query of a prompt, in bfloat16, for each sequence and layer, until it is packed:
    pieces (start, queries (m, h, d)) in ascending order."""

    def __init__(self, method: Reread, rotary: Rotary) -> None:
        self.method, self.rotary = method, rotary
        self.queries: dict[int, dict[int, tuple[QueryChunk, ...]]] = {}
        self.how: dict[int, AttentionOptions] = {}

    def see(
        self, layer: int, span: TokenSpan, q: Tensor, k: Tensor, mask: Tensor | None, how: AttentionOptions
    ) -> None:
        """Keeps queries of the span; a span that starts earlier takes the rest back."""
        if span.kept is not None:
            return
        mine, stride = self.queries.setdefault(span.sequence, {}), self.method.stride
        before = tuple(_until(piece, span.place, stride) for piece in mine.get(layer, ()))
        start = span.place + -span.place % stride
        piece = (start, q[start - span.place :: stride].bfloat16())
        mine[layer], self.how[layer] = (*before, piece), how

    def scores(self, packing: Packing, layer: int, keys: ReadKeys) -> Scores:
        """s of a layer, float32 (kv_heads, n): the queries are asked again behind the prompt."""
        n, stride = packing.length, self.method.stride
        pieces = [_until(piece, n, stride) for piece in self.queries[packing.sequence].pop(layer)]
        q = torch.cat([piece for _, piece in pieces]).float()
        places = torch.cat([start + stride * torch.arange(len(piece)) for start, piece in pieces])
        again = self.rotary.turned(q, (n + places % REREAD - places).to(q.device), layer)
        found: Scores = column_largest(again, keys(n), self.how[layer]).cpu().numpy()
        return found

    def fork(self, sequence: int, child: int) -> None:
        """The child has the same past."""
        if sequence in self.queries:
            self.queries[child] = dict(self.queries[sequence])

    def forget(self, sequence: int) -> None:
        """The sequence ended or starts anew."""
        self.queries.pop(sequence, None)


def _until(piece: QueryChunk, stop: int, stride: int) -> QueryChunk:
    """A piece without queries at places from ``stop`` on, of drafts that were rejected."""
    start, q = piece
    return start, q[: max(-((start - stop) // stride), 0)]


def kept(q: Tensor, how: AttentionOptions, places: int, length: int) -> Tensor:
    """The last queries without those of rejected drafts, which were at places [length, places)."""
    return q[: max(len(q) - (places - length), 0)]


def column_sums(q: Tensor, k: Tensor, mask: Tensor | None, how: AttentionOptions) -> Tensor:
    """Softmax weights summed over queries and over the group's heads; float32 (kv_heads, n)."""
    if mask is None and how.causal:
        mask = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril()
    total = torch.zeros(k.shape[1], len(k), device=q.device)
    for start in range(0, len(q), PIECE):
        piece = slice(start, start + PIECE)
        some = None if mask is None else mask[piece]
        found = weights(
            q[piece].transpose(0, 1),
            k.transpose(0, 1),
            some,
            scaling=how.scaling,
            softcap=how.softcap,
            causal=False,
        )
        total += found.sum(dim=1).unflatten(0, (k.shape[1], -1)).sum(dim=1)
    return total


def column_largest(q: Tensor, k: Tensor, how: AttentionOptions) -> Tensor:
    """The largest softmax weight of each place over queries and the group's heads; float32 (kv_heads, n).

    Every query of q (t, h, d) sees every place of k (n, kv_heads, d).
    """
    largest = torch.zeros(k.shape[1], len(k), device=q.device)
    for piece in q.to(k.dtype).split(PIECE):
        found = weights(
            piece.transpose(0, 1),
            k.transpose(0, 1),
            None,
            scaling=how.scaling,
            softcap=how.softcap,
            causal=False,
        )
        torch.maximum(largest, found.amax(dim=1).unflatten(0, (k.shape[1], -1)).amax(dim=1), out=largest)
    return largest
