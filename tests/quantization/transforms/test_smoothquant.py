"""SmoothQuant against its equation, written out by hand."""

import pytest
import torch

from attar.errors import NumericsError
from attar.quantization.grids import IntGrid
from attar.quantization.transforms.smoothquant import ActivationMaxima, migration, nearest, search_migration

W8, A8 = IntGrid(8, 0), IntGrid(8, 0)


def layer(rows=(6, 10), columns=24, tokens=300, seed=0):
    """Two weights with one input that has three outlier channels."""
    g = torch.Generator().manual_seed(seed)
    X = torch.randn(tokens, columns, generator=g)
    X[:, :3] *= 40
    return X, [torch.randn(n, columns, generator=g) * 0.1 for n in rows]


def seen(X, sample=512, step=70):
    extremes = ActivationMaxima(X.shape[1], sample)
    for start in range(0, len(X), step):
        extremes.add(X[start : start + step])
    return extremes


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.75, 1.0])
def test_equation_4(alpha):
    X, weights = layer()
    s = migration(seen(X).largest, weights, alpha)
    for j in range(X.shape[1]):
        x = max(abs(float(value)) for value in X[:, j])
        w = max(abs(float(value)) for weight in weights for value in weight[:, j])
        assert float(s[j]) == pytest.approx(x**alpha / w ** (1 - alpha), rel=1e-5)


def test_half_makes_both_maxima_equal():
    """The paper's reading of alpha = 0.5: X_j / s and W_j s have the same largest magnitude."""
    X, weights = layer()
    s = migration(seen(X).largest, weights, 0.5)
    assert torch.allclose((X / s).abs().amax(0), (torch.cat(weights) * s).abs().amax(0), rtol=1e-5)


def by_hand(X, weights, s):
    """Output error in float64, rounding every row of X / s and of W s by itself."""
    lost = whole = 0.0
    for W in weights:
        rounded = []
        for matrix in (X / s, W * s):
            scale = 2 * matrix.abs().amax(1, keepdim=True) / 255
            rounded.append((matrix / scale).round().clamp(-128, 127).double() * scale.double())
        Y = X.double() @ W.double().T
        lost += float((Y - rounded[0] @ rounded[1].T).square().sum())
        whole += float(Y.square().sum())
    return lost / whole


def test_the_search_takes_the_alpha_of_least_output_error():
    X, weights = layer()
    result = search_migration(seen(X), weights, [W8, W8], A8)
    errors = {
        step / 20: by_hand(X, weights, migration(X.abs().amax(0), weights, step / 20)) for step in range(21)
    }
    assert result.alpha == min(errors, key=errors.get)
    assert result.error == pytest.approx(errors[result.alpha], rel=1e-2)
    assert result.plain_error == pytest.approx(by_hand(X, weights, torch.ones(24)), rel=1e-2)
    assert result.error < 0.5 * result.plain_error  # outliers are what it is for


def test_never_worse_than_no_smoothing():
    g = torch.Generator().manual_seed(3)
    X, W = torch.randn(100, 16, generator=g), torch.randn(5, 16, generator=g)
    W[:, 4] *= 20
    X[:, 4] *= 50  # alpha = 0 would shrink the very column that matters
    result = search_migration(seen(X), [W], [IntGrid(3, 0)], None, alphas=(0.0,))
    assert result.error == result.plain_error
    assert result.alpha is None and torch.equal(result.scale, torch.ones(16))


def test_the_sample_is_spread_over_all_tokens_however_they_come():
    X = torch.arange(1000.0)[:, None].expand(-1, 4)
    one, many = seen(X, 100, 1000), seen(X, 100, 37)
    assert torch.equal(one.sample(), many.sample())
    assert 50 <= len(one.sample()) <= 100
    assert one.sample()[0, 0] == 0 and one.sample()[-1, 0] > 950
    assert len(set(one.sample()[:, 0].diff().tolist())) == 1


def test_shared_channels_get_one_scale():
    X, weights = layer()

    def share(values):
        return values.reshape(2, -1).amax(0).repeat(2)

    result = search_migration(seen(X), weights, [W8, W8], A8, share=share)
    assert torch.equal(result.scale[:12], result.scale[12:])


def test_inputs_stay_and_damage_is_an_error():
    X, weights = layer()
    kept = [weight.clone() for weight in weights]
    weights = [weight.bfloat16() for weight in weights]
    result = search_migration(seen(X), weights, [W8, W8], A8)
    assert result.scale.dtype == torch.float32
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(weights, kept, strict=True))
    weights[0][0, 0] = torch.nan
    with pytest.raises(NumericsError):
        search_migration(seen(X), weights, [W8, W8], A8)
    with pytest.raises(NumericsError):
        search_migration(ActivationMaxima(24), kept, [W8, W8], A8)


def test_zero_channels_give_finite_scales():
    X, weights = layer()
    X[:, 5] = 0
    weights = [weight.index_fill(1, torch.tensor([7]), 0.0) for weight in weights]
    for alpha in (0.0, 0.5, 1.0):
        s = migration(seen(X).largest, weights, alpha)
        assert torch.isfinite(s).all() and (s > 0).all()


def test_nearest_rounds_each_token_by_itself():
    X, _ = layer()
    one = torch.stack([nearest(row[None], A8)[0] for row in X[:10]])
    assert torch.equal(nearest(X[:10], A8), one)
