"""gpt-oss's experts in MXFP4: decoded as transformers decodes them, carried into GGUF untouched,
and written as published."""

import json

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from attar.checkpoint import open_checkpoint
from attar.deployment.settings import ExportSettings
from attar.deployment.stage import export
from attar.errors import CheckpointError, ModelError, NumericsError
from attar.formats.readers import Decoded, reader
from attar.models.loading.load import load_model
from attar.quantization.settings import quantize_settings
from attar.quantization.stage import quantize
from tests import tiny_models
from tests.decoded import dequantize_state
from tests.formats.gguf.variants import build


def packed(folder):
    """A tiny gpt-oss whose experts are random codes; the codes by name."""
    tiny_models.save(build("gpt_oss"), folder, dtype=torch.bfloat16)
    state, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(3)
    codes = {}
    for name in [name for name in state if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, inputs, rows = state.pop(name).shape
        shape = (count, rows, inputs // 32)
        codes[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=generator).to(torch.uint8)
        codes[f"{name}_scales"] = torch.randint(118, 126, shape, generator=generator).to(torch.uint8)
    save_file({**state, **codes}, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return codes


def test_experts_decode_as_transformers_decodes_them(tmp_path):
    codes = packed(tmp_path)
    codes["model.layers.0.mlp.experts.down_proj_scales"][0, 0] = torch.tensor([1, 100, 250])
    state = load_file(tmp_path / "model.safetensors") | codes
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    decoded = dequantize_state(open_checkpoint(tmp_path))
    for name in [name.removesuffix("_blocks") for name in codes if name.endswith("_blocks")]:
        wanted = convert_moe_packed_tensors(codes[f"{name}_blocks"], codes[f"{name}_scales"])
        assert decoded[name].dtype == torch.bfloat16 and torch.equal(decoded[name], wanted), name
    assert not any(name.endswith(("_blocks", "_scales")) for name in decoded)


def test_codes_are_carried_into_gguf_without_being_touched(tmp_path):
    """The gguf library decodes what transformers decodes; nothing else of the experts is stored."""
    codes = packed(tmp_path / "model")
    exported = export(tmp_path / "model", tmp_path / "m.gguf", ExportSettings(format="gguf", imatrix="none"))
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    for block in range(3):
        prefix = f"model.layers.{block}.mlp.experts"
        both = convert_moe_packed_tensors(
            codes[f"{prefix}.gate_up_proj_blocks"], codes[f"{prefix}.gate_up_proj_scales"]
        )
        down = convert_moe_packed_tensors(
            codes[f"{prefix}.down_proj_blocks"], codes[f"{prefix}.down_proj_scales"]
        )
        for part, wanted in (("gate", both[..., 0::2].mT), ("up", both[..., 1::2].mT), ("down", down.mT)):
            tensor = tensors[f"blk.{block}.ffn_{part}_exps.weight"]
            assert tensor.tensor_type == gguf.GGMLQuantizationType.MXFP4
            actual = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type)))
            assert torch.equal(actual, wanted.float())
    details = exported.card.details
    assert details["carried"] == 9 and details["type"] == "MXFP4"
    assert open_checkpoint(tmp_path / "m.gguf").tensors["blk.0.ffn_up_exps.weight[3]"].block == "MXFP4"
    wanted, got = dequantize_state(open_checkpoint(tmp_path / "model")), dequantize_state(exported)
    assert wanted.keys() == got.keys()
    assert all(torch.equal(got[name].to(tensor.dtype), tensor) for name, tensor in wanted.items())


