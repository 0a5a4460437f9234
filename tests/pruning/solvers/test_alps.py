"""ALPS against the best of all supports, which small layers allow to try, and against SparseGPT."""

from itertools import combinations, product

import pytest
import torch

from attar.errors import NumericsError, SettingsError
from attar.pruning.solvers.alps import alps
from attar.pruning.solvers.least_squares import masked_least_squares
from attar.pruning.solvers.sparsegpt import sparsegpt
from attar.quantization.hessian import Hessian, output_error
from attar.sparsity import parse_sparsity


def layer(rows=40, columns=96, seed=0, dead=(), tokens=400):
    """A weight and an H with correlated inputs of different sizes."""
    g = torch.Generator().manual_seed(seed)
    mix = torch.eye(columns) + torch.randn(columns, columns, generator=g) / columns**0.5
    size = torch.logspace(-0.5, 0.5, columns)[torch.randperm(columns, generator=g)]
    X = (torch.randn(tokens, columns, generator=g) * size) @ mix
    X[:, list(dead)] = 0.0
    seen = Hessian(columns)
    seen.add(X)
    return torch.randn(rows, columns, generator=g) * 0.1, seen.value()


def errors(W, W_new, H):
    """e H e^T of each row, float64."""
    E = W_new.double() - W.double()
    return ((E @ H.double()) * E).sum(1)


def best_of_all_supports(W, H, supports):
    """The least error of each row over the supports, the weights on each solved exactly."""
    W, H = W.double(), H.double()
    best = torch.full((len(W),), torch.inf, dtype=torch.float64)
    for support in supports:
        keep = torch.tensor(support)
        solved = torch.zeros_like(W)
        solved[:, keep] = torch.linalg.solve(H[keep][:, keep], (W @ H)[:, keep].T).T
        best = torch.minimum(best, errors(W, solved, H))
    return best


@pytest.mark.few(3)
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("amount", ["4:8", "2:4", "1:4"])
def test_near_the_best_of_all_supports(amount, seed):
    W, H = layer(rows=200, columns=8, seed=seed)
    sparsity = parse_sparsity(amount)
    groups = [range(start, start + sparsity.of) for start in range(0, 8, sparsity.of)]
    supports = [sum(parts, ()) for parts in product(*(combinations(g, sparsity.kept) for g in groups))]
    best = best_of_all_supports(W, H, supports).sum()
    ours = errors(W, alps(W, H, sparsity, damp=1e-6), H).sum()
    theirs = errors(W, sparsegpt(W, H, sparsity, damp=1e-6), H).sum()
    assert best <= ours * (1 + 1e-5)
    assert ours - best < 0.25 * (theirs - best), (float(ours / best), float(theirs / best))


@pytest.mark.parametrize("amount", ["0.5", "0.7", "2:4", "4:8"])
def test_loses_a_fifth_less_of_the_output_than_sparsegpt(amount):
    W, H = layer()
    sparsity = parse_sparsity(amount)
    ours = output_error(W, alps(W, H, sparsity), H)
    assert ours < 0.8 * output_error(W, sparsegpt(W, H, sparsity), H)


@pytest.mark.parametrize("dead", [(), (3, 70)])
@pytest.mark.parametrize("amount", ["0.5", "0.9", "2:4", "1:3"])
def test_exactly_the_asked_number_of_zeros(amount, dead):
    W, H = layer(rows=33, dead=dead)
    sparsity = parse_sparsity(amount)
    pruned = alps(W, H, sparsity)
    if sparsity.of:
        stays = (pruned != 0).unflatten(1, (-1, sparsity.of)).sum(-1)
        assert (stays == sparsity.kept).all()
    else:
        if dead:
            assert (pruned[:, list(dead)] != 0).float().mean() > 0.3 * (1 - sparsity.zeros)
        assert int((pruned == 0).sum()) == round(sparsity.zeros * W.numel())


def test_a_singular_hessian_without_damping_is_still_solved():
    W, H = layer(tokens=20)
    pruned = alps(W, H, parse_sparsity("2:4"), damp=0.0)
    assert pruned.isfinite().all() and output_error(W, pruned, H) < 0.2


def test_a_matrix_that_is_no_hessian_is_refused():
    W, H = layer()
    with pytest.raises(NumericsError, match="singular"):
        alps(
            W,
            H - 2 * torch.eye(96) * float(H.diagonal().mean()) + H.diagonal().diag() * 3,
            parse_sparsity("2:4"),
        )


def test_a_pattern_that_does_not_divide_the_inputs_is_refused():
    W, H = layer(columns=90)
    with pytest.raises(SettingsError, match=r"sparsity is '2:4', but must be.*has 90"):
        alps(W, H, parse_sparsity("2:4"))


@pytest.mark.parametrize("broken", ["weight", "hessian"])
def test_nan_is_refused(broken):
    W, H = layer()
    (W if broken == "weight" else H)[0, 0] = float("nan")
    with pytest.raises(NumericsError, match="NaN"):
        alps(W, H, parse_sparsity("0.5"))


def test_inputs_are_untouched_and_the_same_call_gives_the_same_weight():
    W, H = layer()
    before = W.clone(), H.clone()
    first, second = (alps(W.bfloat16(), H, parse_sparsity("2:4")) for _ in range(2))
    assert torch.equal(W, before[0]) and torch.equal(H, before[1]) and torch.equal(first, second)


def test_the_weights_that_stay_are_the_best_ones_even_if_the_search_was_short():
    W, H = layer()
    sparsity = parse_sparsity("0.5")
    short, fitted = (alps(W, H, sparsity, iterations=6, refits=count) for count in (0, 40))
    best = masked_least_squares(W, H, short != 0, iterations=80)
    assert torch.equal(short != 0, fitted != 0)
    assert output_error(W, fitted, H) == pytest.approx(output_error(W, best, H), rel=1e-3)
    assert output_error(W, fitted, H) < 0.98 * output_error(W, short, H)
