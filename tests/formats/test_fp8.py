"""FP8 as models are published: decoded as transformers decodes it, its inputs rounded where it is run."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

import attar
from attar.checkpoint import open_checkpoint
from attar.checkpoint.inspect import inspect
from attar.errors import NumericsError
from attar.formats.readers import Decoded, reader
from attar.models.loading.load import load_model
from tests import quantized_sources, tiny_models

NAME = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def dense(tmp_path):
    return tiny_models.save(
        tiny_models.build("llama3", **quantized_sources.SIZES), tmp_path / "dense", dtype=torch.bfloat16
    )


@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize("stored", ["F32", "BF16", "U8", "F8_E8M0"])
def test_decoded_as_transformers_decodes_it(dense, blocks, stored, tmp_path):
    folder = quantized_sources.to_fp8(dense, tmp_path / "fp8", blocks=blocks)
    tensors = load_file(folder / "model.safetensors")
    scale = tensors[f"{NAME}_scale_inv"].float()
    if stored in ("U8", "F8_E8M0"):
        power = scale.log2().round()
        scale = (power + 127).to(torch.uint8) if stored == "U8" else power.exp2().to(torch.float8_e8m0fnu)
    tensors[f"{NAME}_scale_inv"] = scale.bfloat16() if stored == "BF16" else scale
    save_file(tensors, folder / "model.safetensors")
    view = Decoded(open_checkpoint(folder))
    judge = Fp8Dequantize(None)._dequantize_one(tensors[NAME], tensors[f"{NAME}_scale_inv"], torch.bfloat16)
    assert torch.equal(view.load(NAME), judge)
    assert view.tensors[NAME].dtype == "BF16" and view.tensors[NAME].shape == (256, 128)
    assert not any("scale" in name for name in view.tensors)


def test_a_block_may_reach_beyond_the_rows_and_an_output_have_a_scale(dense, tmp_path):
    folder = quantized_sources.to_fp8(dense, tmp_path / "fp8")
    name = "model.layers.0.self_attn.k_proj.weight"  # 64 rows in blocks of 128
    tensors = load_file(folder / "model.safetensors")
    codes, scale = tensors[name].float(), tensors[f"{name}_scale_inv"]
    assert codes.shape == (64, 128) and scale.shape == (1, 1)
    assert torch.equal(Decoded(open_checkpoint(folder)).load(name), (codes * scale).bfloat16())
    rows = torch.rand(64, 1) + 0.5
    tensors = {key: value for key, value in tensors.items() if "scale_inv" not in key or name in key}
    tensors = {
        key: value.bfloat16() if value.element_size() == 1 and key != name else value
        for key, value in tensors.items()
    }
    save_file({**tensors, f"{name}_scale_inv": rows}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = None
    (folder / "config.json").write_text(json.dumps(config))
    assert torch.equal(Decoded(open_checkpoint(folder)).load(name), (codes * rows).bfloat16())


def test_blocks_of_one_output_with_exponents_are_carried_as_mxfp8(dense, tmp_path):
    folder = quantized_sources.to_fp8(dense, tmp_path / "fp8")
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        rows, columns = tensors[name.removesuffix("_scale_inv")].shape
        exponents = torch.randint(115, 120, (rows, columns // 32), generator=generator)
        tensors[name] = exponents.to(torch.uint8)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= {"weight_block_size": [1, 32], "scale_fmt": "ue8m0"}
    (folder / "config.json").write_text(json.dumps(config))
    judge = Fp8Dequantize(None)._dequantize_one(tensors[NAME], tensors[f"{NAME}_scale_inv"], torch.bfloat16)
    assert torch.equal(Decoded(open_checkpoint(folder)).load(NAME), judge)
    out = attar.quantize(folder, tmp_path / "out", scheme="MXFP8", method="rtn", check_tokens=0)
    assert all(row["carried"] for row in out.card.details["layers"])
    assert torch.equal(out.load(f"{NAME}_scale"), tensors[f"{NAME}_scale_inv"])
    assert torch.equal(out.load(NAME).float(), tensors[NAME].float())


@pytest.mark.parametrize(("blocks", "inverse"), [(True, "weight_scale_inv"), (False, "weight_scale")])
def test_its_inputs_are_rounded_where_it_is_run_and_not_in_the_view(dense, blocks, inverse, tmp_path):
    checkpoint = open_checkpoint(
        quantized_sources.to_fp8(dense, tmp_path / "fp8", blocks=blocks, inverse=inverse)
    )
    run, view = (load_model(model, dtype=torch.float32) for model in (checkpoint, Decoded(checkpoint)))
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
    first, second = (model.get_submodule(NAME.removesuffix(".weight")) for model in (run, view))
    scale = x.abs().amax(-1, keepdim=True) / 448 if blocks else torch.tensor(0.02).bfloat16().float()
    rounded = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    assert torch.equal(second(x), x @ first.weight.T)
    torch.testing.assert_close(first(x), rounded @ first.weight.T)
    assert run.lm_head(x).equal(view.lm_head(x))


def test_named_as_what_it_is(dense, tmp_path):
    blocks = inspect(quantized_sources.to_fp8(dense, tmp_path / "blocks")).render()
    assert "W8A8 float blocks of 128 x 128 (fp8): 14 tensors at 8.00 bits" in blocks
    single = inspect(quantized_sources.to_fp8(dense, tmp_path / "single", blocks=False)).render()
    assert "W8A8 float (fp8): 14 tensors at 8.00 bits" in single


def test_scales_that_cannot_be_right_are_named(dense, tmp_path):
    folder = quantized_sources.to_fp8(dense, tmp_path / "fp8")
    tensors = load_file(folder / "model.safetensors")
    read = reader(open_checkpoint(folder))
    read.check(NAME)
    save_file({**tensors, f"{NAME}_scale_inv": torch.zeros(2, 1)}, folder / "model.safetensors")
    with pytest.raises(
        NumericsError, match=r"up_proj\.weight_scale_inv holds zero, negative or infinite scales"
    ):
        reader(open_checkpoint(folder)).check(NAME)
