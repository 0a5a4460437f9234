"""AWQ's searches against direct computation of what they minimise."""

import pytest
import torch

from attar.errors import NumericsError
from attar.quantization.grids import IntGrid
from attar.quantization.transforms.awq import (
    InputStatistics,
    diagonal_blocks,
    scale_at,
    search_clip,
    search_scale,
    tile_errors,
)

GRID = IntGrid(3, 8)


def layer(rows=(12, 20), columns=32, tokens=400, seed=0):
    g = torch.Generator().manual_seed(seed)
    size = torch.rand(columns, generator=g) * 2
    size[[3, 17]] = 30.0  # salient channels
    mix = torch.eye(columns) + 0.2 * torch.randn(columns, columns, generator=g)
    X = (torch.randn(tokens, columns, generator=g) @ mix) * size
    return X, [torch.randn(n, columns, generator=g) * 0.1 for n in rows]


def statistics(X):
    seen = InputStatistics(X.shape[1])
    for part in X.split(130):
        seen.add(part)
    return seen.hessian.value(), seen.magnitude()


def rounded(W, grid, shrink=1.0):
    return grid.quantize(W, grid.choose(W, shrink)).dequantize()


def error_by_hand(X, weights, grid, s):
    """The paper's loss on the tokens themselves, float64."""
    lost = whole = 0.0
    for W in weights:
        new = rounded(W * s, grid).double() / s.double()
        lost += float((X.double() @ (W.double() - new).T).square().sum())
        whole += float((X.double() @ W.double().T).square().sum())
    return lost / whole


def test_magnitude_is_the_mean_of_absolute_inputs():
    X, _ = layer()
    assert torch.allclose(statistics(X)[1], X.abs().mean(0), rtol=1e-5)


def test_the_plain_search_is_the_papers():
    """Twenty values of alpha, each scale normalised, the least loss on the real tokens."""
    X, weights = layer()
    H, m = statistics(X)
    result = search_scale(weights, [GRID, GRID], H, m, weighted=False)
    losses = {}
    for step in range(20):
        s = X.abs().mean(0) ** (step / 20)
        s = s / (s.max() * s.min()).sqrt()
        losses[step / 20] = error_by_hand(X, weights, GRID, s)
    assert result.alpha == min(losses, key=losses.get) > 0
    assert result.error == pytest.approx(losses[result.alpha], rel=1e-3)
    assert result.rtn_error == pytest.approx(error_by_hand(X, weights, GRID, torch.ones(32)), rel=1e-3)
    assert result.error < 0.9 * result.rtn_error


def test_the_weighted_form_only_adds_candidates():
    X, weights = layer()
    H, m = statistics(X)
    plain = search_scale(weights, [GRID, GRID], H, m, weighted=False)
    both = search_scale(weights, [GRID, GRID], H, m)
    assert both.error <= plain.error
    assert both.error == pytest.approx(error_by_hand(X, weights, GRID, both.scale), rel=1e-3)


def test_weighted_scales_by_hand():
    m, w = torch.tensor([1.0, 4.0, 9.0]), torch.tensor([0.5, 0.25, 1.0])
    s = torch.tensor([float(a**0.5 / b**0.5) for a, b in zip(m, w, strict=True)])
    assert torch.allclose(scale_at(m, 0.5, w), s / (s.max() * s.min()).sqrt())
    assert torch.equal(scale_at(m, 0.0), torch.ones(3))


@pytest.mark.few(6)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("grid", [IntGrid(4, 16), IntGrid(2, 8, symmetric=False), IntGrid(4, 0, rows=0)])
def test_never_worse_than_round_to_nearest(grid, seed):
    X, weights = layer(seed=seed)
    if seed >= 3:
        X = X / X.abs().mean(0)  # no salient channel
    result = search_scale(weights, [grid, grid], *statistics(X), sample=4)
    assert result.error <= result.rtn_error
    assert result.error == pytest.approx(error_by_hand(X, weights, grid, result.scale), rel=1e-3)


def test_shared_channels_get_one_scale():
    X, weights = layer()

    def share(values):
        return values.reshape(2, -1).mean(0).repeat(2)

    s = search_scale(weights, [GRID, GRID], *statistics(X), share=share).scale
    assert torch.equal(s[:16], s[16:]) and s.std() > 0


def test_clip_of_each_tile_is_the_best_of_the_candidates():
    """Tile by tile, with a Hessian that couples no tiles, so that the search by blocks is exact."""
    X, (W, _) = layer()
    H, _ = statistics(X)
    mask = torch.kron(torch.eye(4), torch.ones(8, 8))
    result = search_clip(W, H * mask, GRID)
    for p in range(W.shape[0]):
        for g in range(4):
            columns = slice(8 * g, 8 * g + 8)
            w, h = W[p : p + 1, columns], H[columns, columns].double()
            losses = {}
            for shrink in (sign * (1.0 - 0.5 * step / 20) for step in range(20) for sign in (1, -1)):
                e = (w - rounded(w, GRID, shrink)).double()
                losses[shrink] = float(e @ h @ e.T)
            assert losses[float(f"{float(result.shrink[p, g]):.3f}")] == pytest.approx(
                min(losses.values()), rel=1e-4
            )
    assert result.error < result.rtn_error
    assert (result.shrink < 0).any() and (result.shrink > 0).any()


@pytest.mark.parametrize(
    "grid", [GRID, IntGrid(2, 12), IntGrid(3, 0), IntGrid(3, 8, rows=5), IntGrid(4, 0, rows=0)]
)
def test_clip_lowers_the_whole_error_or_stays_away(grid):
    X, (W, _) = layer()
    H, _ = statistics(X)
    result = search_clip(W, H, grid)
    assert result.shrink.shape == grid.tiles((12, 32))

    def error(shrink):
        E = (W - rounded(W, grid, shrink)).double()
        return float(2 / len(X) * (X.double() @ E.T).square().sum())

    assert result.error == pytest.approx(error(result.shrink), rel=1e-3)
    assert result.rtn_error == pytest.approx(error(1.0), rel=1e-3)
    assert result.error <= result.rtn_error


def test_tile_errors_by_hand():
    X, (W, _) = layer()
    H, _ = statistics(X)
    grid = IntGrid(3, 12, rows=5)  # ragged both ways
    got = tile_errors(W, grid, diagonal_blocks(H, 12), 0.8)
    E = (W - rounded(W, grid, 0.8)).double()
    for p in range(3):
        for g in range(3):
            e, h = E[5 * p : 5 * p + 5, 12 * g : 12 * g + 12], H[12 * g : 12 * g + 12, 12 * g : 12 * g + 12]
            assert float(got[p, g]) == pytest.approx(float(torch.trace(e @ h.double() @ e.T)), rel=1e-4)


def test_inputs_stay_and_damage_is_an_error():
    X, weights = layer()
    H, m = statistics(X)
    kept = [tensor.clone() for tensor in (*weights, H, m)]
    search_scale(weights, [GRID, GRID], H, m)
    search_clip(weights[0], H, GRID)
    assert all(torch.equal(a, b) for a, b in zip(kept, (*weights, H, m), strict=True))
    H[0, 0] = torch.inf
    with pytest.raises(NumericsError):
        search_scale(weights, [GRID, GRID], H, m)


def test_dead_channels_give_finite_scales():
    X, weights = layer()
    X[:, 6] = 0
    s = search_scale(weights, [GRID, GRID], *statistics(X)).scale
    assert torch.isfinite(s).all() and (s > 0).all()
