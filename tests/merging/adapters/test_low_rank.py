"""Truncated singular value decompositions against torch's full one, and known matrices."""

import pytest
import torch

from attar.merging.adapters import low_rank as module
from attar.merging.adapters.low_rank import chosen_rank, low_rank


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def matrix(n, k, decay, seed=0):
    """Random singular vectors; singular values that fall by ``decay`` each."""
    side = min(n, k)
    U = torch.linalg.qr(torch.randn(n, side, generator=seeded(seed), dtype=torch.float64)).Q
    V = torch.linalg.qr(torch.randn(k, side, generator=seeded(seed + 1), dtype=torch.float64)).Q
    return ((U * decay ** torch.arange(side)) @ V.T).float()


@pytest.mark.parametrize("shape", [(40, 70), (70, 40), (1, 9), (9, 1), (33, 33)])
def test_exact_factors_are_the_best_ones(shape):
    D = torch.randn(shape, generator=seeded())
    kept = D.clone()
    for rank in (1, 5, 64):
        factors = low_rank(D, rank, 0.0, seeded())
        U, S, Vt = torch.linalg.svd(D.double(), full_matrices=False)
        best = (U[:, :rank] * S[:rank]) @ Vt[:rank]
        assert factors.rank == min(rank, *shape)
        assert torch.allclose((factors.B @ factors.A).double(), best, atol=1e-5)
        error = (D - factors.B @ factors.A).norm() / D.norm()
        assert factors.error == pytest.approx(float(error), rel=1e-3, abs=1e-6)
        assert factors.energy == pytest.approx(float(S[:rank].square().sum() / S.square().sum()), rel=1e-5)
    assert torch.equal(D, kept)


def test_both_factors_carry_half_of_the_scale():
    factors = low_rank(torch.randn(30, 50, generator=seeded()), 4, 0.0, seeded())
    assert torch.allclose(factors.A.norm(dim=1), factors.B.norm(dim=0), rtol=1e-4)
    assert (factors.B.gather(0, factors.B.abs().argmax(0, keepdim=True)) > 0).all()


def test_a_matrix_of_low_rank_comes_back_and_no_more_than_its_rank():
    D = torch.randn(60, 3, generator=seeded()) @ torch.randn(3, 80, generator=seeded(1))
    factors = low_rank(D, 16, 0.0, seeded())
    assert factors.rank == 3 and torch.allclose(factors.B @ factors.A, D, atol=1e-4)
    assert low_rank(torch.zeros(4, 6), 2, 0.9, seeded()).rank == 0


def test_rank_by_energy_is_the_smallest_that_holds_it():
    S = torch.tensor([3.0, 2.0, 1.0, 0.5], dtype=torch.float64)
    total = float(S.square().sum())
    for energy, rank in ((0.5, 1), (0.64, 2), (9 / 14.25, 1), (0.98, 3), (1.0, 4)):
        assert chosen_rank(S, total, 9, energy, 4) == rank
    assert chosen_rank(S, total, 2, 0.98, 4) == 2
    assert chosen_rank(S, total * 9, 3, 0.98, 4) == 3  # what was computed does not hold it
    D = matrix(50, 60, 0.7)
    factors = low_rank(D, 40, 0.9, seeded())
    assert factors.energy >= 0.9 > low_rank(D, factors.rank - 1, 0.0, seeded()).energy


@pytest.mark.parametrize(("decay", "loss"), [(1.0, 1e-2), (0.99, 1e-3), (0.9, 1e-6)])
def test_krylov_is_as_good_as_exact(decay, loss, monkeypatch):
    monkeypatch.setattr(module, "EXACT_UP_TO", 0)
    monkeypatch.setattr(module, "_POWERS", 4)
    D = matrix(260, 400, decay) if decay < 1 else torch.randn(260, 400, generator=seeded())
    best = low_rank(D, 8, 0.0, seeded(), exact=True)
    factors = low_rank(D, 8, 0.0, seeded())
    assert not torch.equal(factors.A, best.A)  # the other way was taken
    assert best.energy * (1 - loss) <= factors.energy <= best.energy * (1 + 1e-6)
    measured = (D - factors.B @ factors.A).norm() / D.norm()
    assert factors.error == pytest.approx(float(measured), rel=1e-4)
    assert torch.equal(factors.A, low_rank(D, 8, 0.0, seeded()).A)
