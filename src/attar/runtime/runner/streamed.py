"""Attention of StreamingLLM: sinks and a window, over blocks that lie where they always lay.

    out = softmax([ turned(q, -shift) k_sinks^T | q k_window^T ])  v      shift = max(0, p + 1 - S - w)

See ``kv/evict/streaming.py`` for why the queries are turned. Letters as there; t tokens of a span, n columns.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attar.runtime.kv.evict.streaming import Streaming
from attar.runtime.kv.pool import KVPool
from attar.runtime.runner.attention import AttentionOptions, AttentionPass, scores, weighted
from attar.runtime.runner.rotary import Rotary
from attar.runtime.runner.view import SpanView
from attar.runtime.step import StepInput


class StreamedPass(AttentionPass):
    """A pass in which a token sees the sinks and a window.

    Args:
        streaming: S and w.
        rotary: how the model's queries are turned.
    """

    def __init__(self, step: StepInput, pool: KVPool, streaming: Streaming, rotary: Rotary) -> None:
        super().__init__(step, pool)
        self.streaming, self.rotary = streaming, rotary

    def see(self, layer: int, view: SpanView, q: Tensor, how: AttentionOptions) -> Tensor:
        """Attention of one span; q and the result (t, h, d)."""
        span, S, w = view.span, self.streaming.sinks, self.streaming.window
        assert span.kept is None and how.window is None, "StreamingLLM beside another window or packing"
        sinks = min(S, span.end)
        first = max(sinks, span.place - w + 1)
        of_sinks, of_window = (0, sinks), (first, span.end)
        (ks, vs), (kw, vw) = (
            self.pool.gather(layer, view.blocks, stop, start) for start, stop in (of_sinks, of_window)
        )
        back = self.rotary.turned(q, -(span.start + view.depths + 1 - S - w).clamp(min=0), layer)
        parts = [
            scores(one.transpose(0, 1), k.transpose(0, 1), scaling=how.scaling, softcap=how.softcap)
            for one, k in ((back, ks), (q, kw))
        ]
        columns = torch.cat([torch.arange(*ends, device=q.device) for ends in (of_sinks, of_window)])
        hidden = ~seen(view, columns, self.streaming)
        found = torch.cat(parts, dim=-1).masked_fill(hidden, -math.inf).softmax(dim=-1, dtype=torch.float32)
        return weighted(found, torch.cat([vs, vw]))


def seen(view: SpanView, columns: Tensor, streaming: Streaming) -> Tensor:
    """bool (t, n): which of the places ``columns`` int64 (n,) each token of the span sees."""
    span = view.span
    own = (columns - span.place).clamp(min=0)
    before = columns < span.place
    positions = torch.where(before, columns, span.start + view.depths[own])
    near = positions > (span.start + view.depths)[:, None] - streaming.window
    return (before | view.inside[:, own]) & (near | (columns < streaming.sinks))
