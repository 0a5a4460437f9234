"""Attention over the block table, for any model of transformers: one function, registered once.

transformers' attention modules pass queries, keys and values (rotated already) to the function that their
config names. This one writes keys and values to the pool and attends, span by span, to what the pool holds:

    out = softmax(scaling q k^T, soft-capped, masked) v          over the cache entries that a token may see

Sinks (gpt-oss) are one learned score for each head, in the softmax's sum and without a value. Of MLA the pool
keeps the latents (``latent.py``). Where other values have fewer numbers than keys, they are stored with zeros
behind them.

A step runs as one row (1, T), so that a token's attention does not depend on the rest of the batch.

A token sees the entries before its span, its ancestors inside the span (a chain: every earlier token) and
itself; with a sliding window w only positions above its own minus w.

Letters: T tokens of the step, t of a span, n cache entries that are read, h heads, d head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from attar.errors import ModelError
from attar.runtime.kv.pool import KVPool
from attar.runtime.runner.latent import LatentProducts
from attar.runtime.step import StepInput, TokenSpan, ancestors, depths

NAME = "attar_paged"


def register() -> None:
    """Make :func:`paged_attention` known to transformers under :data:`NAME`."""
    AttentionInterface.register(NAME, paged_attention)


def paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    paged: Any = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in each layer; query (1, h, T, d), key and value (1, kv_heads, T, d). Returns
    (1, T, h, d), and no weights.

    Args:
        paged: passed through the model's forward: an :class:`AttentionPass`, or the probe of ``probe.py``.
        s_aux: sinks (h,).

    Raises:
        ModelError: the model does not pass ``paged`` through, or needs attention that is not supported.
    """
    kind = type(module).__name__
    if paged is None:
        raise ModelError(
            f"{kind} does not pass arguments through to its attention; the runtime cannot run it"
        )
    if attention_mask is not None or not getattr(module, "is_causal", True):
        raise ModelError(f"{kind} is not causal attention; the runtime runs causal models only")
    if others.get("position_bias") is not None:
        raise ModelError(f"{kind} passes 'position_bias' to its attention, which the runtime does not do")
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    out = paged.attend(
        module.layer_idx,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scaling=scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
        latent=getattr(module, "latent", None),
    )
    return out[None], None


class AttentionOptions(NamedTuple):
    """What a layer asks of its attention; ``causal``: an absent mask means the lower triangle."""

    scaling: float
    softcap: float | None
    window: int | None
    causal: bool
    sinks: Tensor | None = None


