"""Codes as llama.cpp's blocks: the gguf library decodes them to (code - zero) * scale."""

import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from attar.formats.coded import Coded
from attar.formats.gguf.blocks import pack
from attar.formats.gguf.codes import exact_type, to_blocks
from attar.formats.rules import WeightRule


@pytest.mark.parametrize(
    ("bits", "symmetric", "wanted"), [(4, False, "Q4_1"), (5, False, "Q5_1"), (4, True, "Q4_0")]
)
def test_decoded_values_are_those_of_the_codes(bits, symmetric, wanted):
    torch.manual_seed(0)
    half = 2 ** (bits - 1)
    codes = torch.randint(-half, half, (6, 128)).to(torch.int8)
    scale = torch.randint(1, 9, (6, 2)) / 1024.0
    zero = None if symmetric else torch.randint(-half, half, (6, 2)).float()
    coded, rule = Coded(codes, scale, zero), WeightRule("int", bits, "group", 64, symmetric)
    assert exact_type(coded, rule) == (wanted, "")
    data = pack(wanted, *to_blocks(wanted, coded, rule))
    got = torch.from_numpy(dequantize(data.numpy(), GGMLQuantizationType[wanted]))
    shifted = codes.float() - (0 if zero is None else zero.repeat_interleave(64, 1))
    assert torch.equal(got, shifted * scale.repeat_interleave(64, 1))
