"""NF4 against the published table, nearest by brute force, and double quantization spelled out."""

import pytest
import torch

from attar.quantization.grids import NF4Grid
from attar.quantization.grids.nf4 import dynamic_map
from attar.quantization.methods.rtn import rtn

# Dettmers et al. 2023, appendix E
TABLE = torch.tensor(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ]
)  # fmt: skip


@pytest.fixture(scope="module")
def weight():
    return torch.randn(48, 640, generator=torch.Generator().manual_seed(0)) * 0.03


def test_levels_are_the_published_ones():
    assert torch.equal(NF4Grid().level(torch.arange(16)), TABLE)
    assert torch.equal(NF4Grid().nearest(TABLE), torch.arange(16.0))


def test_codes_are_the_nearest_levels(weight):
    quantized = rtn(weight, NF4Grid(64))
    scale = weight.reshape(48, 10, 64).abs().amax(-1)
    assert torch.equal(quantized.parameters.scale, scale)
    unit = (weight.reshape(48, 10, 64) / scale[..., None]).double()
    distance = (unit[..., None] - TABLE.double()).abs()
    reached = distance.gather(-1, quantized.codes.reshape(48, 10, 64, 1).long())[..., 0]
    assert (reached <= distance.amin(-1) + 1e-7).all()
    decoded = TABLE[quantized.codes.int()].reshape(unit.shape) * scale[..., None]
    assert torch.equal(quantized.dequantize(), decoded.reshape(48, 640))


def test_a_ragged_last_block_and_several_rows():
    weight = torch.randn(6, 100, generator=torch.Generator().manual_seed(1))
    quantized = rtn(weight, NF4Grid(64, rows=4))
    assert quantized.parameters.scale.shape == (2, 2)
    assert quantized.parameters.scale[1, 1] == weight[4:, 64:].abs().max()


def test_the_dynamic_map_is_symmetric_but_for_one_and_ascends():
    D = dynamic_map()
    assert len(D) == 256 and (D[1:] > D[:-1]).all()
    assert D[-1] == 1 and 0 in D.tolist()
    assert torch.equal(-D[:127].flip(0), D[128:255])
    assert D[254].item() == pytest.approx(1 - 0.9 / 64 / 2)


def test_double_quantization_spelled_out(weight):
    quantized = rtn(weight, NF4Grid(64, double=True))
    top = weight.reshape(-1, 64).abs().amax(-1).double()
    stored = quantized.parameters.stored
    assert stored["nested_offset"].item() == pytest.approx(top.mean().item(), rel=1e-6)
    D = stored["nested_map"].double()
    codes = stored["absmax_codes"].reshape(-1)
    for block in range(0, len(top), 256):
        rest = top[block : block + 256] - stored["nested_offset"].double()
        peak = rest.abs().max()
        assert stored["nested_absmax"][block // 256].item() == pytest.approx(peak.item(), rel=1e-5)
        distance = (rest[:, None] / peak - D).abs()
        reached = distance.gather(1, codes[block : block + 256, None].long())[:, 0]
        assert (reached <= distance.amin(1) + 1e-5).all()
    runs = stored["nested_absmax"].repeat_interleave(256)[: len(top)]
    read = (stored["nested_map"][codes.int()] * runs + stored["nested_offset"]).reshape(48, 10)
    assert torch.equal(quantized.parameters.scale, read)


def test_double_quantization_costs_little(weight):
    plain, double = rtn(weight, NF4Grid(64)), rtn(weight, NF4Grid(64, double=True))
    errors = [(result.dequantize() - weight).square().mean() for result in (plain, double)]
    assert errors[1] < errors[0] * 1.05


def test_scales_stay_positive_next_to_blocks_of_zeros(weight):
    weight = weight.clone()
    weight[7] = 0.0
    weight[9, :64] *= 50
    quantized = rtn(weight, NF4Grid(64, double=True))
    assert (quantized.parameters.scale > 0).all()
    assert (quantized.dequantize()[7] == 0).all()


def test_bits_per_weight():
    assert NF4Grid(64).bits_per_weight((64, 640)) == 4.5
    blocks = 64 * 10
    assert NF4Grid(64, double=True).bits_per_weight((64, 640)) == 4 + (8 * blocks + 32 * 3 + 32) / (64 * 640)
