"""The operators of the device runner against float64, written another way; torch's own checks of them."""

from __future__ import annotations

import math

import pytest
import torch
from torch.library import opcheck

from attar.kernels import kv_int4
from attar.kernels.device import native, planes
from attar.kernels.device.attention import paged_attention, rope_write
from attar.kernels.device.elementwise import add_norm, gated, route
from attar.kernels.device.products import dense_product, experts_dense, experts_product, packed_product
from attar.kernels.kv_codes import encode
from attar.kernels.kv_int4 import decode, rotated

BITS = range(2, 9)
CLOSE = {"rtol": 1e-4, "atol": 1e-4, "check_dtype": False}


def drawn(seed=0):
    return torch.Generator().manual_seed(seed)


def matrix(bits, rows=6, columns=96, group=32, zeros=True, seed=0):
    """Codes (N, K), scales and zeros (K / G, N)."""
    generator = drawn(seed)
    codes = torch.randint(0, 2**bits, (rows, columns), generator=generator, dtype=torch.uint8)
    scales = torch.rand(columns // group, rows, generator=generator) + 0.1
    points = torch.randint(0, 2**bits, scales.shape, generator=generator, dtype=torch.uint8)
    return codes, scales, points if zeros else None


def values(codes, scales, zeros, bits):
    """W float64, number by number."""
    rows, columns = codes.shape
    group = columns // len(scales)
    result = torch.empty(rows, columns, dtype=torch.float64)
    for n in range(rows):
        for k in range(columns):
            point = 2 ** (bits - 1) if zeros is None else float(zeros[k // group, n])
            result[n, k] = (float(codes[n, k]) - point) * float(scales[k // group, n])
    return result


@pytest.mark.parametrize("bits", BITS)
def test_words_hold_the_bits_of_their_definition(bits):
    codes, *_ = matrix(bits, rows=3, columns=64)
    words = planes.join(codes, bits)
    assert words.shape == (64 * bits // 32, 3) and words.dtype == torch.int32
    assert torch.equal(planes.cut(words, bits), codes)
    first, shift = 0, 0
    for size in planes.plane_bits(bits):
        for k in range(64):
            word, place = first + k * size // 32, k * size % 32
            part = [(int(words[word, n]) >> place) & (2**size - 1) for n in range(3)]
            assert part == [(int(codes[n, k]) >> shift) & (2**size - 1) for n in range(3)]
        first, shift = first + 64 * size // 32, shift + size
    assert first == len(words) and shift == bits


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("bits", BITS)
def test_products_of_codes(bits, zeros):
    codes, scales, points = matrix(bits, zeros=zeros)
    x, bias = torch.randn(5, 96, generator=drawn(1)), torch.randn(6, generator=drawn(2))
    y = packed_product(x, planes.join(codes, bits), scales, points, bias, bits, torch.float32)
    wanted = x.double() @ values(codes, scales, points, bits).T + bias
    torch.testing.assert_close(y.double(), wanted, **CLOSE)


@pytest.mark.parametrize("gather", [2, 0])
def test_products_of_experts(gather):
    """Pair by pair; one expert has none."""
    chosen = torch.tensor([[3, 0], [0, 2], [3, 2], [0, 3]])
    x = torch.randn(4 if gather else 8, 96, generator=drawn(1))
    parts = [matrix(3, seed=e) for e in range(4)]
    words, scales, points = (
        torch.stack([planes.join(part[0], 3) if i == 0 else part[i] for part in parts]) for i in range(3)
    )
    bias = torch.randn(4, 6, generator=drawn(5))
    order = chosen.flatten().argsort(stable=True).int()
    ends = torch.bincount(chosen.flatten(), minlength=4).cumsum(0).int()
    y = experts_product(x, words, scales, points, bias, order, ends, 3, gather)
    weights = torch.stack([values(*part, 3) for part in parts])
    assert torch.equal(experts_dense(x, planes.dense(words, scales, points, 3), bias, order, ends, gather), y)
    for place, pair in enumerate(order.tolist()):
        expert = int(chosen.flatten()[pair])
        row = x[pair // 2] if gather else x[place]
        wanted = weights[expert] @ row.double() + bias[expert]
        torch.testing.assert_close(y[place if gather else pair].double(), wanted, **CLOSE)


@pytest.mark.parametrize("gather", [2, 0])
def test_torchs_own_products_are_near(gather):
    """What a GPU runs for dense weights, in bfloat16, on the CPU."""
    generator = drawn(3)
    x = torch.randn(4 if gather else 8, 64, generator=generator).bfloat16()
    weight = torch.randn(3, 16, 64, generator=generator).bfloat16()
    bias = torch.randn(3, 16, generator=generator)
    order, ends = torch.tensor([1, 3, 4, 0, 2, 5, 6, 7]).int(), torch.tensor([3, 3, 8]).int()
    given = (x, weight, bias, order, ends, gather)
    near = {"rtol": 0.02, "atol": 0.1}
    torch.testing.assert_close(native.native_experts(*given), experts_dense(*given), **near)
    given = (x, weight[0], bias[0], torch.float32)
    torch.testing.assert_close(native.native_product(*given), dense_product(*given), **near)


def slow_route(logits, correction, active, scoring, normalized, scaling, groups, active_groups, top):
    """Of one token, with lists: [(expert, share)] by descending score."""
    if scoring == "sigmoid":
        scores = [1 / (1 + math.exp(-value)) for value in logits]
    else:
        total = sum(math.exp(value) for value in logits)
        scores = [math.exp(value) / total for value in logits]
    ranked = [s + c for s, c in zip(scores, correction, strict=True)]
    size = len(ranked) // groups
    of_group = [sum(sorted(ranked[g * size : (g + 1) * size])[-top:]) for g in range(groups)]
    best = sorted(range(groups), key=lambda g: -of_group[g])[:active_groups]
    allowed = [e for e in range(len(ranked)) if e // size in best]
    chosen = sorted(allowed, key=lambda e: -ranked[e])[:active]
    sum_of_scores = sum(scores[e] for e in chosen) if normalized else 1.0
    return [(e, scores[e] / sum_of_scores * scaling) for e in chosen]


@pytest.mark.parametrize(
    "choice",
    [
        (2, "softmax", False, 1.0, 1, 1, 1),
        (3, "sigmoid", True, 2.5, 4, 2, 2),
        (2, "softmax", True, 1.0, 2, 1, 1),
    ],
)
@pytest.mark.parametrize("shared", [0, 2])
def test_the_choice_of_experts(choice, shared):
    x, router = torch.randn(7, 16, generator=drawn(1)), torch.randn(8, 16, generator=drawn(2))
    bias, correction = torch.randn(8, generator=drawn(3)), torch.rand(8, generator=drawn(4))
    gate = torch.randn(16, generator=drawn(5))
    shares, order, ends, share = route(x, router, bias, correction, gate, *choice, shared)
    pairs = []
    for token in range(7):
        logits = (router.double() @ x[token].double() + bias).tolist()
        of_shared = 1 / (1 + math.exp(-float(x[token].double() @ gate.double())))
        wanted = slow_route(logits, correction.tolist(), *choice)
        wanted += [(8 + part, of_shared) for part in range(shared)]
        pairs += [expert for expert, _ in wanted]
        torch.testing.assert_close(shares[token].tolist(), [part for _, part in wanted], **CLOSE)
        torch.testing.assert_close(float(share[token]), of_shared, **CLOSE)
    assert order.tolist() == sorted(range(len(pairs)), key=lambda pair: pairs[pair])
    assert ends.tolist() == [sum(pair <= e for pair in pairs) for e in range(8 + shared)]


def test_of_equal_experts_the_first_is_chosen():
    _, order, _, share = route(
        torch.ones(1, 4), torch.ones(6, 4), None, None, None, 2, "softmax", True, 1.0, 1, 1, 1, 0
    )
    _, _, ends, _ = route(
        torch.ones(1, 4), torch.ones(6, 4), None, None, None, 2, "softmax", True, 1.0, 3, 2, 1, 0
    )
    assert order.tolist() == [0, 1] and share.tolist() == [1.0] and ends.tolist() == [1, 2, 2, 2, 2, 2]


@pytest.mark.parametrize("post", [False, True])
def test_sums_and_norms(post):
    x, y = (torch.randn(3, 8, generator=drawn(seed)) for seed in (1, 2))
    routed, shares = torch.randn(3, 2, 8, generator=drawn(3)), torch.rand(3, 2, generator=drawn(4))
    share, weight = torch.rand(3, generator=drawn(5)), torch.rand(8, generator=drawn(6))
    after = torch.rand(8, generator=drawn(7)) if post else None
    stream = x.clone()
    normed = add_norm(stream, y, share, routed, shares, after, weight, 1e-5, torch.float32)
    for t in range(3):
        added = share[t].double() * y[t] + sum(shares[t, i].double() * routed[t, i] for i in range(2))
        if after is not None:
            added = added / (added.square().mean() + 1e-5).sqrt() * after
        wanted = x[t] + added
        torch.testing.assert_close(stream[t].double(), wanted, **CLOSE)
        wanted = wanted / (wanted.square().mean() + 1e-5).sqrt() * weight
        torch.testing.assert_close(normed[t].double(), wanted, **CLOSE)


@pytest.mark.parametrize("name", ["silu", "gelu_tanh", "clamped_swiglu"])
def test_activations(name):
    x = torch.randn(3, 20, generator=drawn()).mul_(9)
    g, u = x.double().chunk(2, dim=1)
    if name == "silu":
        wanted = g / (1 + (-g).exp()) * u
    elif name == "gelu_tanh":
        wanted = 0.5 * g * (1 + (math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)).tanh()) * u
    else:
        g, u = g.clamp(max=7), u.clamp(-7, 7)
        wanted = g / (1 + (-1.702 * g).exp()) * (u + 1)
    torch.testing.assert_close(gated(x, name).double(), wanted, **CLOSE)


HEADS, KV_HEADS, DIM, BLOCK = 6, 2, 8, 16
STORES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn]


def pool(dtype, blocks=48):
    keys, values = (torch.randn(blocks, BLOCK, KV_HEADS, DIM, generator=drawn(seed)) for seed in (1, 2))
    if dtype not in (torch.int8, torch.float8_e4m3fn):
        return keys.to(dtype), values.to(dtype), None, None, None
    (keys, of_keys), (values, of_values) = encode(keys, dtype), encode(values, dtype)
    return keys, values, of_keys, of_values, None


def step(contexts, trees=False):
    """A token for each context of a sequence, the last with a tree of four; arguments from tables to tree."""
    blocks = iter(torch.randperm(47, generator=drawn(9)).add(1).tolist())
    tables = [[next(blocks) for _ in range(-(-(length + 4) // BLOCK))] for length in contexts]
    longest = max(map(len, tables))
    table = torch.tensor([[*row, *[0] * (longest - len(row))] for row in tables], dtype=torch.int32)
    spans, positions = [*range(len(contexts))], [length - 1 for length in contexts]
    lengths, firsts, tree = [*contexts], [*range(len(contexts))], [0] * len(contexts)
    if trees:
        past, first = contexts[-1], len(contexts) - 1
        spans[-1:], firsts[-1:], lengths[-1:] = [spans[-1]] * 4, [first] * 4, [past] * 4
        positions[-1:] = [past, past + 1, past + 1, past + 2]
        tree[-1:] = [0b0001, 0b0011, 0b0101, 0b1011]
    numbers = (torch.tensor(part, dtype=torch.int32) for part in (spans, positions, lengths, firsts))
    words = torch.tensor(tree, dtype=torch.int32)[:, None] if trees else torch.zeros(len(spans), 0).int()
    return table, *numbers, words


def attended(q, keys, values, key_scales, value_scales, basis, step_numbers, sinks, window, cap):
    """Float64, entry by entry."""
    table, spans, positions, lengths, firsts, tree = step_numbers
    result = torch.empty(q.shape, dtype=torch.float64)
    for t in range(len(q)):
        entries = [(j, j) for j in range(int(lengths[t]))]
        for i in range(32 * tree.shape[1]):
            if int(tree[t, 0]) >> i & 1:
                entries.append((int(lengths[t]) + i, int(positions[int(firsts[t]) + i])))
        if window:
            entries = [(j, at) for j, at in entries if at > int(positions[t]) - window]
        cells = [(int(table[int(spans[t]), j // BLOCK]), j % BLOCK) for j, _ in entries]
        for head in range(HEADS):
            of = head // (HEADS // KV_HEADS)
            rows = []
            for plane, scales in ((keys, key_scales), (values, value_scales)):
                cached = torch.stack([plane[cell][of].double() for cell in cells])
                if scales is not None:
                    cached = cached * torch.stack([scales[cell][of].double() for cell in cells])
                rows.append(cached)
            scores = rows[0] @ q[t, head].double()
            scores = cap * (scores / cap).tanh() if cap else scores
            total = scores.exp().sum() + (0 if sinks is None else sinks[head].double().exp())
            result[t, head] = scores.exp() @ rows[1] / total
    return result


@pytest.mark.parametrize(
    ("dtype", "trees", "sinks", "window", "cap"),
    [
        *((dtype, True, False, 0, 0.0) for dtype in STORES),
        (torch.float32, True, True, 2, 0.0),
        (torch.float32, False, True, 20, 3.0),
        (torch.bfloat16, True, False, 40, 2.0),
    ],
)
def test_attention(dtype, trees, sinks, window, cap):
    numbers = step([1, 5, 16, 17, 260, 33], trees)
    q = torch.randn(len(numbers[1]), HEADS, DIM, generator=drawn(3)).mul_(0.5)
    of_heads = torch.randn(HEADS, generator=drawn(4)) if sinks else None
    planes_of_pool = pool(dtype)
    actual = paged_attention(q, *planes_of_pool, *numbers, of_heads, window, cap)
    wanted = attended(q, *planes_of_pool, numbers, of_heads, window, cap)
    torch.testing.assert_close(actual.double(), wanted, **CLOSE)


@pytest.mark.parametrize("dim", [8, 24])
@pytest.mark.parametrize(("trees", "sinks", "window"), [(True, False, 0), (False, True, 20)])
def test_four_bit_keys_and_values(dim, trees, sinks, window):
    """Written as the store writes them; attended to as float64 does to what the store reads back."""
    factors = torch.rand(KV_HEADS, dim, generator=drawn(1)) + 0.5
    centers = torch.randn(2, KV_HEADS, dim, generator=drawn(2))
    turned = rotated(centers * factors)
    basis = torch.stack((factors, 1 / factors, *turned), dim=1)
    cells = [torch.zeros(48, BLOCK, KV_HEADS, dim // 2, dtype=torch.uint8) for _ in range(2)]
    cells += [torch.zeros(48, BLOCK, KV_HEADS, 2, dtype=torch.float16) for _ in range(2)]
    T = 48 * BLOCK
    qkv = torch.randn(T, (HEADS + 2 * KV_HEADS) * dim, generator=drawn(3)).mul_(2)
    slots = torch.randperm(T, generator=drawn(4)).int()
    nothing = torch.zeros(T).int(), slots, None, None, None
    q = rope_write(qkv, *nothing, *cells, basis, HEADS, 1e-6, 0.5, False)
    plain, keys, values = qkv.unflatten(1, (-1, dim)).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    codes, of_values = kv_int4.encode(keys, factors, centers)[0], kv_int4.encode(values)
    stored = [cell.flatten(0, 1)[slots.long()] for cell in cells]
    assert torch.equal(stored[1], of_values[0]) and torch.equal(stored[3], of_values[1])
    assert (stored[0] != codes).float().mean() < 0.01 and (stored[2] < 0).any()
    read = [
        decode(cell, pair, *of).double()
        for cell, pair, of in zip(cells[:2], cells[2:], [(factors, centers), ()], strict=True)
    ]
    numbers = step([1, 5, 16, 17, 260, 33], trees)
    tokens, of_heads = len(numbers[1]), torch.randn(HEADS, generator=drawn(5)) if sinks else None
    out = paged_attention(q[:tokens], *cells, basis, *numbers, of_heads, window, 0.0)
    wanted = attended(plain[:tokens] * 0.5, *read, None, None, None, numbers, of_heads, window, 0.0)
    torch.testing.assert_close(out.double(), wanted, **CLOSE)


def test_unseen_entries_may_be_no_numbers():
    keys, values, *_ = pool(torch.float32)
    numbers = step([3])
    block = int(numbers[0][0, 0])
    wanted = paged_attention(
        torch.ones(1, HEADS, DIM), keys, values, None, None, None, *numbers, None, 0, 0.0
    )
    for plane in (keys, values):
        plane[torch.arange(48) != block] = math.nan
        plane[block, 3:] = math.nan
    actual = paged_attention(
        torch.ones(1, HEADS, DIM), keys, values, None, None, None, *numbers, None, 0, 0.0
    )
    assert torch.equal(actual, wanted)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", STORES)
def test_keys_and_values_are_written(dtype, wide):
    planes_of_pool = pool(dtype)
    T, r = 3, 6
    qkv = torch.randn(T, (HEADS + 2 * KV_HEADS) * DIM, generator=drawn(5))
    positions, slots = torch.tensor([4, 0, 9]).int(), torch.tensor([17, 3, 200]).int()
    angles = torch.rand(10, r // 2, generator=drawn(6))
    rotary = torch.cat([angles.cos(), angles.sin()], dim=1)
    norms = [
        torch.rand((heads if wide else 1) * DIM, generator=drawn(7)) + 0.5 for heads in (HEADS, KV_HEADS)
    ]
    q = rope_write(qkv, positions, slots, rotary, *norms, *planes_of_pool, HEADS, 1e-6, 0.3, wide)

    def turned(heads, weight, position):
        size = heads.numel() if wide else DIM
        heads = heads.double().reshape(-1, size)
        heads = (heads / (heads.square().mean(1, keepdim=True) + 1e-6).sqrt() * weight).reshape(-1, DIM)
        for i in range(r // 2):
            z = torch.complex(heads[:, i], heads[:, i + r // 2]) * torch.polar(
                torch.tensor(1.0).double(), angles[position, i].double()
            )
            heads[:, i], heads[:, i + r // 2] = z.real, z.imag
        return heads

    for t in range(T):
        rows = qkv[t].view(-1, DIM)
        position, cell = int(positions[t]), (int(slots[t]) // BLOCK, int(slots[t]) % BLOCK)
        wanted = turned(rows[:HEADS], norms[0], position) * 0.3
        torch.testing.assert_close(q[t].double(), wanted, **CLOSE)
        wanted = turned(rows[HEADS:-KV_HEADS], norms[1], position), rows[-KV_HEADS:].double()
        for plane, scales, x in zip(planes_of_pool[:2], planes_of_pool[2:4], wanted, strict=True):
            stored = plane[cell].double() if scales is None else plane[cell].double() * scales[cell]
            off = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3, torch.int8: 5e-3}
            limit = off.get(dtype, 0.04) * x.abs().amax(-1, keepdim=True)
            assert bool(((stored - x).abs() <= limit).all())


def test_a_row_does_not_depend_on_its_batch():
    """Bit for bit: alone, and as any of 64."""
    bits, (codes, scales, points) = 4, matrix(4, rows=37, columns=160)
    words, x = planes.join(codes, bits), torch.randn(64, 160, generator=drawn(1))
    products = [
        lambda rows: packed_product(rows, words, scales, points, None, bits, torch.float32),
        lambda rows: dense_product(rows, codes.float(), None, torch.float32),
        lambda rows: route(rows, codes[:8].float(), None, None, None, 2, "softmax", True, 1.0, 1, 1, 1, 0)[0],
    ]
    for product in products:
        together = product(x)
        assert all(torch.equal(product(x[i : i + 1])[0], together[i]) for i in range(64))
    q, numbers = torch.randn(6, HEADS, DIM, generator=drawn(3)), step([1, 5, 16, 17, 300, 33])
    planes_of_pool = pool(torch.float32)
    together = paged_attention(q, *planes_of_pool, *numbers, None, 0, 0.0)
    table, *per_token = numbers
    for t, length in enumerate([1, 5, 16, 17, 300, 33]):
        alone = [x[t : t + 1] for x in per_token]
        alone[0], alone[3] = alone[0] * 0, alone[3] * 0
        own = table[t : t + 1, : -(-length // BLOCK)]
        part = paged_attention(q[t : t + 1], *planes_of_pool, own, *alone, None, 0, 0.0)
        assert torch.equal(part[0], together[t])


def arguments():
    """Of every operator, small."""
    codes, scales, points = matrix(3)
    x, words = torch.randn(4, 96), planes.join(codes, 3)
    order, ends = torch.tensor([1, 3, 0, 2]).int(), torch.tensor([2, 2, 4]).int()
    stack = [part.expand(3, *part.shape).contiguous() for part in (words, scales, points)]
    numbers = step([1, 5, 20], trees=True)
    T = len(numbers[1])
    q, cells = torch.randn(T, HEADS, DIM), pool(torch.int8)
    qkv, positions = torch.randn(T, (HEADS + 2 * KV_HEADS) * DIM), torch.zeros(T).int()
    slots = torch.arange(T).int()
    weight = torch.ones(96)
    return {
        packed_product: (x, words, scales, points, None, 3, torch.bfloat16),
        dense_product: (x, torch.randn(5, 96), torch.randn(5), torch.float32),
        experts_product: (x[:2], *stack, None, order, ends, 3, 2),
        experts_dense: (x, torch.randn(3, 5, 96), None, order, ends, 0),
        route: (x, torch.randn(6, 96), None, None, None, 2, "sigmoid", True, 1.0, 1, 1, 1, 3),
        gated: (x, "silu"),
        add_norm: (x.clone(), x, None, None, None, weight, weight, 1e-5, torch.bfloat16),
        rope_write: (qkv, positions, slots, None, None, None, *cells, HEADS, 1e-5, 1.0, False),
        paged_attention: (q, *cells, *numbers, None, 7, 0.0),
    }


@pytest.mark.slow
@pytest.mark.parametrize("operator", [*arguments()], ids=lambda operator: operator.name())
def test_torchs_checks_of_an_operator(operator):
    """Schema, fake tensors, tracing; on meta the results have the same shapes and types."""
    given = arguments()[operator]
    opcheck(operator, given)


@pytest.mark.parametrize("operator", [*arguments()], ids=lambda operator: operator.name())
def test_operators_on_meta(operator):
    given = arguments()[operator]
    wanted = operator(*given)
    on_meta = operator(*(x.to("meta") if isinstance(x, torch.Tensor) else x for x in given))
    wanted, on_meta = (x if isinstance(x, tuple) else (x,) for x in (wanted, on_meta))
    for real, fake in zip(wanted, on_meta, strict=True):
        assert (real.shape, real.dtype, fake.device.type) == (fake.shape, fake.dtype, "meta")
