"""The search in torch, which machines without a compiler use: what test_ggml.py asks of llama.cpp's formats
holds without the compiled kernel too."""

import pytest
import torch

from attar.quantization.grids import GGML
from attar.quantization.grids import ggml as module
from attar.quantization.grids.ggml_search import clipped
from attar.quantization.methods.rtn import rtn

KINDS = list(GGML)


@pytest.fixture(autouse=True)
def in_torch(monkeypatch):
    monkeypatch.setenv("ATTAR_KERNELS", "off")


@pytest.fixture(scope="module")
def weight():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(12, 512, generator=generator) * 0.02
    return values * torch.exp(0.5 * torch.randn(12, 512, generator=generator))


# squared error over that of the weights, a little above what the search reached when it was written
LARGEST = {
    "Q4_0": 0.0125, "Q4_1": 0.0075, "Q5_0": 0.0031, "Q5_1": 0.0017, "Q8_0": 5.0e-5,
    "Q2_K": 0.087, "Q3_K": 0.031, "Q4_K": 0.0075, "Q5_K": 0.0018, "Q6_K": 4.8e-4,
    "IQ4_NL": 0.0082, "IQ4_XS": 0.0082,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_its_error(kind, weight):
    lost = (rtn(weight, GGML[kind]).dequantize() - weight).square().sum() / weight.square().sum()
    assert 0.9 * LARGEST[kind] < lost < LARGEST[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_importance_moves_the_error(kind, weight):
    v = torch.exp(1.5 * torch.randn(512, generator=torch.Generator().manual_seed(2)))
    plain, weighted = (GGML[kind].search(weight, item).dequantize() - weight for item in (None, v))
    assert (weighted.square() * v).sum() < (plain.square() * v).sum()
    assert weighted.square().sum() > plain.square().sum()


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_do_not_know_of_each_other(kind, weight, monkeypatch):
    whole = GGML[kind].choose(weight)
    monkeypatch.setattr(module, "CHUNK", 1)
    single = GGML[kind].choose(weight)
    assert torch.allclose(single.scale, whole.scale, rtol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_those_of_the_grid(kind, weight):
    result = GGML[kind].search(weight)
    assert torch.equal(result.codes, GGML[kind].quantize(weight, result.parameters).codes)
    assert result.codes.dtype == GGML[kind].code_dtype


@pytest.mark.parametrize("kind", KINDS)
def test_hard_blocks(kind):
    weight = torch.zeros(5, 256)
    weight[1] = 0.25
    weight[2, 17] = 3.0
    weight[3] = 1e-30
    weight[4] = torch.linspace(-1, 1, 256) * 4e4
    result = GGML[kind].search(weight)
    decoded = result.dequantize()
    assert torch.isfinite(decoded).all() and (result.parameters.scale != 0).all()
    assert decoded[0].abs().max() < 1e-6 and decoded[3].abs().max() < 1e-6
    assert torch.allclose(decoded[1], weight[1], rtol=0.05)
    assert decoded[2, 17].item() == pytest.approx(3.0, rel=0.05)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q3_K", "Q4_K"])
def test_shrink_clips_the_range_of_each_tile(kind, weight):
    layout = GGML[kind].layout
    shrink = torch.linspace(0.4, 1.0, 512 // layout.tile).expand(12, -1)
    x = clipped(weight.reshape(12, -1, layout.block // layout.tile, layout.tile), shrink).reshape(12, 512)
    assert torch.equal(GGML[kind].choose(weight, shrink).scale, GGML[kind].choose(x).scale)
