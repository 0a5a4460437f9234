"""Selection by bit patterns against a stable sort."""

from __future__ import annotations

import pytest
import torch

from attar.merging.methods.common.chunked import SIZE
from attar.merging.methods.common.selection import (
    MagnitudeSelector,
    StableSelection,
    kth_largest,
    kth_magnitudes,
    largest,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def numbers(count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Normal numbers with many ties (rounded to 16-bit formats) and zeros."""
    x = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    x[::7] = 0
    return x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 53, 4099, SIZE + 77])
def test_kth_largest_is_that_of_a_sort(dtype: torch.dtype, count: int) -> None:
    x = numbers(count, dtype)
    order = x.abs().float().sort(descending=True).values
    for k in {1, (count + 1) // 2, count}:
        assert kth_largest(x, k) == order[k - 1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 53, SIZE + 77])
def test_the_largest_are_the_first_of_a_stable_sort(dtype: torch.dtype, count: int) -> None:
    x = numbers(count, dtype)
    order = x.abs().float().argsort(descending=True, stable=True)
    for k in (0, 1, count // 3, count - count // 11, count):
        expected = torch.zeros(count, dtype=torch.bool)
        expected[order[:k]] = True
        assert torch.equal(largest(x, k), expected)


def test_ties_across_pieces_go_to_the_first_places() -> None:
    x = torch.ones(2 * SIZE + 5, dtype=torch.bfloat16)
    mask = largest(x, SIZE + 3)
    assert mask[: SIZE + 3].all()
    assert not mask[SIZE + 3 :].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_ascending_order_takes_the_first_of_equal_ones_too(dtype: torch.dtype) -> None:
    x = numbers(5000, dtype)
    order = x.abs().float().argsort(stable=True)
    for m in (1, 700, 2500, 5000):
        cut = kth_magnitudes(lambda: [x], dtype, [5000 + 1 - m])[0]
        expected = torch.zeros(5000, dtype=torch.bool)
        expected[order[:m]] = True
        first = StableSelection(cut, m, 5000, largest=False)
        assert torch.equal(torch.cat([first.mask(x[:1234]), first.mask(x[1234:])]), expected)


def test_several_ranks_and_many_tensors_in_any_order() -> None:
    parts = [numbers(n, torch.float32, n) for n in (10, 3000, 501)]
    order = torch.cat(parts).abs().sort(descending=True).values
    for sequence in (parts, parts[::-1]):
        selector = MagnitudeSelector(torch.float32)
        for _ in range(selector.passes):
            for part in sequence:
                selector.add(part)
            selector.end_pass([1, 77, 3000])
        assert [cut.value for cut in selector.thresholds] == [order[0], order[76], order[2999]]
        assert selector.count == 3511


def test_a_cut_counts_what_is_above_and_on_it() -> None:
    cut = kth_magnitudes(lambda: [torch.tensor([3.0, -2.0, 2.0, 1.0, 2.0])], torch.float32, [3])[0]
    assert (cut.value, cut.above, cut.equal) == (2.0, 1, 3)


def test_infinity_and_subnormal_numbers_have_their_places() -> None:
    x = torch.tensor([1e-40, float("inf"), -1e-42, 0.0, -3e38])
    assert [kth_largest(x, k) for k in range(1, 6)] == x.abs().sort(descending=True).values.tolist()


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(TypeError, match="float64"):
        MagnitudeSelector(torch.float64)
