"""NF4 files against bitsandbytes: its bytes, its decoder, and transformers' loader on top of it."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from attar.formats.bitsandbytes import STATE, decode_nf4, encode_nf4, layout_nf4, read_state
from attar.models.loading.load import load_model
from attar.quantization.grids.nf4 import LEVELS, NF4Grid
from attar.quantization.methods.rtn import rtn
from tests import tiny_models
from tests.quantization.packing import pack, save

bnb = pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.peers


def ours(weight, double):
    quantized = rtn(weight, NF4Grid(64, double, weight.dtype))
    nested = quantized.parameters.stored if double else None
    return encode_nf4(quantized.codes, quantized.parameters.scale, torch.tensor(LEVELS), weight.dtype, nested)


def theirs(weight, double):
    data, state = bnb.functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=double)
    return {"weight": data, **{f"weight.{k}": v for k, v in state.as_dict(packed=True).items()}}, state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_file_is_theirs_byte_for_byte(dtype):
    weight = torch.randn(96, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    wanted, _ = theirs(weight, False)
    got = ours(weight, False)
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_coded_scales_have_their_names_types_and_shapes(dtype):
    weight = torch.randn(96, 512, generator=torch.Generator().manual_seed(0)).to(dtype)
    wanted, _ = theirs(weight, True)
    got = ours(weight, True)
    for name, tensor in wanted.items():
        if name != STATE:
            assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape), name
    assert layout_nf4((96, 512), 64, dtype, True).keys() == wanted.keys()
    one, other = read_state(got[STATE]), read_state(wanted[STATE])
    assert one.keys() == other.keys()
    assert one["nested_offset"] == pytest.approx(other["nested_offset"], rel=1e-6)


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_our_decoder_reads_their_tensors_as_theirs_does(double, dtype):
    weight = torch.randn(96, 256, generator=torch.Generator().manual_seed(1)).to(dtype)
    tensors, state = theirs(weight, double)
    wanted = bnb.functional.dequantize_4bit(tensors["weight"], state)
    got = decode_nf4(tensors)
    assert got.dtype == dtype
    assert torch.allclose(got.float(), wanted.float(), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("family", ["llama3", "gpt2"])
def test_transformers_loads_it(family, double, tmp_path):
    folder = save(tmp_path / "dense", family, dtype=torch.float32)
    _, result = pack(folder, tmp_path / "out", scheme="NF4", double_quant=double)
    model = AutoModelForCausalLM.from_pretrained(result.path, dtype=torch.float32, device_map="cpu")
    own, actual = load_model(result), 0
    for name, module in model.named_modules():
        if isinstance(module, bnb.nn.Linear4bit):
            actual += 1
            wanted = bnb.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
            weight = own.get_submodule(name).weight
            assert torch.allclose(weight.T if family == "gpt2" else weight, wanted, rtol=1e-6, atol=1e-7)
    assert actual == len([name for name in result.tensors if name.endswith(".absmax")])
    rows = tiny_models.tokens(model)
    one, other = tiny_models.logits(model, rows), tiny_models.logits(own, rows)
    assert (one - other).norm() < 0.02 * other.norm()  # on some CPUs its product is in bfloat16
