"""Bytes against the compressed-tensors library: packing, scales, decoding."""

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.lifecycle.forward import quantize as ct_quantize
from compressed_tensors.quantization.utils import calculate_qparams

from attar.formats.compressed_tensors import Integers, decode, encode
from attar.formats.dense_pack import dense_pack, dense_unpack
from attar.quantization.grids import IntGrid
from attar.quantization.rtn import rtn

pytestmark = pytest.mark.peers


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("columns", [32, 48, 33, 7])
def test_packing_is_byte_for_byte_theirs(bits, columns):
    g = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 2**bits, (5, columns), generator=g, dtype=torch.uint8)
    signed = (codes.to(torch.int16) - 2 ** (bits - 1)).to(torch.int8)
    ours = dense_pack(codes, bits)
    assert torch.equal(ours, pack_to_int32(signed, bits))
    assert torch.equal(unpack_from_int32(ours, bits, torch.Size((5, columns))), signed)
    assert torch.equal(dense_unpack(ours, bits, columns), codes)


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_scales_and_codes_are_theirs(bits, symmetric):
    weight = torch.randn(16, 128, generator=torch.Generator().manual_seed(1))
    grouped = weight.reshape(16, 4, 32)
    arguments = QuantizationArgs(num_bits=bits, symmetric=symmetric, strategy="group", group_size=32)
    scale, zero = calculate_qparams(grouped.amin(-1), grouped.amax(-1), arguments)
    ours = rtn(weight, IntGrid(bits, 32, symmetric))
    assert torch.allclose(ours.parameters.scale, scale.float(), rtol=1e-6)
    if not symmetric:
        assert torch.equal(ours.parameters.zero, zero.float())
    theirs = ct_quantize(weight, scale, zero, arguments, dtype=torch.int8)
    assert torch.equal(ours.codes, theirs)
    assert torch.allclose(ours.dequantize(), dequantize(theirs, scale, zero, arguments), atol=1e-6)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_decoding_inverts_encoding(bits, symmetric):
    weight = torch.randn(24, 96, generator=torch.Generator().manual_seed(2))
    made = rtn(weight, IntGrid(bits, 32, symmetric, torch.bfloat16))
    whole = Integers(made.codes, made.parameters.scale, made.parameters.zero, bits)
    assert torch.equal(decode(encode(whole, torch.bfloat16), bits).float(), made.dequantize())
