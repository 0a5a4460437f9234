"""Averages and the special methods at points whose result is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attar.errors import NumericsError
from attar.merging.methods.arcee_fusion import arcee_fusion, quantile, scores, threshold
from attar.merging.methods.linear import linear
from attar.merging.methods.model_stock import model_stock
from attar.merging.methods.nearswap import nearswap
from attar.merging.methods.passthrough import passthrough
from attar.merging.methods.ram import ram, unique_scales
from attar.merging.methods.sce import sce


def test_linear() -> None:
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])
    assert linear([a, b], weight=[1, 3]).tolist() == [2.5, 5]
    assert linear([a, b], weight=[1, 3], normalize=False).tolist() == [10, 20]


def test_linear_of_bfloat16_is_rounded_once() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1000, generator=generator).bfloat16() for _ in range(3)]
    exact = sum(w * x.double() for w, x in zip((0.2, 0.3, 0.5), tensors, strict=True))
    result = linear(tensors, weight=[0.2, 0.3, 0.5])
    assert (result != exact.bfloat16()).float().mean() < 0.01  # float32 sums, now and then on a tie


def test_passthrough_is_the_tensor_or_scaled() -> None:
    x = torch.tensor([1.0, 2.0])
    assert passthrough([x], scale=[None]) is x
    assert passthrough([x], scale=[0.5]).tolist() == [0.5, 1]


def test_nearswap_takes_what_is_close() -> None:
    base, x = torch.tensor([0.0, 0.0, 0.0]), torch.tensor([0.05, 0.2, 10.0])
    assert torch.allclose(nearswap([x], base, t=0.1), torch.tensor([0.05, 0.1, 0.1]))


def test_model_stock_of_two_orthogonal_changes_is_the_base() -> None:
    base = torch.tensor([1.0, 1.0])
    d = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    assert torch.equal(model_stock([base + d[0], base + d[1]], base), base)
    half = torch.tensor([[1.0, 0.0], [0.5, 0.75**0.5]])  # 60 degrees: c = 1/2, t = 2/3
    expected = base + 2 / 3 * half.mean(0)
    assert torch.allclose(model_stock([base + half[0], base + half[1]], base), expected)


def test_model_stock_without_a_ratio() -> None:
    base = torch.zeros(2)
    x = torch.tensor([1.0, 0.0])
    with pytest.raises(NumericsError, match="model_stock"):
        model_stock([x, -x], base)


def test_ram_by_hand() -> None:
    base = torch.tensor([1.0, 1.0, 1.0])
    tensors = [torch.tensor([1.0, 3.0, 2.0]), torch.tensor([1.0, 1.0, 5.0])]
    assert ram(tensors, base).tolist() == [1, 3, 3.5]
    assert unique_scales(tensors, base, 0.1, 5.0, 1e-5) == [1.1, 1.0]
    assert unique_scales(tensors, base, 0.1, 0.2, 1e-5) == [1 + 0.1 * 0.2, 1.0]


def test_sce_by_hand() -> None:
    base = torch.zeros(4)
    a, b = torch.tensor([1.0, -2.0, 0.0, 3.0]), torch.tensor([2.0, 1.0, 0.0, 3.0])

    v = [14 / 28, 14 / 28]
    expected = [v[0] * 1 + v[1] * 2, -2.0, 0.0, 3.0]
    assert torch.allclose(sce([a, b], base), torch.tensor(expected))
    # the variances are .25, 2.25, 0, 0: half of the two that are not 0 is one entry
    assert torch.allclose(sce([a, b], base, select_topk=0.5), torch.tensor([0.0, -2.0, 0.0, 0.0]))


def test_arcee_fusion_by_hand() -> None:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(30, 40, generator=generator)
    x = base + 0.3 * torch.randn(30, 40, generator=generator)
    p, q = (torch.softmax(t.double(), -1) + 1e-8 for t in (x, base))
    score = ((x - base).abs() * (p * (p / q).log()).sum(-1, keepdim=True)).numpy()
    order = np.sort(score, axis=None)
    low, middle, high = (order[int(share * 1199)] for share in (0.25, 0.5, 0.75))
    bound = middle + 1.5 * (high - low)
    expected = torch.where(torch.from_numpy(score) >= bound, x, base)
    result = arcee_fusion([x], base)
    assert 0.01 < (result != base).float().mean() < 0.3
    assert torch.allclose(result, expected)
    assert torch.allclose(threshold(scores(x, base).view(-1)), torch.tensor(bound, dtype=torch.float32))


def test_quantiles_of_scores_some_of_which_are_negative() -> None:
    score = torch.tensor([0.5, -2.0, 1.0, -0.25, 0.0, 3.0, -1.0])
    order = score.sort().values
    assert [quantile(score, index).item() for index in range(7)] == order.tolist()
