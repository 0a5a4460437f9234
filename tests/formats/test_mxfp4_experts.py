"""gpt-oss's experts in MXFP4: decoded as transformers decodes them, carried into GGUF untouched."""

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
from attar.errors import CheckpointError, NumericsError
from attar.formats.readers import Decoded, dequantize_state, reader
from attar.models.load import load_model
from tests import tiny_models
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
