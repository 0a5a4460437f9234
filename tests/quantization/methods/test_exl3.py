"""EXL3's rounding: the file decodes to the weight returned, errors are corrected, scales fit."""

import pytest
import torch

from attar.errors import NumericsError
from attar.formats import exl3 as layout
from attar.quantization.hessian import output_error
from attar.quantization.methods import exl3
from attar.quantization.methods.exl3 import quantize_layer, round_tiles


def layer(rows=128, columns=256, seed=0):
    """Correlated inputs, weights of several sizes."""
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=g) * torch.linspace(0.2, 3, columns)
    x = torch.randn(600, columns, generator=g).cumsum(1) * 0.2 + torch.randn(600, columns, generator=g)
    return weight, 2 * x.T @ x / 600


@pytest.mark.parametrize(("shape", "bits"), [((128, 256), 2), ((96, 200), 3)])
def test_the_file_decodes_to_the_weight(shape, bits):
    weight, H = layer(*shape)
    before = weight.clone(), H.clone()
    rounded = quantize_layer(weight, H, bits)
    assert torch.equal(weight, before[0]) and torch.equal(H, before[1])
    assert {leaf: tuple(tensor.shape) for leaf, tensor in rounded.tensors.items()} == {
        leaf: shape for leaf, (_, shape) in layout.layout(shape, bits).items()
    }
    assert torch.equal(layout.decode(rounded.tensors, shape).float(), rounded.weight)
    assert rounded.report["error"] == pytest.approx(output_error(weight, rounded.weight, H))
    assert rounded.report["error"] < 0.5 * 4**-bits


def test_feedback_and_fit_lose_less(monkeypatch):
    weight, H = layer()
    full = quantize_layer(weight, H, 2).report["error"]
    monkeypatch.setattr(exl3, "_fitted", lambda W, rounded, H, su, sv, damp: (su, sv))
    unfitted = quantize_layer(weight, H, 2).report["error"]
    monkeypatch.setattr(exl3, "inverse_factor_", lambda G, damp: (torch.eye(len(G)), damp))
    nearest = quantize_layer(weight, H, 2).report["error"]
    assert full < unfitted < 0.8 * nearest


def test_states_are_those_of_the_numbers():
    T = torch.randn(32, 128, generator=torch.Generator().manual_seed(3))
    states, rounded = round_tiles(T, torch.eye(32), 4)
    assert torch.equal(layout.values(layout.pack(states, 4), "mul1", 4).float(), rounded)
    assert (rounded - T).square().mean() < 0.01


def test_odd_weights():
    """Outputs that are zero stay zero; a weight of zeros is one; NaN is named."""
    weight, H = layer()
    weight[3] = 0
    assert not quantize_layer(weight, H, 2).weight[3].any()
    assert not quantize_layer(torch.zeros(128, 128), torch.eye(128), 2).weight.any()
    weight[0, 0] = torch.nan
    with pytest.raises(NumericsError, match="NaN"):
        quantize_layer(weight, H, 2)
