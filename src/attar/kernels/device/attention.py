"""Keys and values of the device runner: written to the pool of blocks, and attended to through block tables.

    out = sum_j softmax(s)_j v_j,   s_j = cap tanh(q k_j / cap), or q k_j          queries are scaled already

The keys of a token are divided into splits of SPLIT entries from the first of its sequence on, and splits
are merged in their order, so that a token's numbers do not depend on its batch. A sink is a score of a head
without a value (gpt-oss).

Letters: T tokens of the step, h query heads, g key and value heads, d head_dim; S sequences, X blocks of the
longest table, B slots of a block; W words of a tree's bits. Pool: (blocks, B, g, d); with codes of one byte
(kv_codes.py) scales float32 (blocks, B, g, 1). With codes of 4 bits (kv_int4.py) bytes (blocks, B, g, d / 2),
pairs s, m float16 (..., 2) as scales, and a basis float32 (g, 4, d): D, 1 / D, and c D H of both c.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attar.kernels import kv_int4
from attar.kernels.device.elementwise import rms_norm, tanh
from attar.kernels.device.planes import WORD
from attar.kernels.device.registry import operator
from attar.kernels.kv_codes import encode, unpacked

SPLIT = 256  # entries
LOWEST = torch.finfo(torch.float32).min
TOKENS = 32  # whose keys the torch body gathers at a time


def _rope_write_shape(qkv: Tensor, keys: Tensor, heads: int) -> Tensor:
    g = keys.shape[2]
    d = qkv.shape[1] // (heads + 2 * g)
    torch._check(d in (keys.shape[3], 2 * keys.shape[3]))
    return qkv.new_empty(qkv.shape[0], heads, d)


@operator(_rope_write_shape, mutates=("keys", "values", "key_scales", "value_scales"))
def rope_write(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    rotary: Tensor | None,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    keys: Tensor,
    values: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    basis: Tensor | None,
    heads: int,
    eps: float,
    scale: float,
    wide: bool,
) -> Tensor:
    """Norms and rotates queries and keys, scales queries, and writes keys and values to their slots.

    Args:
        qkv: (T, (h + 2 g) d) float.
        positions, slots: int32 (T,).
        rotary: float32 (context, r), r / 2 cosines, then sines: of the pairs (i, i + r / 2) of a head.
        query_norm, key_norm: float32 (d,), or over all heads together with ``wide``.
        keys, values: the layer's part of the pool: float, int8, float8_e4m3fn, or uint8 of 4-bit codes.
        basis: of these.
        heads: h.

    Returns:
        Queries (T, h, d) of qkv's dtype; with a basis q D^-1 H.
    """
    g = keys.shape[2]
    d = qkv.shape[1] // (heads + 2 * g)
    q, k, v = qkv.float().split([heads * d, g * d, g * d], dim=1)
    if wide:
        q, k = (x if w is None else rms_norm(x, w, eps) for x, w in ((q, query_norm), (k, key_norm)))
    q, k, v = (x.unflatten(1, (-1, d)) for x in (q, k, v))
    if not wide:
        q, k = (x if w is None else rms_norm(x, w, eps) for x, w in ((q, query_norm), (k, key_norm)))
    if rotary is not None:
        angles = rotary.index_select(0, positions)[:, None]
        q, k = _rotated(q, angles), _rotated(k, angles)
    q = q * scale
    if basis is not None:
        q = kv_int4.rotated(q * basis[:, 1].repeat_interleave(heads // g, 0))
    for x, pool, scales in ((k, keys, key_scales), (v, values, value_scales)):
        if scales is None:
            codes = x.to(pool.dtype)
        else:
            codes, s = _coded(x, pool.dtype, None if basis is None or pool is values else basis)
            scales.view(-1, *scales.shape[2:]).index_copy_(0, slots.long(), s)
        rows, stored = pool.view(-1, *pool.shape[2:]), codes
        if pool.dtype == torch.float8_e4m3fn:  # torch indexes no float8
            rows, stored = rows.view(torch.int8), codes.view(torch.int8)
        rows.index_copy_(0, slots.long(), stored)
    return q.to(qkv.dtype)


def _paged_attention_shape(q: Tensor) -> Tensor:
    return torch.empty_like(q)


@operator(_paged_attention_shape)
def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    basis: Tensor | None,
    tables: Tensor,
    spans: Tensor,
    positions: Tensor,
    lengths: Tensor,
    firsts: Tensor,
    tree: Tensor,
    sinks: Tensor | None,
    window: int,
    soft_cap: float,
) -> Tensor:
    """Attention of every token over the entries of its sequence that it sees.

    Entry j of sequence s is in slot tables[s, j / B] B + j % B. A token sees the entries [0, length) and, for
    each bit i of its tree, the entry length + i, which is the step's token first + i. With a window, only
    positions above its own minus the window; the position of an entry before ``length`` is its index.

    Args:
        q: (T, h, d), scaled; with a basis q D^-1 H.
        tables: int32 (S, X); -1: a block that was released, which no token sees.
        spans: int32 (T,), the sequence of each token.
        positions, lengths, firsts: int32 (T,).
        tree: int32 (T, W); bit i of a token is bit i % 32 of word i / 32.
        sinks: float32 (h,).
        window: 0: none.
        soft_cap: of scores; 0: none.

    Returns:
        (T, h, d) of q's dtype.
    """
    B, g = keys.shape[1:3]
    entries = tables.shape[1] * B
    splits = -(-entries // SPLIT)
    words = torch.nn.functional.pad(tree, (0, 1))  # of entries outside of the tree
    parts = []
    for start in range(0, len(q), TOKENS):
        part = slice(start, start + TOKENS)
        last, first, at = lengths[part, None], firsts[part, None], positions[part, None]
        table, queries = tables[spans[part]], q[part].float().unflatten(1, (g, -1))  # (t, g, h / g, d)
        state = _empty(queries)
        for split in range(splits):
            j = torch.arange(split * SPLIT, (split + 1) * SPLIT, device=q.device, dtype=torch.int32)[None]
            block = table[:, (j[0] // B).clamp(max=table.shape[1] - 1)]
            node = j - last  # of the tree
            word = torch.where((node >= 0) & (node < tree.shape[1] * WORD), node // WORD, tree.shape[1])
            drafted = (words[part].gather(1, word.long()) >> (node % WORD)) & 1 == 1
            seen = ((node < 0) | drafted) & (j < entries) & (block >= 0)
            if window:
                token = (first + node).clamp(0, len(q) - 1)
                seen &= torch.where(node < 0, j, positions[token]) > at - window
            slot = (block.clamp(min=0) * B + j % B).long()
            k = _gathered(keys, key_scales, slot, basis)
            v = _gathered(values, value_scales, slot)
            scores = queries @ k.mT  # (t, g, h / g, SPLIT)
            if soft_cap:
                scores = tanh(scores / soft_cap) * soft_cap
            scores = scores.masked_fill(~seen[:, None, None], -math.inf)
            v = v.masked_fill(~seen[:, None, :, None], 0.0)  # what nobody sees may be no number
            state = _merged(state, scores, v)
        peak, total, acc = state
        if sinks is not None:
            total = total + (sinks.view(g, -1, 1) - peak).exp()
        out = acc / total
        parts.append((out if basis is None else kv_int4.rotated(out)).flatten(1, 2))
    return torch.cat(parts).to(q.dtype)


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Heads (T, n, d) by angles (T, 1, r)."""
    cosines, sines = angles.chunk(2, dim=-1)
    a, b, unturned = x.tensor_split([cosines.shape[-1], angles.shape[-1]], dim=-1)
    return torch.cat([a * cosines - b * sines, b * cosines + a * sines, unturned], dim=-1)


