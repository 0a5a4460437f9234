"""Experts in MXFP4 among weights in FP8 (DeepSeek V4), and fbgemm_fp8 (Llama), decoded as transformers does
it, and what does not fit."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from attar.checkpoint.open import open_checkpoint
from attar.errors import CheckpointError
from attar.formats.readers import Decoded
from attar.models.loading.fit import admit
from attar.verbs import prune, quantize
from tests import tiny_models

PLAIN = {"method": "rtn", "check_tokens": 0}


def published(folder, dense, tensors, **quantization):
    """A folder of a dense model's config and tokenizer with other tensors."""
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((dense / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((dense / name).read_bytes())
    return folder


def mixed(folder):
    """A tiny DeepSeek V3 whose experts are in MXFP4 and whose other Linears are in FP8 blocks, of random
    codes; with what transformers decodes."""
    dense = tiny_models.save(tiny_models.build("deepseek_v3"), folder / "dense", dtype=torch.bfloat16)
    generator, decode = torch.Generator().manual_seed(0), Fp8Dequantize(None)
    tensors, wanted = {}, {}
    for name, tensor in load_file(dense / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = wanted[name] = tensor
            continue
        rows, columns = tensor.shape
        if ".experts." in name:
            code = torch.randint(-128, 128, (rows, columns // 2), generator=generator).to(torch.int8)
            scale = torch.randint(118, 124, (rows, columns // 32), generator=generator).to(torch.uint8)
        else:
            code = torch.randn((rows, columns), generator=generator).to(torch.float8_e4m3fn)
            scale = torch.randint(118, 124, (-(-rows // 16), columns // 16), generator=generator)
            scale = scale.to(torch.uint8)
        tensors[name], stored = code, scale.view(torch.float8_e8m0fnu)
        tensors[name.replace("weight", "scale")] = stored
        if rows % 16 == 0 or ".experts." in name:
            wanted[name] = decode._dequantize_one(code, stored, torch.bfloat16)
    settings = {"quant_method": "fp8", "weight_block_size": [16, 16], "scale_fmt": "ue8m0"}
    return published(folder / "mixed", dense, tensors, **settings), wanted


def test_a_mixture_of_formats_decodes_as_transformers_decodes_it(tmp_path):
    source, wanted = mixed(tmp_path)
    view = Decoded(admit(source))
    assert wanted.keys() <= view.tensors.keys() and not any(".scale" in name for name in view.tensors)
    for name, tensor in wanted.items():
        assert torch.equal(view.load(name), tensor), name
    expert = next(name for name in wanted if ".experts." in name)
    rule, _ = view.grid(expert)
    assert (rule.bits, rule.group_size) == (4, 32) and int(view.codes(expert).codes.max()) == 15


@pytest.mark.slow
def test_a_mixture_of_formats_is_the_source_of_verbs(tmp_path):
    source, wanted = mixed(tmp_path)
    coded = quantize(source, tmp_path / "coded", scheme="MXFP4A16", **PLAIN)
    again = Decoded(coded)
    for name in wanted:
        if ".experts." in name:  # codes are carried: the grid stays
            assert torch.equal(again.load(name), wanted[name]), name
    cut = prune(source, tmp_path / "cut", method="magnitude")
    name = next(name for name in wanted if ".experts." in name)
    kept = cut.load(name)
    assert (kept == 0).float().mean() >= 0.5 and torch.equal(kept[kept != 0], wanted[name][kept != 0])


def test_scales_that_do_not_fit_the_bytes_are_refused_in_one_line(tmp_path):
    source, wanted = mixed(tmp_path)
    tensors = load_file(source / "model.safetensors")
    name = next(name for name in wanted if ".experts." in name).replace("weight", "scale")
    tensors[name] = tensors[name][:1].contiguous()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"do not fit together \(.* bytes of FP4, scales") as raised:
        admit(source)
    assert "\n" not in raised.value.message


def fbgemm(folder, family):
    """A tiny model in fbgemm_fp8, and what it decodes to."""
    dense = tiny_models.save(tiny_models.build(family), folder / "dense", dtype=torch.bfloat16)
    tensors, wanted = {}, {}
    for name, tensor in load_file(dense / "model.safetensors").items():
        stack = tensor.dim() == 3
        if not (stack or name.endswith("_proj.weight")):
            tensors[name] = wanted[name] = tensor
            continue
        scale = tensor.float().abs().amax(1, keepdim=True) / 448
        codes = (tensor.float() / scale).to(torch.float8_e4m3fn)
        tensors[name], tensors[f"{name}_scale"] = codes, scale
        wanted[name] = (codes.float() * scale).bfloat16()
    settings = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": []}
    return published(folder / "fbgemm", dense, tensors, **settings), wanted


@pytest.mark.parametrize("family", ["llama3", "llama4"])
def test_fbgemm_decodes_to_codes_times_scales(family, tmp_path):
    source, wanted = fbgemm(tmp_path, family)
    view = Decoded(admit(source))
    assert view.tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(view.load(name), tensor), name
    written = quantize(source, tmp_path / "out", scheme="W8A16", group_size=-1, **PLAIN)
    assert "quantization_config" in written.config
    assert open_checkpoint(source).config["quantization_config"]["quant_method"] == "fbgemm_fp8"


def test_a_stack_of_fbgemm_without_its_scale_is_refused(tmp_path):
    source, wanted = fbgemm(tmp_path, "llama4")
    tensors = load_file(source / "model.safetensors")
    del tensors[next(name for name in wanted if wanted[name].dim() == 3) + "_scale"]
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="_scale is missing"):
        admit(source)
