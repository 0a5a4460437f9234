"""Attention over the block table, for any model of transformers: one function, registered once.

transformers' attention modules hand queries, keys and values (rotated already) to the function that their
config names. This one writes keys and values to the pool and attends, span by span, to what the pool holds:

    out = softmax(scaling q k^T, soft-capped, masked) v          over the places that a token may see

A step runs as one row (1, T), so that a token's attention does not depend on what else is in the batch.

Letters: T tokens of the step, t of a span, n places that are looked at, h heads, d head_dim.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from attar.errors import ModelError
from attar.runtime.kv.pool import KVPool
from attar.runtime.runner.view import SpanView
from attar.runtime.step import StepInput, TokenSpan

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
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in each layer; query (1, h, T, d), key and value (1, kv_heads, T, d).

    Args:
        paged: handed through the model's forward: an :class:`AttentionPass`, or the probe of ``probe.py``.

    Returns:
        (1, T, h, d), and no weights.

    Raises:
        ModelError: the model does not hand ``paged`` through, or wants of its attention what is not done.
    """
    kind = type(module).__name__
    if paged is None:
        raise ModelError(
            f"{kind} does not hand arguments through to its attention; the runtime cannot run it"
        )
    if attention_mask is not None or not getattr(module, "is_causal", True):
        raise ModelError(f"{kind} is not causal attention; the runtime runs causal models only")
    for name in ("s_aux", "position_bias"):
        if others.get(name) is not None:
            raise ModelError(f"{kind} passes {name!r} to its attention, which the runtime does not do")
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    found = paged.attend(
        module.layer_idx,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scaling=scaling,
        window=sliding_window,
        softcap=softcap,
    )
    return found[None], None


class AttentionOptions(NamedTuple):
    """What a layer asks of its attention, and whether an absent mask means the lower triangle."""

    scaling: float
    softcap: float | None
    window: int | None
    causal: bool


class AttentionObserver(Protocol):
    """Is shown queries and keys as they meet."""

    def see(
        self, layer: int, span: TokenSpan, q: Tensor, k: Tensor, mask: Tensor | None, how: AttentionOptions
    ) -> None:
        """q (t, h, d) of a span over k (n, kv_heads, d); mask as for :func:`attention`."""
        ...


class AttentionPass:
    """One step on its way through the layers.

    Args:
        step: what is run.
        pool: where keys and values are; the step's copies are made here.
        watch: is shown every span's attention, for eviction.
    """

    def __init__(self, step: StepInput, pool: KVPool, watch: AttentionObserver | None = None) -> None:
        self.pool, self.watch = pool, watch
        self.slots = pool.begin(step)
        self.views = [
            SpanView(span, tree, slice(start, stop), pool.device)
            for (span, tree), start, stop in zip(
                step.trees(), step.offsets[:-1], step.offsets[1:], strict=True
            )
        ]
        self.layers: list[int] = []  # that have attended

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
    ) -> Tensor:
        """q (T, h, d), k and v (T, kv_heads, d) of the step's tokens; returns (T, h, d)."""
        self.layers.append(layer)
        self.pool.write(layer, self.slots, k, v)
        out = torch.empty_like(q)
        for view in self.views:
            how = AttentionOptions(scaling, softcap, window, view.fresh)
            out[view.rows] = self.see(layer, view, q[view.rows], how)
        return out

    def see(self, layer: int, view: SpanView, q: Tensor, how: AttentionOptions) -> Tensor:
        """Attention of one span; q and the result (t, h, d)."""
        keys, values = self.pool.gather(layer, view.blocks, view.span.end, view.first(how.window))
        mask = view.mask(how.window)
        if self.watch is not None:
            self.watch.see(layer, view.span, q, keys, mask, how)
        return attention(q, keys, values, mask, scaling=how.scaling, softcap=how.softcap, causal=how.causal)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    scaling: float,
    softcap: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Grouped-query attention of one sequence.

    Args:
        q: (t, h, d).
        k, v: (n, kv_heads, d); h is a multiple of kv_heads.
        mask: bool (t, n), True where seen; None: everything, or with ``causal`` the lower triangle (t = n).

    Returns:
        (t, h, d) of q's dtype.
    """
    if softcap is not None:
        found = weights(
            q.transpose(0, 1), k.transpose(0, 1), mask, scaling=scaling, softcap=softcap, causal=causal
        )
        return weighted(found, v)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    found = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scaling, is_causal=causal and mask is None, enable_gqa=grouped
    )
    return found[0].transpose(0, 1)


def weights(
    q: Tensor, k: Tensor, mask: Tensor | None, *, scaling: float, softcap: float | None, causal: bool
) -> Tensor:
    """Softmax weights float32 (h, t, n) of q (h, t, d) and k (kv_heads, n, d)."""
    found = scores(q, k, scaling=scaling, softcap=softcap)
    if causal and mask is None:
        mask = torch.ones(found.shape[1:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        found = found.masked_fill(~mask, -math.inf)
    return found.softmax(dim=-1, dtype=torch.float32)


def scores(q: Tensor, k: Tensor, *, scaling: float, softcap: float | None) -> Tensor:
    """What the softmax is taken of, before the mask: (h, t, n)."""
    found = (q.unflatten(0, (len(k), -1)) @ k[:, None].transpose(-1, -2)).flatten(0, 1) * scaling
    return found if softcap is None else torch.tanh(found / softcap) * softcap


def weighted(found: Tensor, v: Tensor) -> Tensor:
    """Values (n, kv_heads, d) averaged by weights (h, t, n): (t, h, d) of v's dtype."""
    grouped = found.to(v.dtype).unflatten(0, (v.shape[1], -1))
    return (grouped @ v.transpose(0, 1)[:, None]).flatten(0, 1).transpose(0, 1)
