"""Products of quantized and dense weights in Triton's interpreter, against float64."""

import pytest
import torch

from attar.kernels.triton import experts, gemm
from tests.kernels.triton.cases import PackedLinear

ZEROS = (None, torch.uint8, torch.float32)


def near(ours, meaning, most=2e-6):
    assert ours.shape == meaning.shape
    assert float((ours.double() - meaning).abs().max() / meaning.abs().max()) <= most


@pytest.mark.parametrize("zeros", ZEROS)
@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize(
    "M, N, K, G", [(1, 40, 256, 128), (3, 70, 96, 32), (17, 33, 64, 16), (2, 65, 192, 64)]
)
def test_a_product_of_codes_is_the_product_of_what_they_stand_for(M, N, K, G, bits, zeros):
    weight = PackedLinear.random(N, K, G, bits, zeros)
    x, bias = torch.randn(M, K), torch.randn(N)
    y = gemm.packed_product(x, weight.codes, weight.scales, weight.zeros, bias, bits, torch.float32)
    near(y, x.double() @ weight.meaning.T + bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_sixteen_bit_rows_are_multiplied_exactly_and_summed_in_float32(bits, dtype):
    weight = PackedLinear.random(40, 256, 64, bits, torch.uint8)
    x = torch.randn(5, 256).to(dtype)
    y = gemm.packed_product(x, weight.codes, weight.scales, weight.zeros, None, bits, torch.float32)
    near(y, x.double() @ weight.meaning.T)
    half = gemm.packed_product(x, weight.codes, weight.scales, weight.zeros, None, bits, dtype)
    assert half.dtype == dtype
    near(half, y.double(), 2**-7)


def test_splits_cover_all_groups_and_depend_on_the_weight_alone(monkeypatch):
    for N, K, G in ((64, 8192, 128), (8192, 8192, 128), (4096, 14336, 32), (100, 96, 16), (50000, 576, 64)):
        count, size = gemm.splits(N, K, G, 64)
        assert (count - 1) * size < K // G <= count * size
        assert count == 1 or size * G >= gemm.LEAST // 2


@pytest.mark.parametrize("zeros", [torch.uint8, torch.float32])
def test_a_row_has_the_same_bits_alone_and_among_many(zeros):
    N, K, G, bits = 40, 1536, 128, 4
    weight = PackedLinear.random(N, K, G, bits, zeros)
    x, bias = torch.randn(70, K), torch.randn(N)
    assert gemm.splits(N, K, G, 64)[0] == 3

    def product(rows):
        return gemm.packed_product(rows, weight.codes, weight.scales, weight.zeros, bias, bits, torch.float32)

    many = product(x)  # one program for all splits
    near(many, x.double() @ weight.meaning.T + bias)
    for rows in (slice(0, 1), slice(3, 20), slice(40, 70)):
        assert torch.equal(product(x[rows].contiguous()), many[rows])


@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.float32), (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)]
)
def test_a_dense_product_is_that_of_float64_at_any_number_of_rows(dtypes):
    x, weight, bias = (
        torch.randn(70, 1100).to(dtypes[0]),
        torch.randn(45, 1100).to(dtypes[1]),
        torch.randn(45),
    )
    many = gemm.dense_product(x, weight, bias, torch.float32)
    near(many, x.double() @ weight.double().T + bias)
    for rows in (slice(0, 1), slice(7, 70)):
        assert torch.equal(gemm.dense_product(x[rows].contiguous(), weight, bias, torch.float32), many[rows])


def routed(tokens, count, active, seed=0):
    """Pairs sorted by expert, and the end of each expert; expert 1 gets none, expert 2 the first of all."""
    g = torch.Generator().manual_seed(seed)
    choice = torch.stack([torch.randperm(count - 1, generator=g)[:active] for _ in range(tokens)])
    choice[choice == 1] = count - 1
    choice[:, 0] = 2 if active == 1 else choice[:, 0]
    order = torch.argsort(choice.flatten(), stable=True)
    ends = torch.bincount(choice.flatten(), minlength=count).cumsum(0)
    return choice, order.int(), ends.int()


@pytest.mark.parametrize("tokens, count, active", [(1, 5, 2), (9, 5, 2), (60, 3, 1), (40, 8, 3)])
@pytest.mark.parametrize("kind", ["codes", "dense"])
@pytest.mark.parametrize("gather", [True, False])
def test_each_pair_is_multiplied_by_its_expert(tokens, count, active, kind, gather):
    K, N, G, bits = 96, 70, 32, 4
    choice, order, ends = routed(tokens, count, active)
    stack = [PackedLinear.random(N, K, G, bits, torch.uint8, seed=e) for e in range(count)]
    x, bias = torch.randn(tokens if gather else tokens * active, K), torch.randn(count, N)
    pairs = choice.flatten()
    rows = x[torch.arange(tokens * active) // active] if gather else None
    if kind == "codes":
        parts = (torch.stack([getattr(w, name) for w in stack]) for name in ("codes", "scales", "zeros"))
        y = experts.experts_product(x, *parts, bias, order, ends, bits, active if gather else 0)
        meaning = torch.stack([w.meaning for w in stack])
    else:
        meaning = torch.randn(count, N, K)
        y = experts.experts_dense(x, meaning, bias, order, ends, active if gather else 0)
        meaning = meaning.double()
    if gather:  # places of the order
        at = pairs[order.long()]
        expected = torch.einsum("pnk,pk->pn", meaning[at], rows[order.long()].double()) + bias[at]
    else:  # place i of x is pair order[i]
        expected = torch.empty(len(pairs), N, dtype=torch.float64)
        at = pairs[order.long()]
        expected[order.long()] = torch.einsum("pnk,pk->pn", meaning[at], x.double()) + bias[at]
    near(y, expected)
