"""Bytes and numbers against the compressed-tensors library: presets, packing, scales, activations."""

import pytest
import torch

pytest.importorskip("compressed_tensors")

from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import dequantize, fake_quantize
from compressed_tensors.quantization.lifecycle.forward import quantize as ct_quantize
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from compressed_tensors.quantization.utils import (
    calculate_qparams,
    compute_dynamic_scales_and_zp,
    generate_gparam,
)

from attar.formats.coded import Coded
from attar.formats.dense_pack import dense_pack, dense_unpack
from attar.formats.layouts import decode, encode
from attar.formats.rules import ActivationRule, WeightRule
from attar.models.fake_quant import quantize_activation
from attar.quantization.calibration import ActivationRange
from attar.quantization.grids import IntGrid
from attar.quantization.methods.rtn import rtn
from attar.quantization.schemes import SCHEMES

pytestmark = pytest.mark.peers

LIBRARY = [name for name in SCHEMES if name != "NF4"]


def library_scheme(name):
    """The library's object for a scheme of ours, through our config."""
    scheme = SCHEMES[name]
    activations = scheme.activations.config() if scheme.activations else None
    return QuantizationScheme(
        targets=["Linear"], weights=scheme.weights.config(), input_activations=activations, format=scheme.form
    )


@pytest.mark.parametrize("name", [name for name in LIBRARY if name != "W8A8_STATIC"])
def test_presets_are_theirs(name):
    assert name in PRESET_SCHEMES
    theirs, ours = preset_name_to_scheme(name, ["Linear"]), library_scheme(name)
    for part in ("weights", "input_activations", "output_activations"):
        one, other = getattr(theirs, part), getattr(ours, part)
        skip = {"observer", "observer_kwargs", "zp_dtype"}
        assert (one and one.model_dump(exclude=skip)) == (other and other.model_dump(exclude=skip)), part
    form = SCHEMES[name].form
    if name == "W4AFP8":  # theirs is int-quantized; vLLM's method for it has the tensors of the packed one
        assert form == "pack-quantized"
    else:
        assert infer_module_format(torch.nn.Linear, theirs).value == form


def test_the_static_scheme_is_accepted():
    ours = library_scheme("W8A8_STATIC")
    assert infer_module_format(torch.nn.Linear, ours).value == SCHEMES["W8A8_STATIC"].form
    assert ours.input_activations.dynamic is False


@pytest.mark.parametrize("bits", range(1, 9))
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LIBRARY)
def test_their_decoder_reads_our_tensors_to_the_same_weight(name, dtype):
    scheme = SCHEMES[name]
    weight = torch.randn(130, 256, generator=torch.Generator().manual_seed(2))
    quantized = rtn(weight, scheme.grid(dtype))
    parameters = quantized.parameters
    coded = Coded(quantized.codes, parameters.scale, parameters.zero, parameters.stored.get("global_scale"))
    tensors = encode(coded, scheme.weights, scheme.form, dtype)
    theirs = BaseCompressor.get_value_from_registry(scheme.form).decompress(tensors, library_scheme(name))
    ours = decode(tensors, scheme.weights, scheme.form)
    assert ours.dtype == theirs["weight"].dtype and torch.equal(ours, theirs["weight"])
    assert torch.equal(ours.float(), quantized.dequantize())


@pytest.mark.parametrize("strategy", ["tensor", "channel", "group"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [1, 3, 4, 8])
def test_their_packer_makes_our_bytes(strategy, symmetric, bits):
    rule = WeightRule("int", bits, strategy, 32 if strategy == "group" else 0, symmetric)
    g = torch.Generator().manual_seed(bits)
    half = 2 ** (bits - 1)
    codes = torch.randint(-half, half, (24, 96), generator=g).to(torch.int8)
    tiles = rule.tiles((24, 96))
    scale = torch.rand(tiles, generator=g) + 0.5
    zero = None if symmetric else torch.randint(-half, half, tiles, generator=g).float()
    ours = encode(Coded(codes, scale, zero), rule, "pack-quantized", torch.float32)
    scheme = QuantizationScheme(targets=["Linear"], weights=rule.config(), format="pack-quantized")
    state = {"weight": decode(ours, rule, "pack-quantized"), "weight_scale": ours["weight_scale"]}
    if zero is not None:
        state["weight_zero_point"] = zero.to(torch.int8).reshape(ours["weight_scale"].shape)
    theirs = BaseCompressor.get_value_from_registry("pack-quantized").compress(state, scheme)
    assert {name: value.shape for name, value in theirs.items()} == {
        name: value.shape for name, value in ours.items()
    }
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


RULES = [
    ActivationRule("int", 8, "token"),
    ActivationRule("int", 4, "token"),
    ActivationRule("int", 8, "token", symmetric=False),
    ActivationRule("int", 8, "tensor"),
    ActivationRule("int", 8, "tensor", dynamic=False),
    ActivationRule("float", 8, "token"),
    ActivationRule("float", 8, "group", group_size=32),
    ActivationRule("int", 8, "group", group_size=32),
    ActivationRule("float", 8, "tensor", dynamic=False),
    SCHEMES["NVFP4"].activations,
    SCHEMES["MXFP4"].activations,
    SCHEMES["MXFP8"].activations,
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", RULES)
def test_activations_are_rounded_as_theirs(rule, dtype):
    x = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(7)).to(dtype) * 3
    x[0, 0], x[1] = 0, x[1] * 1e-3
    above = generate_gparam(x.float().min(), x.float().max()) if rule.strategy == "tensor_group" else None
    scale, arguments = torch.tensor([0.03], dtype=dtype), QuantizationArgs(**rule.config())
    chosen, zero = scale, None
    if rule.dynamic:
        chosen, zero = compute_dynamic_scales_and_zp(x, arguments, torch.nn.Module(), above)
    theirs = fake_quantize(x, chosen, zero, arguments, above)
    scale = scale if above is None else above
    assert torch.equal(quantize_activation(x, rule, scale), theirs)


def test_the_global_scale_of_inputs_is_theirs():
    x = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(7)) + 0.5
    seen = ActivationRange(SCHEMES["NVFP4"].activations)
    for batch in x:
        seen.add(batch)
    assert torch.equal(torch.tensor([1.0 / seen.scale()]), generate_gparam(x.min(), x.max()))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("kind", ["int", "float"])
def test_static_scales_are_theirs(symmetric, kind):
    if kind == "float" and not symmetric:
        pytest.skip("no zero points in float8")
    rule = ActivationRule(kind, 8, "tensor", dynamic=False, symmetric=symmetric)
    x = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(7)) + 0.5
    seen = ActivationRange(rule)
    for batch in x:
        seen.add(batch)
    scale, zero = calculate_qparams(x.min(), x.max(), QuantizationArgs(**rule.config()))
    assert seen.scale() == pytest.approx(scale.item(), rel=1e-6) and seen.zero() == zero.item()
