"""SparseGPT against a float64 brute force that shares no code with it."""

from functools import lru_cache

import pytest
import torch

from attar.errors import NumericsError, SettingsError
from attar.pruning.solvers.sparsegpt import sparsegpt
from attar.quantization.hessian import Hessian, output_error
from attar.sparsity import parse_sparsity

AMOUNTS = ["0.5", "0.3", "0.8", "2:4", "4:8", "1:4", "3:5"]


def layer(rows=24, columns=160, seed=0, dead=()):
    """A weight and an H with correlated inputs of different sizes."""
    g = torch.Generator().manual_seed(seed)
    mix = torch.eye(columns) + 0.4 * torch.randn(columns, columns, generator=g) / columns**0.25
    size = torch.logspace(-0.5, 0.5, columns)[torch.randperm(columns, generator=g)]
    X = (torch.randn(4 * columns, columns, generator=g) * size) @ mix
    X[:, list(dead)] = 0.0
    seen = Hessian(columns)
    seen.add(X)
    return torch.randn(rows, columns, generator=g) * 0.1, seen.value()


@lru_cache(8)
def first_rows_of_inverses(H: bytes, size):
    """[H_R^-1]_{i, R} for R from column i on, for every i; several amounts share an H."""
    H = torch.frombuffer(bytearray(H), dtype=torch.float64).view(size, size)
    return [torch.linalg.inv(H[i:, i:])[0] for i in range(size)]


def obs_by_hand(W, H, sparsity, order, damp=0.01, block=128):
    """The optimal brain surgeon, one column at a time, with the inverse of the Hessian of the columns that
    are left taken afresh each time: removing w_i costs w_i^2 / [H_R^-1]_ii, and w_R loses
    w_i [H_R^-1]_{i, R} / [H_R^-1]_ii."""
    W, H = W.double().clone(), H.double().clone()
    H += damp * H.diagonal().mean() * torch.eye(len(H), dtype=torch.float64)
    inverses = first_rows_of_inverses(H[order][:, order].numpy().tobytes(), len(H))
    cost = torch.tensor([inverse[0] for inverse in inverses])
    stays = torch.ones(W.shape, dtype=torch.bool)
    step = sparsity.of or block
    for start in range(0, len(order), step):
        columns = order[start : start + step]
        scores = W[:, columns] ** 2 / cost[start : start + step]
        if sparsity.of:
            gone = scores.argsort(1)[:, : sparsity.of - sparsity.kept]
            stays[torch.arange(len(W))[:, None], columns[gone]] = False
        else:
            ranks = scores.flatten().argsort().argsort().reshape(scores.shape)
            stays[:, columns] = ranks >= round(scores.numel() * sparsity.zeros)
        for i in range(start, start + len(columns)):
            removed = torch.where(stays[:, order[i]], 0.0, W[:, order[i]])
            W[:, order[i:]] -= removed[:, None] * inverses[i] / inverses[i][0]
    return W * stays


@pytest.mark.few(4)
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("amount", AMOUNTS)
def test_agrees_with_brute_force(amount, act_order):
    W, H = layer()
    sparsity = parse_sparsity(amount)
    order = torch.arange(160)
    if act_order:
        groups = order.reshape(-1, sparsity.of or 1)
        sizes = H.diagonal()[groups].sum(1)
        order = groups[sizes.argsort(descending=True, stable=True)].flatten()
    wanted = obs_by_hand(W, H, sparsity, order)
    pruned = sparsegpt(W, H, sparsity, act_order=act_order)
    assert ((pruned != 0) == (wanted != 0)).double().mean() > 0.999
    same = ((pruned != 0) == (wanted != 0)).all(1)
    torch.testing.assert_close(pruned[same].double(), wanted[same], rtol=1e-3, atol=2e-5)


@pytest.mark.few(8)
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("amount", [*AMOUNTS, "20:32"])
def test_exactly_the_asked_number_of_zeros(amount, act_order, compiled, monkeypatch):
    if not compiled:
        monkeypatch.setenv("ATTAR_KERNELS", "off")
    W, H = layer(rows=33, dead=[3, 70])
    sparsity = parse_sparsity(amount)
    pruned = sparsegpt(W, H, sparsity, act_order=act_order)
    if sparsity.of:
        stays = (pruned != 0).unflatten(1, (-1, sparsity.of)).sum(-1)
        assert (stays == sparsity.kept).all()
    else:  # a block has a whole number of zeros
        assert abs((pruned == 0).sum().item() - round(sparsity.zeros * W.numel())) <= 2
        kept = (pruned[:, [3, 70]] != 0).float().mean()
        assert kept > 0.3 * (1 - sparsity.zeros), "unseen inputs are judged by their weights"


@pytest.mark.parametrize("amount", ["0.5", "0.7", "2:4", "4:8"])
def test_kept_weights_make_up_for_those_removed(amount):
    W, H = layer(rows=64, columns=256)
    sparsity = parse_sparsity(amount)
    error = output_error(W, sparsegpt(W, H, sparsity), H)
    wanda = W * sparsity.mask(W.abs() * H.diagonal().sqrt(), by_row=True)
    assert error < 0.75 * output_error(W, wanda, H)
    assert error < 0.75 * output_error(W, W * sparsity.mask(W.abs()), H)


def test_independent_inputs_are_pruned_by_their_energy_alone():
    W, _ = layer()
    H = torch.linspace(0.5, 2.0, 160).diag()
    pruned = sparsegpt(W, H, parse_sparsity("2:4"), damp=1e-6)
    mask = parse_sparsity("2:4").mask(W.square() * H.diagonal())
    torch.testing.assert_close(pruned, W * mask, rtol=0, atol=1e-6)


def test_a_pattern_that_does_not_divide_the_inputs_is_refused():
    W, H = layer(columns=150)
    with pytest.raises(SettingsError, match=r"sparsity is '2:4', but must be.*has 150"):
        sparsegpt(W, H, parse_sparsity("2:4"))


@pytest.mark.parametrize("broken", ["weight", "hessian"])
def test_nan_is_refused(broken):
    W, H = layer()
    (W if broken == "weight" else H)[0, 0] = float("nan")
    with pytest.raises(NumericsError, match="NaN"):
        sparsegpt(W, H, parse_sparsity("0.5"))


def test_inputs_are_untouched_and_bfloat16_weights_are_taken():
    W, H = layer()
    W = W.bfloat16()
    before = W.clone(), H.clone()
    first, second = (sparsegpt(W, H, parse_sparsity("2:4")) for _ in range(2))
    assert torch.equal(W, before[0]) and torch.equal(H, before[1]) and torch.equal(first, second)
    assert first.dtype == torch.float32


def test_one_row():
    W, H = layer(rows=1, columns=8)
    assert (sparsegpt(W, H, parse_sparsity("2:4")) != 0).sum() == 4
    assert (sparsegpt(W, H, parse_sparsity("50%")) != 0).sum() == 4
