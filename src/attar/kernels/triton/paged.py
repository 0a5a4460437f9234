"""Attention over the paged pool: block tables, trees of draft tokens, sliding windows, sinks, soft caps.

    out = sum_j p_j v_j / (sum_j p_j + exp(sink - peak)) ,   p_j = exp(score_j - peak)      j: entries seen

Letters: T tokens of the step, S sequences, h query heads of g key heads, d head_dim, B slots of a block, X
blocks of a table's row, W words of tree bits. Arguments as in ``kernels/device``.

The entries of a sequence are divided into splits of 256, by their number. Each split has its own peak, sum
and weighted values, and splits are merged in order: a token's bits depend on its own entries alone. Few
tokens take a program for each split (or for every n-th) and a second launch that merges; many take a
program that merges itself. A tile of entries that a token does not see changes nothing: exp(0) times the
sum so far, and zero to add.

A program has some heads of one key head, of one token or of several neighbouring ones, in 16 or 32 rows of
mma.m16n8k16; sums of p are products with ones, so that their order is the instruction's, too.

Bounds come from memory (``lengths``), and from no argument: a captured launch stays right when sequences
grow.

Source of the online softmax: Milakov, Gimelshein 2018, arXiv 1805.02867; of splits: Flash-Decoding (Dao,
Haziza, Massa, Sizov 2023). Bytes of FP8 are decoded by arithmetic, on every card alike. Codes of 4 bits
(``kernels/kv_int4.py``) become numbers of the type that is multiplied, and their sum is rotated back once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attar.kernels.triton.fused import KINDS
from attar.kernels.triton.rounding import e4m3_value, hadamard, tanh

SPLIT = tl.constexpr(256)  # entries
LOWEST = tl.constexpr(-1e30)  # the peak of nothing
PROGRAMS = 1024  # wanted where splits are divided among them
ENOUGH = 264  # programs, without a division of the splits
LARGEST = 1 << 28  # numbers of the splits' sums
KEYS = 32  # entries of a tile
STAGES = 2
REGISTERS = 255  # the most: none is spilled for a thread more


@triton.jit
def stored_tile(plane, rows, inside, i, D: tl.constexpr, KIND: tl.constexpr, like):
    """Codes or numbers (entries, i) of the pool in the type of ``like``; FP8 times 2^-8."""
    tile = tl.load(plane + rows[:, None] * D + i[None, :], mask=inside[:, None] & (i < D)[None, :], other=0)
    if KIND == "fp8":
        tile = e4m3_value(tile)
    return tile.to(tl.float32).to(like)


@triton.jit
def int4_tile(
    plane, pairs, basis, rows, inside, i, D: tl.constexpr, KEYS: tl.constexpr, SIZE: tl.constexpr,
    KEY: tl.constexpr, like,
):  # fmt: skip
    """q s + m (KEYS, SIZE) in the type of ``like``, and of keys c D H more; pairs: two float16 in 32 bits."""
    byte = tl.arange(0, SIZE // 2)
    some = inside[:, None] & (byte < D // 2)[None, :]
    two = tl.load(plane + rows[:, None] * (D // 2) + byte[None, :], mask=some, other=0)
    code = tl.reshape(tl.join(two & 15, two >> 4), (KEYS, SIZE)).to(tl.float32)
    pair = tl.load(pairs + rows, mask=inside, other=0)
    s = (pair & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    m = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    y = tl.fma(code, tl.broadcast_to(tl.abs(s)[:, None], code.shape), m[:, None])
    if KEY:
        usual = tl.load(basis + 2 * D + i, mask=i < D, other=0.0)[None, :]
        first = tl.load(basis + 3 * D + i, mask=i < D, other=0.0)[None, :]
        y += tl.where((s < 0)[:, None], first, usual)
    return tl.where(inside[:, None] & (i < D)[None, :], y, 0.0).to(like)


@triton.jit
def merged(total, peak, weight, acc, top, sum_):
    """A split's values, peak and sum added to those so far; (rows, i), (rows,), (rows,)."""
    new = tl.maximum(peak, top)
    before, now = tl.exp(peak - new), tl.exp(top - new)
    total = tl.fma(total, tl.broadcast_to(before[:, None], total.shape), acc * now[:, None])
    return total, new, tl.fma(weight, before, sum_ * now)