def test_the_model_loads_and_computes_as_its_decoded_self(tmp_path):
    codes = packed(tmp_path)
    dense = build("gpt_oss")
    for parameter in dense.parameters():
        parameter.data = parameter.data.bfloat16().float()
    state = dense.state_dict()
    for name in [name.removesuffix("_blocks") for name in codes if name.endswith("_blocks")]:
        state[name].copy_(convert_moe_packed_tensors(codes[f"{name}_blocks"], codes[f"{name}_scales"]))
    rows = tiny_models.tokens(dense)
    got = tiny_models.logits(load_model(tmp_path, dtype=torch.float32), rows)
    wanted = tiny_models.logits(dense, rows)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_what_does_not_fit_is_named(tmp_path):
    packed(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj_scales"
    scales = state.pop(name)
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"down_proj_scales is missing"):
        Decoded(open_checkpoint(tmp_path))
    save_file({**state, name: scales[:, :-1].clone()}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"are no MXFP4 experts"):
        Decoded(open_checkpoint(tmp_path))
    scales[0, 0, 0] = 255
    save_file({**state, name: scales}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(NumericsError, match="a scale is NaN"):
        reader(open_checkpoint(tmp_path)).check(name.replace("_scales", "_blocks"))


SMALL = {"samples": 4, "sequence_length": 32, "batch_size": 4, "check_tokens": 0, "ignore": ("re:self_attn",)}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A tiny gpt-oss, its experts rounded to MXFP4, and these in gpt-oss's own layout."""
    folder = tmp_path_factory.mktemp("gpt-oss")
    tiny_models.save(build("gpt_oss"), folder / "model", dtype=torch.bfloat16)
    settings = quantize_settings(method="rtn", scheme="MXFP4A16", **SMALL)
    quantized = quantize(folder / "model", folder / "quantized", settings)
    return quantized, export(quantized, folder / "out", ExportSettings(format="mxfp4"))


def test_experts_are_written_as_gpt_oss_has_them(exported):
    """Names, shapes and config of the published checkpoints; transformers decodes to what was rounded."""
    quantized, out = exported
    config = out.config["quantization_config"]
    assert (
        config["quant_method"] == "mxfp4" and "model.layers.*.self_attn" in config["modules_to_not_convert"]
    )
    for name, shape in (("gate_up_proj", (4, 192, 2)), ("down_proj", (4, 64, 3))):
        stem = f"model.layers.1.mlp.experts.{name}"
        blocks, scales = out.load(f"{stem}_blocks"), out.load(f"{stem}_scales")
        assert (blocks.dtype, scales.dtype) == (torch.uint8, torch.uint8)
        assert (blocks.shape, scales.shape) == ((*shape, 16), shape)
        stacked = convert_moe_packed_tensors(blocks, scales)
        single = dequantize_state(quantized)
        for expert in range(4):
            path = f"model.layers.1.mlp.experts.{expert}"
            if name == "down_proj":
                assert torch.equal(stacked[expert].T, single[f"{path}.down_proj.weight"])
            else:
                assert torch.equal(stacked[expert, :, 0::2].T, single[f"{path}.gate_proj.weight"])
                assert torch.equal(stacked[expert, :, 1::2].T, single[f"{path}.up_proj.weight"])
        assert out.tensors[f"{stem}_bias"].shape == (4, shape[1])
    assert not any(".experts.0." in name for name in out.tensors)
    assert out.tensors["model.layers.1.self_attn.q_proj.weight"].dtype == "BF16"


@pytest.mark.slow
def test_the_written_layout_computes_as_the_codes_do(exported, tmp_path):
    _, out = exported
    models = [load_model(one, dtype=torch.float32) for one in exported]
    rows = tiny_models.tokens(models[0])
    assert torch.equal(*(tiny_models.logits(model, rows) for model in models))
    copied = export(out, tmp_path / "copied", ExportSettings(format="mxfp4"))
    assert copied.tensors.keys() == out.tensors.keys()
    gguf_file = export(out, tmp_path / "m.gguf", ExportSettings(format="gguf", imatrix="none"))
    assert gguf_file.card.details["type"] == "MXFP4"


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("llama3", None, "is of llama; experts stacked in MXFP4 are the layout of gpt_oss alone"),
        ("gpt_oss", None, "is not quantized"),
        ("gpt_oss", {"scheme": "W8A16"}, r"experts\.0\.gate_proj is not in MXFP4"),
        (
            "gpt_oss",
            {"scheme": "MXFP4A16", "ignore": ("re:experts",)},
            r"experts\.0\.gate_proj is not in MXFP4",
        ),
    ],
)
def test_what_has_no_place_in_the_layout_is_refused(tmp_path, family, options, message):
    source = tiny_models.save(build(family), tmp_path / "model", dtype=torch.bfloat16)
    if options is not None:
        source = quantize(source, tmp_path / "q", quantize_settings(method="rtn", check_tokens=0, **options))
    with pytest.raises(ModelError, match=message):
        export(source, tmp_path / "out", ExportSettings(format="mxfp4"))
    assert not (tmp_path / "out").exists()
