"""The methods over task vectors against slow transparent numpy, and their papers' forms."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attar.merging.methods.breadcrumbs import breadcrumbs
from attar.merging.methods.common.random_masks import RandomMasks
from attar.merging.methods.common.task_vectors import TaskVector, magnitude, rank_probability
from attar.merging.methods.dare import dare_linear
from attar.merging.methods.della import della_linear
from attar.merging.methods.task_arithmetic import task_arithmetic
from attar.merging.methods.ties import GlobalTrim, ties

WEIGHT = [0.5, 0.4, 0.3]
ONES = [1.0, 1.0, 1.0]


def models(shape: tuple[int, ...] = (30, 41), count: int = 3) -> tuple[list[torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    base = torch.randn(*shape, generator=generator)
    return [base + torch.randn(*shape, generator=generator) for _ in range(count)], base


def by_hand(deltas: list[np.ndarray], base: np.ndarray, weight: list[float], normalize: bool) -> np.ndarray:
    """Elect and merge, entry by entry."""
    out = base.astype(np.float64).ravel().copy()
    for j in range(out.size):
        D = [w * d.ravel()[j] for w, d in zip(weight, deltas, strict=True)]
        sign = 1 if sum(D) >= 0 else -1
        agreeing = [i for i, x in enumerate(D) if x * sign > 0]
        divisor = sum(weight[i] for i in agreeing) or 1
        out[j] += sum(D[i] for i in agreeing) / (divisor if normalize else 1)
    return out.reshape(base.shape)


def keep(d: np.ndarray, positions: slice) -> np.ndarray:
    """d with only some places of its ascending order of magnitude."""
    order = np.argsort(np.abs(d), axis=None, kind="stable")[positions]
    out = np.zeros(d.size)
    out[order] = d.ravel()[order]
    return out.reshape(d.shape)


@pytest.mark.parametrize("normalize", [True, False])
def test_ties_by_hand(normalize: bool) -> None:
    tensors, base = models()
    n, density = base.numel(), [0.5, 0.3, 0.7]
    deltas = [
        keep((x - base).numpy(), slice(n - int(p * n), None)) for x, p in zip(tensors, density, strict=True)
    ]
    result = ties(tensors, base, weight=WEIGHT, density=density, normalize=normalize)
    np.testing.assert_allclose(result.numpy(), by_hand(deltas, base.numpy(), WEIGHT, normalize), atol=2e-5)


def test_breadcrumbs_by_hand() -> None:
    tensors, base = models()
    n, density, gamma = base.numel(), [0.5, 0.95, 0.7], [0.1, 0.2, 0.05]
    expected = base.double().numpy().copy()
    for x, w, p, g in zip(tensors, WEIGHT, density, gamma, strict=True):
        stay, top = int(p * n), int(g * n)
        bottom = max(n - stay - top, 0)
        top = n - stay - bottom
        expected += w * keep((x - base).numpy(), slice(bottom, n - top))
    result = breadcrumbs(tensors, base, weight=WEIGHT, density=density, gamma=gamma)
    np.testing.assert_allclose(result.numpy(), expected, atol=2e-6)


def test_breadcrumbs_of_a_short_tensor_keeps_its_change() -> None:
    """mergekit drops all of it where int(gamma n) is 0."""
    tensors, base = models((40,), 1)
    d = tensors[0] - base
    result = breadcrumbs(tensors, base, weight=[1.0], density=[0.9], gamma=[0.01])
    np.testing.assert_allclose(result - base, keep(d.numpy(), slice(4, None)), atol=1e-6)


def test_a_trim_keeps_at_least_one_entry() -> None:
    base = torch.zeros(5)
    d = TaskVector(torch.tensor([1.0, -3.0, 2.0, 0.5, 0.0]), base)
    assert magnitude(d, 0.1, False)(d.chunk(slice(0, 5))).tolist() == [0, -3, 0, 0, 0]


def test_rescaling_restores_the_l1_norm() -> None:
    tensors, base = models((50, 60), 1)
    result = ties(tensors, base, weight=[1.0], density=[0.2], rescale=True)
    assert torch.allclose((result - base).abs().sum(), (tensors[0] - base).abs().sum(), rtol=1e-4)


def test_paper_ties_is_one_trim_an_unweighted_vote_and_a_mean() -> None:
    """Two tensors of one model: the threshold is that of both together."""
    parts = [models((20, 30)), models((7, 9))]
    small = [x * 0.1 for x in parts[1][0]], parts[1][1] * 0.1
    scan = GlobalTrim([0.2, 0.2, 0.2])
    for _ in range(scan.passes):
        for tensors, base in (small, parts[0]):
            scan.add(tensors, base)
        scan.end_pass()
    known = scan.finish()
    whole = [
        np.concatenate([(x[i] - base).ravel().numpy() for x, base in (parts[0], small)]) for i in range(3)
    ]
    k = int(0.2 * whole[0].size)
    assert known["thresholds"] == pytest.approx([np.sort(np.abs(d))[-k] for d in whole])
    trimmed = [np.where(np.abs(d) >= np.sort(np.abs(d))[-k], d, 0) for d in whole]
    signs = np.sign(sum(trimmed))
    majority = 1 if np.sign(signs.sum()) >= 0 else -1
    assert known["majority"] == majority
    signs[signs == 0] = majority
    agreeing = [np.where(d * signs > 0, d, 0) for d in trimmed]
    count = np.maximum(sum((d != 0).astype(float) for d in agreeing), 1)
    expected = 0.7 * sum(agreeing) / count
    results = [
        ties(t, b, weight=ONES, density=[0.2] * 3, lambda_=0.7, compat="paper", **known) - b
        for t, b in (parts[0], small)
    ]
    np.testing.assert_allclose(np.concatenate([r.ravel().numpy() for r in results]), expected, atol=1e-6)


def test_a_vote_of_zero_elects_the_majority_in_the_paper_and_plus_in_mergekit() -> None:
    base = torch.zeros(3)
    tensors = [torch.tensor([2.0, -1.0, -3.0]), torch.tensor([-2.0, -1.0, -3.0])]
    settings = {"weight": [1.0, 1.0], "density": [1.0, 1.0]}
    assert ties(tensors, base, **settings).tolist() == [2, -1, -3]
    assert ties(tensors, base, **settings, compat="paper").tolist() == [-2, -1, -3]


def masks(seed: int, count: int = 1) -> list[RandomMasks]:
    return [RandomMasks.of(seed, "t", str(i)) for i in range(count)]


@pytest.mark.parametrize("compat", ["mergekit", "paper"])
def test_dare_is_unbiased(compat: str) -> None:
    tensors, base = models((20, 30), 1)
    runs = [
        dare_linear(tensors, base, weight=[1.0], density=[0.5], masks=masks(s), compat=compat) - base
        for s in range(400)
    ]
    kept = torch.stack([r != 0 for r in runs]).float().mean()
    assert abs(kept - 0.5) < 0.01
    d = tensors[0] - base
    assert (torch.stack(runs).mean(0) - d).abs().max() / d.abs().max() < 0.2
    assert abs((torch.stack(runs).mean(0) * d).sum() / (d * d).sum() - 1) < 0.02


def test_paper_dare_divides_by_the_density() -> None:
    tensors, base = models((20, 30), 1)
    base.zero_()
    result = dare_linear(tensors, base, weight=[1.0], density=[0.25], masks=masks(0), compat="paper")
    kept = result != 0
    assert torch.equal(result[kept], tensors[0][kept] / 0.25)


def test_mergekit_dare_restores_the_l1_norm() -> None:
    tensors, base = models((20, 30), 1)
    base.zero_()
    result = dare_linear(tensors, base, weight=[1.0], density=[0.25], masks=masks(0))
    assert torch.allclose(result.abs().sum(), tensors[0].abs().sum())
    bare = dare_linear(tensors, base, weight=[1.0], density=[0.25], masks=masks(0), rescale=False)
    assert torch.equal(bare != 0, result != 0)
    assert torch.equal(bare[bare != 0], tensors[0][bare != 0])


def test_della_keeps_large_entries_more_often() -> None:
    tensors, base = models((10, 101), 1)
    base.zero_()
    kept = torch.stack(
        [
            della_linear(tensors, base, weight=[1.0], density=[0.5], epsilon=[0.3], masks=masks(s)) != 0
            for s in range(600)
        ]
    )
    rank = tensors[0].abs().argsort(dim=-1).argsort(dim=-1)
    share = kept.float().mean(0)
    for r, p in ((0, 0.2), (50, 0.5), (100, 0.8)):
        assert abs(share[rank == r].mean() - p) < 0.03


def test_rank_probability_by_hand() -> None:
    rows = torch.tensor([[3.0, -1.0, 0.0, -2.0], [0.0, 0.0, 5.0, 0.0]])
    expected = torch.tensor(
        [[0.7, 0.5 - 0.2 / 3, 0.3, 0.5 + 0.2 / 3], [0.3, 0.5 - 0.2 / 3, 0.7, 0.5 + 0.2 / 3]]
    )
    assert torch.allclose(rank_probability(rows, 0.5, 0.2), expected)


def test_paper_della_divides_by_each_probability() -> None:
    tensors, base = models((10, 11), 1)
    base.zero_()
    result = della_linear(
        tensors, base, weight=[1.0], density=[0.5], epsilon=[0.3], masks=masks(0), compat="paper"
    )
    kept = result != 0
    assert torch.allclose(result[kept], (tensors[0] / rank_probability(tensors[0], 0.5, 0.3))[kept])


def test_a_weight_in_bfloat16_is_rounded_first() -> None:
    base = torch.zeros(1, dtype=torch.bfloat16)
    x = torch.tensor([1.0], dtype=torch.bfloat16)
    assert task_arithmetic([x], base, weight=[0.3]).item() == 0.30078125
