"""Weights on even grids: what stands there is what the format's own decoder gives."""

import pytest
import torch

from attar.checkpoint import open_checkpoint
from attar.formats.coded import Coded, uniform_of_codes
from attar.formats.gguf import blocks
from attar.formats.gguf.codes import uniform_of_blocks
from attar.formats.gguf.types import TYPES
from attar.formats.readers import Decoded
from attar.formats.rules import WeightRule
from tests.quantization.packing import pack, save


def values(weight):
    """s (q - z), float32."""
    columns = weight.codes.shape[1]
    groups = torch.arange(columns) // weight.width if weight.g_idx is None else weight.g_idx.long()
    zero = 0.0 if weight.zero is None else weight.zero[:, groups]
    return (weight.codes - zero) * weight.scale[:, groups]


def random_blocks(kind, rows, columns, seed=0):
    generator, size = torch.Generator().manual_seed(seed), TYPES[kind].size
    data = torch.randint(
        0, 256, (rows, columns // TYPES[kind].block * size), dtype=torch.uint8, generator=generator
    )
    item = data.view(-1, size)
    for at in blocks.LAYOUTS[kind].halves.values():
        item[:, at : at + 2] = torch.randn(len(item), 1, generator=generator).half().view(torch.uint8)
    if kind == "MXFP4":
        item[:, 0] = 120 + item[:, 0] % 8
    return data


@pytest.mark.parametrize("kind", list(blocks.LAYOUTS))
def test_every_block_of_gguf(kind):
    data = random_blocks(kind, 6, 512)
    weight, wanted = uniform_of_blocks(kind, data, 512), blocks.dequantize(kind, data, 512)
    assert (
        int(weight.codes.min()) >= -(1 << weight.bits - 1) and int(weight.codes.max()) < 1 << weight.bits - 1
    )
    assert values(weight).sub(wanted).abs().max() <= 1e-6 * wanted.abs().max()


def test_a_tile_whose_scale_is_zero_is_its_minimum():
    data = random_blocks("Q4_K", 2, 256)
    data[:, 0:2] = 0  # d
    wanted = blocks.dequantize("Q4_K", data, 256)
    assert wanted.any()
    assert torch.allclose(values(uniform_of_blocks("Q4_K", data, 256)), wanted)


def test_doubled_codes_of_fp4():
    codes = torch.arange(16, dtype=torch.uint8).repeat(2, 2)
    weight = uniform_of_codes(
        Coded(codes, torch.tensor([[2.0, 4.0], [1.0, 8.0]])), WeightRule("float", 4, "group", 16)
    )
    levels = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
    levels = torch.cat([levels, -levels])
    wanted = torch.cat([torch.cat([levels * 2, levels * 4])[None], torch.cat([levels, levels * 8])[None]])
    assert torch.equal(values(weight), wanted)


def test_float8_has_no_even_grid():
    codes = torch.ones(4, 32).to(torch.float8_e4m3fn)
    assert uniform_of_codes(Coded(codes, torch.ones(4, 1)), WeightRule("float", 8, "channel")) is None


@pytest.mark.few(2)
@pytest.mark.parametrize("scheme", ["W4A16", "W3A16", "W4A16_ASYM", "W8A8", "NVFP4A16"])
def test_a_checkpoint(tmp_path, scheme):
    view = Decoded(pack(save(tmp_path / "dense"), tmp_path / "packed", scheme=scheme)[1])
    coded = [name for name in view.tensors if view.is_coded(name)]
    assert len(coded) == 21
    for name in coded[:7]:
        assert torch.equal(values(view.uniform(name)).bfloat16(), view.load(name).bfloat16())


def test_other_tensors_have_none(tmp_path):
    view = Decoded(pack(save(tmp_path / "dense"), tmp_path / "packed", scheme="FP8")[1])
    assert view.is_coded("model.layers.0.mlp.up_proj.weight") and not view.is_coded("model.norm.weight")
    assert view.uniform("model.layers.0.mlp.up_proj.weight") is None
    assert view.uniform("model.norm.weight") is None
    plain = Decoded(open_checkpoint(tmp_path / "dense"))
    assert not plain.is_coded("model.norm.weight") and plain.uniform("model.norm.weight") is None