class SpanView:
    """One span of a step: its rows, its block table, and the masks of its tokens."""

    def __init__(
        self, span: TokenSpan, tree: tuple[int, ...] | None, rows: slice, device: torch.device
    ) -> None:
        self.span, self.tree, self.rows, self.device = span, tree, rows, device
        self.blocks = torch.tensor(span.blocks, dtype=torch.int64, device=device)
        self.fresh = tree is None and span.offset == 0 and span.count > 1
        self._masks: dict[int | None, Tensor | None] = {}

    def gathered(
        self, pool: KVPool, layer: int, start: int, stop: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of the sequence's entries [start, stop); all from ``start`` on without ``stop``."""
        stop = self.span.end if stop is None else stop
        return pool.gather(layer, self.span.blocks, stop, start, table=self.blocks)

    def first(self, window: int | None) -> int:
        """First entry that any of the span's tokens sees."""
        return 0 if window is None else max(0, self.span.offset - window + 1)

    def mask(self, window: int | None) -> Tensor | None:
        """bool (t, n): the entries [first, end) that each token sees; None: all of them, or a triangle.

        A window that is longer than the sequence counts as none.
        """
        assert window is None or self.span.kept is None, "no sliding window over a cache that was packed"
        if window is not None and self.span.end <= window:
            window = None
        if window not in self._masks:
            self._masks[window] = self._make_mask(window)
        return self._masks[window]

    def _make_mask(self, window: int | None) -> Tensor | None:
        span, first = self.span, self.first(window)
        if window is None and (span.count == 1 or self.fresh):
            return None
        inside = self.inside
        before = torch.ones(span.count, span.offset - first, dtype=torch.bool, device=self.device)
        if window is not None:
            inside = inside & (self.depths[None, :] > self.depths[:, None] - window)
            positions = span.start + self.depths
            before &= torch.arange(first, span.offset, device=self.device) > positions[:, None] - window
        return torch.cat([before, inside], dim=1)

    @cached_property
    def depths(self) -> Tensor:
        """int64 (t,): a token's position is the span's start and this."""
        return torch.from_numpy(depths(self.span.count, self.tree)).to(self.device)

    @cached_property
    def inside(self) -> Tensor:
        """bool (t, t): each token's ancestors in the span, and itself."""
        if self.tree is None:
            return torch.ones(self.span.count, self.span.count, dtype=torch.bool, device=self.device).tril()
        return torch.from_numpy(ancestors(self.tree)).to(self.device)


class AttentionObserver(Protocol):
    """Receives every span's queries and keys, for eviction."""

    def observe(
        self,
        layer: int,
        span: TokenSpan,
        q: Tensor,
        k: Tensor,
        mask: Tensor | None,
        options: AttentionOptions,
    ) -> None:
        """q (t, h, d) of a span over k (n, kv_heads, d); mask as for :func:`attention`."""
        ...


class AttentionPass:
    """The attention of one step in all layers.

    Args:
        pool: keys and values; the step's block copies are made here.
        observer: for eviction; None: none.

    Attributes:
        evicting: an eviction observes what is attended to, or bounds it.
        indices: the pool's layer of each layer of the model that attends; empty: the same.
    """

    def __init__(self, step: StepInput, pool: KVPool, observer: AttentionObserver | None = None) -> None:
        self.pool, self.observer, self.evicting = pool, observer, observer is not None
        self.slots = pool.begin(step)
        bounds = zip(step.trees(), step.offsets[:-1], step.offsets[1:], strict=True)
        self.views = [
            SpanView(span, tree, slice(start, stop), pool.device) for (span, tree), start, stop in bounds
        ]
        self.layers: list[int] = []  # that have attended
        self.indices: Mapping[int, int] = {}

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scaling: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None = None,
        latent: LatentProducts | None = None,
    ) -> Tensor:
        """q (T, h, d), k (T, kv_heads, d) and v (T, kv_heads, e) of the step's tokens, e at most d, and sinks
        (h,); returns (T, h, e). With ``latent`` k and v are latents: returns (T, h, wide)."""
        layer = self.indices.get(layer, layer)
        self.layers.append(layer)
        width = v.shape[-1]
        self.pool.write(layer, self.slots, k, v if latent else pad(v, (0, k.shape[-1] - width)))
        out = q.new_empty(*q.shape[:2], latent.wide if latent else q.shape[-1])
        for view in self.views:
            options = AttentionOptions(scaling, softcap, window, view.fresh, sinks)
            if latent is None:
                out[view.rows] = self.attend_span(layer, view, q[view.rows], options)
            else:
                products = latent.adapted.get(view.span.adapter, latent)
                out[view.rows] = self.attend_latents(layer, view, q[view.rows], products, options)
        return out if latent else out[..., :width]

    def attend_latents(
        self, layer: int, view: SpanView, q: Tensor, latent: LatentProducts, options: AttentionOptions
    ) -> Tensor:
        """Attention of one span over latents; q (t, h, d), the result (t, h, wide)."""
        if self.evicting or options.softcap is not None or options.sinks is not None:
            return latent.values(self.attend_span(layer, view, latent.absorbed(q), options))
        rows, _ = view.gathered(self.pool, layer, view.first(options.window))
        return latent.attend(q, rows, view.mask(options.window), options.scaling, options.causal)

    def attend_span(self, layer: int, view: SpanView, q: Tensor, options: AttentionOptions) -> Tensor:
        """Attention of one span; q (t, h, d), the result (t, h, e), values being (n, kv_heads, e)."""
        first = view.first(options.window)
        keys, values = view.gathered(self.pool, layer, first)
        mask = view.mask(options.window)
        if self.observer is not None:
            self.observer.observe(layer, view.span, q, keys, mask, options)
        return attention(
            q,
            keys,
            values,
            mask,
            scaling=options.scaling,
            softcap=options.softcap,
            causal=options.causal,
            sinks=options.sinks,
        )


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    scaling: float,
    softcap: float | None = None,
    causal: bool = False,
    sinks: Tensor | None = None,
) -> Tensor:
    """Grouped-query attention of one sequence. Returns (t, h, e) of q's dtype.

    Args:
        q: (t, h, d).
        k, v: (n, kv_heads, d) and (n, kv_heads, e); h is a multiple of kv_heads.
        mask: bool (t, n), True where seen; None: everything, or with ``causal`` the lower triangle (t = n).
        sinks: (h,).
    """
    if softcap is not None or sinks is not None:
        options = AttentionOptions(scaling, softcap, None, causal, sinks)
        return weighted_sum(weights(q.transpose(0, 1), k.transpose(0, 1), mask, options), v)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    out = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scaling, is_causal=causal and mask is None, enable_gqa=grouped
    )
    return out[0].transpose(0, 1)


def weights(q: Tensor, k: Tensor, mask: Tensor | None, options: AttentionOptions) -> Tensor:
    """Softmax weights float32 (h, t, n) of q (h, t, d) and k (kv_heads, n, d)."""
    s = scores(q, k, scaling=options.scaling, softcap=options.softcap)
    if options.causal and mask is None:
        mask = torch.ones(s.shape[1:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        s = s.masked_fill(~mask, -math.inf)
    return softmax(s, options.sinks)


def softmax(s: Tensor, sinks: Tensor | None) -> Tensor:
    """Weights float32 of scores (h, t, n), with the score of a sink (h,) in every sum."""
    if sinks is None:
        return s.softmax(dim=-1, dtype=torch.float32)
    column = sinks.to(s.dtype)[:, None, None].expand(*s.shape[:2], 1)
    return torch.cat([s, column], dim=-1).softmax(dim=-1, dtype=torch.float32)[..., :-1]


def scores(q: Tensor, k: Tensor, *, scaling: float, softcap: float | None) -> Tensor:
    """The input of the softmax, before the mask: (h, t, n)."""
    s = (q.unflatten(0, (len(k), -1)) @ k[:, None].transpose(-1, -2)).flatten(0, 1) * scaling
    return s if softcap is None else torch.tanh(s / softcap) * softcap


def weighted_sum(p: Tensor, v: Tensor) -> Tensor:
    """Values (n, kv_heads, d) averaged by weights (h, t, n): (t, h, d) of v's dtype."""
    grouped = p.to(v.dtype).unflatten(0, (v.shape[1], -1))
    return (grouped @ v.transpose(0, 1)[:, None]).flatten(0, 1).transpose(0, 1)
