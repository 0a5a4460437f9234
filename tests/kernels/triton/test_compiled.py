"""Every kernel compiled for three generations of cards that are not there: nothing is spilled (but SPILLS),
weights, keys and values come 16 bytes at a time, shared memory fits, and all products are one instruction."""

import importlib.util

import pytest
import torch

from attar.kernels.triton import interpreted
from tests.kernels.triton.compiled import CARDS, compiled, launches

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton"),
    pytest.mark.skipif(interpreted(), reason="the interpreter compiles nothing"),
]
FLOAT, INT = torch.float32, torch.int32
WORDS = ("LDGSTS.E.BYPASS.128", "LDG.E.128", "LDG.E.EF.128")


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype)


def product(rows, bits, group, zeros=None, K=4096, N=4096):
    from attar.kernels.triton import gemm

    points = None if zeros is None else empty(K // group, N, dtype=zeros)
    weight = empty(K * bits // 32, N, dtype=INT), empty(K // group, N), points, empty(N, dtype=FLOAT)
    return lambda: gemm.packed_product(empty(rows, K), *weight, bits, torch.bfloat16)


def dense(rows):
    from attar.kernels.triton import gemm

    return lambda: gemm.dense_product(empty(rows, 4096), empty(4096, 4096), None, FLOAT)


def of_experts(tokens, kind, E=16, k=8, K=2048, N=1536):
    from attar.kernels.triton import experts

    pairs = empty(tokens * k, dtype=INT), empty(E, dtype=INT)
    if kind == "dense":
        return lambda: experts.experts_dense(empty(tokens, K), empty(E, N, K), None, *pairs, k)
    zeros = empty(E, K // 128, N, dtype=FLOAT) if kind == "real zero points" else None
    weight = empty(E, K // 8, N, dtype=INT), empty(E, K // 128, N), zeros, empty(E, N, dtype=FLOAT)
    return lambda: experts.experts_product(empty(tokens, K), *weight, *pairs, 4, k)


def cells(blocks, B, g, d, store):
    """A layer's part of the pool, its scales and the basis."""
    if store == torch.uint8:
        pool, scales = empty(blocks, B, g, d // 2, dtype=store), empty(blocks, B, g, 2, dtype=torch.float16)
        return pool, scales, empty(g, 4, d, dtype=FLOAT)
    scales = empty(blocks, B, g, 1, dtype=FLOAT) if store.itemsize == 1 else None
    return empty(blocks, B, g, d, dtype=store), scales, None


def attention(
    T, S, store=torch.bfloat16, h=32, g=8, d=128, W=0, sinks=False, window=0, cap=0.0, act=torch.bfloat16
):
    from attar.kernels.triton import paged

    B, X = 64, 16
    pool, scales, basis = cells(S * X, B, g, d, store)
    ints = (empty(T, dtype=INT) for _ in range(4))
    numbers = [
        empty(S, X, dtype=INT),
        *ints,
        empty(T, W, dtype=INT),
        empty(h, dtype=FLOAT) if sinks else None,
    ]
    return lambda: paged.paged_attention(
        empty(T, h, d, dtype=act), pool, pool, scales, scales, basis, *numbers, window, cap
    )


def rope(store, wide=False):
    from attar.kernels.triton import fused

    h, g, d = 32, 8, 128
    pool, scales, basis = cells(8, 64, g, d, store)
    norms = [empty(d * (n if wide else 1), dtype=FLOAT) for n in (h, g)]
    at = empty(8, dtype=INT), empty(8, dtype=INT), empty(4096, d, dtype=FLOAT)
    return lambda: fused.rope_write(
        empty(8, (h + 2 * g) * d), *at, *norms, pool, pool, scales, scales, basis, h, 1e-5, 0.1, wide
    )


def norm(H, experts=False):
    from attar.kernels.triton import fused

    extra = (empty(8, dtype=FLOAT), empty(8, 8, H), empty(8, 8, dtype=FLOAT)) if experts else (None,) * 3
    row = empty(H, dtype=FLOAT)
    return lambda: fused.add_norm(
        empty(8, H, dtype=FLOAT), empty(8, H), *extra, row, row, 1e-5, torch.bfloat16
    )


def gated(activation):
    from attar.kernels.triton import fused

    return lambda: fused.gated(empty(8, 28672), activation)


def columns(n, levels=(), descend=False, mask=False):
    from attar.kernels.triton import columns

    N = 4096
    block = [empty(n, N, dtype=FLOAT) for _ in range(4)]
    tiles = empty(32, N, dtype=FLOAT), empty(32, N, dtype=FLOAT), None, empty(n, dtype=torch.int64)
    flags = empty(n, N, dtype=torch.bool) if mask else None
    factor = empty(n, n, dtype=FLOAT), empty(n, dtype=FLOAT), block[0] if descend else None
    parts = block[1], flags, None, block[2], block[3]
    return lambda: columns.run_block(levels, (0.0, 15.0, 8.0), False, tiles, *factor, *parts)


def choice(E, groups=1, shared=0):
    from attar.kernels.triton import route

    optional = empty(E, dtype=FLOAT), empty(E, dtype=FLOAT), empty(2048, dtype=FLOAT)
    how = 8, "sigmoid", True, 2.5, groups, max(groups // 2, 1), min(groups, 2), shared
    return lambda: route.route(empty(64, 2048), empty(E, 2048, dtype=FLOAT), *optional, *how)


PRODUCTS = {
    **{f"{bits} bits, {rows} rows": (product, rows, bits, 128) for bits in range(2, 9) for rows in (1, 512)},
    **{f"{bits} bits, groups of {G}": (product, 64, bits, G) for bits in (2, 3, 4, 8) for G in (16, 32, 64)},
    **{f"{bits} bits, zero points": (product, 512, bits, 128, torch.uint8) for bits in (6, 7)},
    "zero points": (product, 64, 4, 128, torch.uint8),
    "real zero points": (product, 512, 4, 128, FLOAT),
    "real zero points, groups of 16": (product, 64, 4, 16, FLOAT),
    "dense, 1 row": (dense, 1),
    "dense, 512 rows": (dense, 512),
    "experts": (of_experts, 64, "codes"),
    "experts, prompt": (of_experts, 512, "codes"),
    "experts, real zero points": (of_experts, 512, "real zero points"),
    "dense experts": (of_experts, 64, "dense"),
}
ATTENTION = {
    **{
        f"decode from {store}": (attention, 8, 8, store)
        for store in (torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.uint8)
    },
    "prompt": (attention, 1024, 2),
    "prompt from int8": (attention, 1024, 2, torch.int8),
    "prompt from int4": (attention, 1024, 2, torch.uint8),
    "everything": (attention, 64, 8, torch.bfloat16, 32, 8, 128, 1, True, 128, 30.0),
    "heads of 256": (attention, 512, 2, torch.bfloat16, 16, 8, 256),
    "heads of 64, one of keys": (attention, 8, 8, torch.bfloat16, 40, 1, 64),
}
OTHERS = {
    "float16 beside bfloat16": (attention, 8, 8, torch.float16),
    "float32": (attention, 1024, 2, FLOAT, 32, 8, 128, 0, False, 0, 0.0, FLOAT),
    **{
        f"rope to {store}": (rope, store)
        for store in (torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.uint8)
    },
    "rope, wide norms": (rope, torch.bfloat16, True),
    "columns": (columns, 128),
    "columns of 16 levels, descending": (columns, 128, tuple(range(-8, 8)), True, True),
    "choice of 128 experts": (choice, 128),
    "choice of 256 experts in groups": (choice, 256, 8, 1),
    "norm": (norm, 4096),
    "norm of a wide mixture": (norm, 16384, True),
    **{activation: (gated, activation) for activation in ("silu", "gelu_tanh", "clamped_swiglu")},
}

SPILLS = {("7 bits, zero points", 80): 8}
"""Bytes of a thread, at most, by case and card; none elsewhere."""


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("case", [*PRODUCTS, *ATTENTION, *OTHERS])
def test_a_kernel_compiles_without_spills_within_the_card(case, card, monkeypatch):
    make, *shape = {**PRODUCTS, **ATTENTION, **OTHERS}[case]
    listings = [compiled(launch, card) for launch in launches(monkeypatch, make(*shape))]
    assert listings, "nothing was launched"
    for listing in listings:
        spilled = SPILLS.get((case, card), 0)
        assert listing.stack <= spilled and (spilled or not listing.any("LDL", "STL")), listing
        assert listing.shared <= CARDS[card]
        assert not listing.any("HGMMA", "UTCHMMA", "UTCQMMA", "ATOM", "RED.", "REDG")  # REDUX is no atomic
    first = listings[0]
    if case not in OTHERS:
        assert set(first.any("HMMA")) == {"HMMA.16816.F32.BF16"}
        assert first.any(*WORDS), first


@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize(
    "bits, group", [(4, 128), (4, 32), (2, 128), (8, 32), (6, 64), (2, 32), (2, 16), (4, 16)]
)
def test_words_of_a_weight_come_sixteen_bytes_at_a_time(bits, group, rows, monkeypatch):
    """All copies to shared memory that are narrower than 16 bytes are of x: 16 rows of few inputs."""
    launch = launches(monkeypatch, product(rows, bits, group))[0]
    listing = compiled(launch, 90)
    narrow = sum(listing.any("LDGSTS.E.64", "LDGSTS.E.32").values())
    stages, steps = launch[2]["num_stages"], group // min(group, launch[1][-1])
    planes = {2: 1, 4: 1, 8: 1, 6: 2}[bits]
    assert sum(listing.any("LDGSTS.E.BYPASS.128").values()) >= stages * steps
    assert narrow <= stages * steps * planes


@pytest.mark.parametrize("card", CARDS)
def test_warps_divide_the_outputs_of_a_product_with_real_zero_points(card, monkeypatch):
    """Sums of inputs cost at most as much as the product: no warp repeats what another one multiplies."""
    counts = [
        sum(compiled(launches(monkeypatch, product(512, 4, 128, zeros))[0], card).any("HMMA").values())
        for zeros in (None, FLOAT)
    ]
    assert counts[0] < counts[1] <= 2 * counts[0]