@triton.jit
def finished(
    total, peak, weight, sinks, head, inside, SINKS: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
    TURNED: tl.constexpr,
):  # fmt: skip
    """The output (ROWS, SIZE) of merged splits; TURNED: rows of the Hadamard matrix of its store, or 0."""
    if SINKS:
        sink = tl.load(sinks + head, mask=inside, other=0.0)
        new = tl.maximum(peak, sink)
        before = tl.exp(peak - new)
        total, weight = total * before[:, None], tl.fma(weight, before, tl.exp(sink - new))
    total = total / tl.where(weight == 0.0, 1.0, weight)[:, None]
    return hadamard(total, ROWS, SIZE, TURNED) if TURNED else total


@triton.jit
def attend_split(
    q, keys, values, key_scales, value_scales, basis, table, kv, positions, mine, token, length, first,
    position, tree, begin, end, start, blocks, window, soft_cap,
    KV_HEADS: tl.constexpr, D: tl.constexpr, B: tl.constexpr, W: tl.constexpr, KIND: tl.constexpr,
    SOFT: tl.constexpr, TYPE: tl.constexpr, VALUE_TYPE: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, SIZE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Values (ROWS, SIZE), peak and sum (ROWS,) of entries [begin, end) of one sequence.

    Args:
        q: (ROWS, SIZE). table: the sequence's row. kv: the key head.
        mine: bool (ROWS,), rows of this sequence.
        start: the first entry that any row sees. blocks: X.
        TYPE, VALUE_TYPE: in which scores and values are multiplied.
    """
    i = tl.arange(0, SIZE)
    acc = tl.zeros((ROWS, SIZE), tl.float32)
    peak = tl.full((ROWS,), LOWEST, tl.float32)
    sum_ = tl.zeros((ROWS, 16), tl.float32)
    ones = tl.full((KEYS, 16), 1.0, VALUE_TYPE)
    for base in range(tl.maximum(begin, start // KEYS * KEYS), end, KEYS):
        j = base + tl.arange(0, KEYS)
        known = (j < end) & (j // B < blocks)
        block = tl.load(table + j // B, mask=known, other=-1)
        known &= (block >= 0) & (j >= start)
        cells = (block.to(tl.int64) * B + j % B) * KV_HEADS + kv
        if KIND == "int4":
            k = int4_tile(keys, key_scales, basis + kv * 4 * D, cells, known, i, D, KEYS, SIZE, True, TYPE)
            v = int4_tile(values, value_scales, basis, cells, known, i, D, KEYS, SIZE, False, VALUE_TYPE)
        else:
            k = stored_tile(keys, cells, known, i, D, KIND, TYPE)
            v = stored_tile(values, cells, known, i, D, KIND, VALUE_TYPE)
        seen = j[None, :] < length[:, None]
        at = tl.broadcast_to(j[None, :], (ROWS, KEYS))
        if W:
            inner = j[None, :] - length[:, None]
            drafted = mine[:, None] & (inner >= 0) & (inner < 32 * W)
            word = tl.load(tree + token[:, None] * W + inner // 32, mask=drafted, other=0)
            drafted &= ((word >> (inner & 31)) & 1) == 1
            at = tl.where(drafted, tl.load(positions + first[:, None] + inner, mask=drafted, other=0), at)
            seen |= drafted
        seen &= mine[:, None] & known[None, :] & ((window <= 0) | (at > position[:, None] - window))
        score = tl.dot(q.to(TYPE), tl.trans(k), input_precision=PRECISION)
        if KIND == "int8" or KIND == "fp8":
            unit: tl.constexpr = 256.0 if KIND == "fp8" else 1.0
            score *= (tl.load(key_scales + cells, mask=known, other=0.0) * unit)[None, :]
        if SOFT:
            score = soft_cap * tanh(score / soft_cap)
        score = tl.where(seen, score, float("-inf"))
        new = tl.maximum(peak, tl.max(score, 1))
        alpha = tl.exp(peak - new)
        p = tl.exp(score - new[:, None])
        sum_ = tl.dot(p.to(VALUE_TYPE), ones, sum_ * alpha[:, None], input_precision=PRECISION)
        if KIND == "int8" or KIND == "fp8":
            p *= (tl.load(value_scales + cells, mask=known, other=0.0) * unit)[None, :]
        acc = tl.dot(p.to(VALUE_TYPE), v, acc * alpha[:, None], input_precision=PRECISION)
        peak = new
    return acc, peak, tl.max(sum_, 1)  # 16 equal columns


@triton.jit
def attend_kernel(
    q, keys, values, key_scales, value_scales, basis, tables, spans, positions, lengths, firsts, tree, sinks,
    out, sums, T, blocks, window, soft_cap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, B: tl.constexpr, W: tl.constexpr,
    KIND: tl.constexpr, SOFT: tl.constexpr, SINKS: tl.constexpr, TYPE: tl.constexpr, VALUE_TYPE: tl.constexpr,
    PRECISION: tl.constexpr, DIVIDED: tl.constexpr, TOKENS: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, SIZE: tl.constexpr, KEYS: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """Some heads of one key head of TOKENS neighbouring tokens.

    Args:
        sums: with DIVIDED float32 (splits, T, h, d + 2): values, peak, sum of each split.
        GROUP: heads of a program, of the h / g of a key head.
    """
    of_key: tl.constexpr = HEADS // KV_HEADS
    parts: tl.constexpr = (of_key + GROUP - 1) // GROUP
    kv, part = tl.program_id(1) // parts, tl.program_id(1) % parts
    row, i = tl.arange(0, ROWS), tl.arange(0, SIZE)
    token = tl.program_id(0) * TOKENS + row // GROUP
    inner = part * GROUP + row % GROUP
    head = kv * of_key + inner
    inside = (row < TOKENS * GROUP) & (token < T) & (inner < of_key)
    at = (token.to(tl.int64) * HEADS + head)[:, None]
    tile = tl.load(q + at * D + i[None, :], mask=inside[:, None] & (i < D)[None, :], other=0.0)
    span = tl.load(spans + token, mask=inside, other=-1)
    length = tl.load(lengths + token, mask=inside, other=0)
    position = tl.load(positions + token, mask=inside, other=0)
    first = tl.load(firsts + token, mask=inside, other=0)
    total = tl.zeros((ROWS, SIZE), tl.float32)
    peak = tl.full((ROWS,), LOWEST, tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    lowest = tl.min(tl.where(inside, span, 2147483647), 0)
    for sequence in range(lowest, tl.max(span, 0) + 1):
        mine = inside & (span == sequence)
        stop = tl.minimum(tl.max(tl.where(mine, length + 32 * W, 0), 0), blocks * B)
        start = tl.min(tl.where(mine, position, 2147483647), 0) - window + 1
        start = tl.where(window > 0, tl.maximum(start, 0), 0)
        first_split, step = start // SPLIT, 1
        if DIVIDED:
            step = tl.num_programs(2)
            behind = tl.program_id(2) - first_split
            first_split += (behind % step + step) % step
        for split in range(first_split, (stop + SPLIT - 1) // SPLIT, step):
            acc, top, sum_ = attend_split(
                tile, keys, values, key_scales, value_scales, basis, tables + sequence * blocks, kv,
                positions, mine, token, length, first, position, tree,
                split * SPLIT, tl.minimum(split * SPLIT + SPLIT, stop), start, blocks, window, soft_cap,
                KV_HEADS, D, B, W, KIND, SOFT, TYPE, VALUE_TYPE, PRECISION, ROWS, SIZE, KEYS,
            )  # fmt: skip
            if DIVIDED:
                to = sums + (split * T * HEADS + at) * (D + 2)
                tl.store(to + i[None, :], acc, mask=mine[:, None] & (i < D)[None, :])
                tl.store(to + D, top[:, None], mask=mine[:, None])
                tl.store(to + D + 1, sum_[:, None], mask=mine[:, None])
            else:
                total, peak, weight = merged(total, peak, weight, acc, top, sum_)
    if not DIVIDED:
        total = finished(total, peak, weight, sinks, head, inside, SINKS, ROWS, SIZE, TURNED)
        tl.store(
            out + at * D + i[None, :], total.to(out.dtype.element_ty), mask=inside[:, None] & (i < D)[None, :]
        )


@triton.jit
def merge_kernel(
    sums, positions, lengths, sinks, out, T, blocks, window,
    HEADS: tl.constexpr, D: tl.constexpr, B: tl.constexpr, W: tl.constexpr, SINKS: tl.constexpr,
    SIZE: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """The splits of one token and head, in order."""
    token, head = tl.program_id(0), tl.program_id(1) + tl.arange(0, 1)
    i = tl.arange(0, SIZE)
    stop = tl.minimum(tl.load(lengths + token) + 32 * W, blocks * B)
    start = tl.where(window > 0, tl.maximum(tl.load(positions + token) - window + 1, 0), 0)
    at = token.to(tl.int64) * HEADS + head
    total = tl.zeros((1, SIZE), tl.float32)
    peak = tl.full((1,), LOWEST, tl.float32)
    weight = tl.zeros((1,), tl.float32)
    for split in range(start // SPLIT, (stop + SPLIT - 1) // SPLIT):
        of = sums + (split * T * HEADS + at) * (D + 2)
        acc = tl.load(of[:, None] + i[None, :], mask=(i < D)[None, :], other=0.0)
        total, peak, weight = merged(total, peak, weight, acc, tl.load(of + D), tl.load(of + D + 1))
    total = finished(total, peak, weight, sinks, head, head < HEADS, SINKS, 1, SIZE, TURNED)
    tl.store(out + at[:, None] * D + i[None, :], total.to(out.dtype.element_ty), mask=(i < D)[None, :])


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
    """Attention (T, h, d) of scaled queries (T, h, d)."""
    (T, h, d), (B, g), (S, X), W = q.shape, keys.shape[1:3], tables.shape, tree.shape[1]
    kind = KINDS.get(keys.dtype, "plain")
    score_type, value_type, precision = _types(q.dtype, keys.dtype)
    exact = score_type == tl.float32 and precision == "ieee"  # float32 without tensor cores
    group = min(h // g, 16 if score_type == tl.float32 else 32)
    rows = 16 if score_type == tl.float32 or (T < 8 * S and group <= 16) else 32
    tokens = 1 if T <= S else rows // group
    size = max(16, triton.next_power_of_2(d))
    tiles = triton.cdiv(T, tokens), g * triton.cdiv(h // g, group)
    splits = triton.cdiv(X * B, SPLIT.value)
    fits = splits * T * h * (d + 2) <= LARGEST
    divided = splits > 1 and tiles[0] * tiles[1] < ENOUGH and fits
    programs = min(splits, triton.cdiv(PROGRAMS, tiles[0] * tiles[1])) if divided else 1
    out = torch.empty_like(q)
    sums = torch.empty((splits if divided else 0, T, h, d + 2), dtype=torch.float32, device=q.device)
    planes = (plane.view(torch.int8) if kind in ("int8", "fp8") else plane for plane in (keys, values))
    scales = [q if part is None else part for part in (key_scales, value_scales)]
    if kind == "int4":
        scales = [pairs.view(torch.int32) for pairs in scales]
    turned = d & -d if kind == "int4" else 0
    attend_kernel[(*tiles, programs)](
        q, *planes, *scales, q if basis is None else basis, tables, spans, positions, lengths, firsts, tree,
        q if sinks is None else sinks,
        out, sums, T, X, window, soft_cap,
        h, g, d, B, W, kind, soft_cap > 0, sinks is not None, score_type, value_type, precision, divided,
        tokens, group, rows, size, KEYS // 2 if exact else KEYS, turned, num_stages=STAGES,
        num_warps=8 if turned and rows > 16 else 4, maxnreg=REGISTERS,
    )  # fmt: skip
    if divided:
        merge_kernel[(T, h)](
            sums, positions, lengths, q if sinks is None else sinks, out, T, X, window,
            h, d, B, W, sinks is not None, size, turned, num_warps=1,
        )  # fmt: skip
    return out


def _types(queries: torch.dtype, keys: torch.dtype) -> tuple[tl.dtype, tl.dtype, str]:
    """In which types scores and values are multiplied, and how float32 is.

    Codes of one byte are exact in both 16-bit types; weights times the scales of values keep their range in
    bfloat16. Where queries and stored numbers are of different 16-bit types, both are exact in TF32.
    """
    names = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
    if queries == torch.float32 or keys == torch.float32:
        return tl.float32, tl.float32, "ieee"
    if keys in KINDS:
        return names[queries], tl.bfloat16, "ieee"
    if queries != keys:
        return tl.float32, tl.float32, "tf32"
    return names[queries], names[keys], "ieee"