def _coded(x: Tensor, code: torch.dtype, basis: Tensor | None) -> tuple[Tensor, Tensor]:
    """Codes and scales of heads (T, g, d); of 4 bits with a basis as keys, without as values."""
    if code != torch.uint8:
        return encode(x, code)
    if basis is None:
        return kv_int4.encode(x)
    x = x.clamp(-kv_int4.LARGEST, kv_int4.LARGEST)  # so that no sum of the rotation is infinite
    return kv_int4.encode_turned(kv_int4.rotated(x * basis[:, 0]), basis[:, 2:].unbind(1))


def _gathered(pool: Tensor, scales: Tensor | None, slots: Tensor, basis: Tensor | None = None) -> Tensor:
    """float32 (t, g, n, d) of slots (t, n); contiguous, so that products do not depend on t. Of 4-bit codes
    q s + m, and c D H of keys more."""
    rows = pool.view(-1, *pool.shape[2:])
    if pool.dtype == torch.float8_e4m3fn:
        rows = rows.view(torch.int8)
    x = rows[slots].view(pool.dtype)
    if scales is None:
        return x.float().transpose(1, 2).contiguous()
    of = scales.view(-1, *scales.shape[2:])[slots].float()
    if pool.dtype != torch.uint8:
        return (x.float() * of).transpose(1, 2).contiguous()
    s, m = of.split(1, dim=-1)
    y = torch.addcmul(m, unpacked(x, 4), s.abs())
    if basis is not None:
        y = y + torch.where(s < 0, basis[:, 3], basis[:, 2])
    return y.transpose(1, 2).contiguous()


def _empty(queries: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Peak, total and sum of no entries, of queries (t, g, n, d)."""
    none = queries.new_zeros(*queries.shape[:3], 1)
    return none - math.inf, none, torch.zeros_like(queries)


def _merged(state: tuple[Tensor, Tensor, Tensor], scores: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """With a further split: scores (t, g, n, SPLIT), values (t, g, SPLIT, d)."""
    peak, total, acc = state
    of_split = scores.amax(-1, keepdim=True)
    weights = (scores - of_split.clamp(min=LOWEST)).exp()  # of a split without entries: 0
    new = torch.maximum(peak, of_split)
    before, now = (x.sub(new.clamp(min=LOWEST)).exp() for x in (peak, of_split))
    return (
        new,
        before * total + now * weights.sum(-1, keepdim=True),
        before * acc + now * (weights @ v),
    )
