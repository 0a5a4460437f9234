"""The spherical methods at points whose result is known."""

from __future__ import annotations

import math

import pytest
import torch

from attar.errors import NumericsError
from attar.merging.methods.karcher import karcher, mean_direction
from attar.merging.methods.multislerp import multislerp
from attar.merging.methods.nuslerp import nuslerp
from attar.merging.methods.sce import sce
from attar.merging.methods.slerp import slerp

EAST, NORTH = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.0, 1.0, 0.0])


def at(degrees: float, length: float = 1.0) -> torch.Tensor:
    return torch.tensor([math.cos(math.radians(degrees)), math.sin(math.radians(degrees)), 0.0]) * length


@pytest.mark.parametrize("compat", ["mergekit", "paper"])
@pytest.mark.parametrize("t", [0.0, 0.25, 0.5, 1.0])
def test_slerp_goes_along_the_arc(t: float, compat: str) -> None:
    assert torch.allclose(slerp([NORTH], EAST, t=t, compat=compat), at(90 * t), atol=1e-6)


def test_nuslerp_goes_along_the_arc() -> None:
    assert torch.allclose(nuslerp([EAST, NORTH], weight=[2.0, 1.0]), at(30), atol=1e-6)
    assert torch.allclose(nuslerp([EAST, NORTH], weight=[1.0, -1.0]), at(45), atol=1e-6)
    base = torch.tensor([5.0, 5.0, 5.0])
    assert torch.allclose(nuslerp([base + EAST, base + NORTH], base, weight=[2, 1]), base + at(30), atol=1e-5)


def test_nuslerp_by_rows_and_columns() -> None:
    x0, x1 = torch.stack([EAST, NORTH]), torch.stack([NORTH, EAST])
    rows = nuslerp([x0, x1], weight=[2, 1], nuslerp_flatten=False)
    assert torch.allclose(rows, torch.stack([at(30), at(60)]), atol=1e-6)
    columns = nuslerp([x0.T, x1.T], weight=[2, 1], nuslerp_flatten=False, nuslerp_row_wise=True)
    assert torch.equal(columns, rows.T)


def test_slerp_of_nearly_parallel_tensors_is_linear_in_mergekit() -> None:
    x = at(1.0, 2.0)
    assert torch.allclose(slerp([x], EAST, t=0.25), 0.75 * EAST + 0.25 * x)


def test_opposite_directions() -> None:
    assert torch.equal(slerp([-EAST], EAST, t=0.25), 0.5 * EAST)
    with pytest.raises(NumericsError, match="opposite"):
        slerp([-EAST], EAST, t=0.25, compat="paper")
    assert torch.equal(slerp([EAST * 3], EAST, t=0.5, compat="paper"), EAST * 2)


def test_zero_tensors() -> None:
    zero = torch.zeros(3)
    assert slerp([EAST], zero, t=0.5).isfinite().all()
    assert nuslerp([zero, zero], weight=[1, 1]).tolist() == [0, 0, 0]
    assert karcher([zero, zero]).tolist() == [0, 0, 0]
    assert torch.allclose(karcher([zero, EAST * 2]), EAST)


def test_means_of_directions() -> None:
    tensors = [at(0), at(30), at(60)]
    assert torch.allclose(multislerp(tensors, weight=[1, 1, 1]), at(30), atol=1e-5)
    assert torch.allclose(karcher(tensors), at(30), atol=1e-5)
    assert torch.allclose(multislerp([at(0), at(80)], weight=[1, 1]), at(40), atol=1e-5)
    assert karcher([at(10, 3.0), at(50, 1.0)]).norm() == pytest.approx(2.0, rel=1e-5)


def test_directions_without_a_mean() -> None:
    assert torch.allclose(multislerp([EAST, -3 * EAST], weight=[0.5, 0.5]), -EAST)
    three = [at(0), at(120), at(240)]
    with pytest.raises(NumericsError, match="mean of the directions"):
        multislerp(three, weight=[1, 1, 1], eps=1e-6)


def test_a_single_model_is_itself() -> None:
    assert torch.equal(karcher([NORTH]), NORTH)
    assert torch.equal(multislerp([NORTH], weight=[0.3]), NORTH)


def test_karcher_rounds_the_length_before_it_multiplies():
    """In bf16 mergekit's scalar is rounded to bf16, then multiplied: the same bits here."""
    generator = torch.Generator().manual_seed(0)
    tensors = [(0.02 * torch.randn(64, 64, generator=generator)).bfloat16() for _ in range(3)]
    lengths = [x.float().norm() for x in tensors]
    units = [x.reshape(-1) / length for x, length in zip(tensors, lengths, strict=True)]
    u = mean_direction(units, 10, 1e-5).float()
    length = sum(length / 3 for length in lengths)
    rounded = (u * length.bfloat16().float()).bfloat16().view(64, 64)
    assert torch.equal(karcher(tensors), rounded)
    assert not torch.equal((u * length).bfloat16().view(64, 64), rounded)


def test_sce_in_bf16_depends_on_the_order_of_memory_only_among_ties():
    """Variances have 8 bits, so that many are equal to the last one kept: which of them stay is a choice."""
    generator = torch.Generator().manual_seed(1)
    base = (0.02 * torch.randn(4096, generator=generator)).bfloat16()
    tensors = [base + (0.002 * torch.randn(4096, generator=generator)).bfloat16() for _ in range(2)]
    order = torch.randperm(4096, generator=generator)
    one = sce(tensors, base, select_topk=0.5)[order]
    two = sce([x[order] for x in tensors], base[order], select_topk=0.5)
    variance = torch.stack([x - base for x in tensors]).var(dim=0, unbiased=False)[order]
    last = variance.float().sort(descending=True).values[int(int(variance.count_nonzero()) * 0.5) - 1]
    differ, tied = one != two, variance == last
    assert 0 < int((differ & tied).sum()) <= int(tied.sum())
    size = sum(x[order].float().abs() for x in (base, *tensors))  # the models' shares may move by a rounding
    off = (one - two).float().abs() / size / torch.finfo(torch.bfloat16).eps
    assert float(off[~tied].max()) <= 1.0 < float(off[tied].max())
