"""Names of experts' tensors against vLLM's own loaders.

vLLM is not installed: of its files the function that maps a checkpoint's names to parameters
(``RoutedExperts.build_expert_params_mapping``) is run as it is, with each model's own names of gate, up and
down; which parameters there are is read in the methods of its quantization layers.
"""

import ast
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from attar.deployment.settings import ExportSettings
from attar.deployment.stage import export
from attar.quantization.settings import quantize_settings
from attar.quantization.stage import quantize
from tests import tiny_models

HOME = Path(os.environ.get("ATTAR_PEERS", "")) / "vllm-wheel" / "0.33.0"
if "ATTAR_PEERS" not in os.environ or not HOME.exists():
    pytest.skip("no vllm-wheel: set ATTAR_PEERS", allow_module_level=True)
pytestmark = pytest.mark.peers
MODELS = HOME / "vllm/model_executor/models"
LAYERS = HOME / "vllm/model_executor/layers"
MOE = "compressed_tensors/compressed_tensors_moe/compressed_tensors_moe_"

# scheme of quantize, format of export -> file and class of vLLM's method for experts
LAYOUTS = {
    ("W4A16", ""): (f"{MOE}wna16.py", "CompressedTensorsWNA16MoEMethod"),
    ("W4A16_ASYM", ""): (f"{MOE}wna16.py", "CompressedTensorsWNA16MoEMethod"),
    ("W8A8", ""): (f"{MOE}w8a8_int8.py", "CompressedTensorsW8A8Int8MoEMethod"),
    ("FP8_DYNAMIC", ""): (f"{MOE}w8a8_fp8.py", "CompressedTensorsW8A8Fp8MoEMethod"),
    ("NVFP4A16", ""): (f"{MOE}w4a4_nvfp4.py", "CompressedTensorsW4A4Nvfp4MoEMethod"),
    ("MXFP4A16", ""): (f"{MOE}w4a4_mxfp4.py", "CompressedTensorsW4A4Mxfp4MoEMethod"),
    ("W4A16", "gptq"): ("auto_gptq.py", "AutoGPTQMoEMethod"),
    ("W4A16_ASYM", "awq"): ("auto_awq.py", "AutoAWQMoEMethod"),
    ("FP8", "modelopt"): ("modelopt.py", "ModelOptFp8MoEMethod"),
    ("NVFP4A16", "modelopt"): ("modelopt.py", "ModelOptNvFp4FusedMoE"),
}
FILES = {
    "mixtral": "mixtral.py",
    "qwen2_moe": "qwen2_moe.py",
    "qwen3_moe": "qwen3_moe.py",
    "qwen3_next": "qwen3_next.py",
    "olmoe": "olmoe.py",
    "deepseek_v2": "deepseek_v2.py",
    "deepseek_v3": "deepseek_v2.py",
    "glm4_moe": "glm4_moe.py",
    "phimoe": "phimoe.py",
    "lfm2_moe": "lfm2_moe.py",
    "llama4": "llama4.py",
    "granitemoe": "granitemoe.py",
    "granitemoehybrid": "granitemoehybrid.py",
}


def function(file, name):
    """A static method of vLLM's as it stands in its file."""
    tree = ast.parse(file.read_text())
    found = next(one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef) and one.name == name)
    found.decorator_list = []
    logical = SimpleNamespace(build_initial_global_physical_to_logical_map=lambda n, more: list(range(n)))
    known = {"EplbState": logical, "torch": torch, "logger": None}
    exec(compile(ast.Module([found], []), file.name, "exec"), known)
    return known[name]


def parameters(file, kind):
    """Names under which a class registers parameters."""
    tree = ast.parse((LAYERS / "quantization" / file).read_text())
    found = next(one for one in ast.walk(tree) if isinstance(one, ast.ClassDef) and one.name == kind)
    names = set()
    for call in ast.walk(found):
        if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "register_parameter":
            names |= {arg.value for arg in call.args if isinstance(getattr(arg, "value", 0), str)}
    return names


def expert_names(family):
    """What vLLM's model of a family calls gate, down and up in a checkpoint."""
    source = (MODELS / FILES[family]).read_text()
    named = re.search(r'ckpt_names=\("(\w+)", "(\w+)", "(\w+)"\)', source)
    return named.groups() if named else ("gate_proj", "down_proj", "up_proj")


def misfits(family, names, registered):
    """Tensors of experts that vLLM has no parameter for."""
    mapping = function(LAYERS / "fused_moe/routed_experts.py", "build_expert_params_mapping")
    rows = mapping(*expert_names(family), tiny_models.EXPERTS)
    base = (LAYERS / "quantization/base_config.py").read_text()
    dropped = re.findall(r'"(\.\w+)": None', base)
    wrong = []
    for name in names:
        fits = [(to, old) for to, old, *_ in rows if old in name]
        leaf = "" if len(fits) != 1 else name.replace(fits[0][1], fits[0][0]).rpartition("routed_experts.")[2]
        if leaf not in registered and not name.endswith(tuple(dropped)):
            wrong.append(f"{name} -> {leaf}")
    return wrong


def written(tmp_path, family, scheme, layout):
    """Names of the experts' tensors in a folder that attar wrote."""
    source = tiny_models.save(tiny_models.build(family), tmp_path / "model", dtype=torch.bfloat16)
    settings = {"samples": 2, "sequence_length": 32, "batch_size": 2} if scheme == "FP8" else {}
    out = quantize(
        source, tmp_path / "q", quantize_settings(method="rtn", scheme=scheme, check_tokens=0, **settings)
    )
    if layout:
        out = export(out, tmp_path / "out", ExportSettings(format=layout))
    names = [name for name in out.tensors if ".experts." in name]
    assert len(names) >= 2 * 3 * tiny_models.EXPERTS
    return names


@pytest.mark.parametrize(("scheme", "layout"), LAYOUTS, ids=lambda value: value or "compressed-tensors")
def test_every_layout_has_the_names_of_vllms_parameters(tmp_path, scheme, layout):
    registered = parameters(*LAYOUTS[scheme, layout])
    assert {name.partition("_")[0] for name in registered} >= {"w13", "w2"}
    names = written(tmp_path, "qwen3_moe", scheme, layout)
    assert misfits("qwen3_moe", names, registered) == []


@pytest.mark.parametrize("family", FILES)
def test_every_family_has_the_names_of_vllms_models(tmp_path, family):
    """With the module that holds the experts, which the model's code names."""
    names = written(tmp_path, family, "W4A16", "")
    assert misfits(family, names, parameters(*LAYOUTS["W4A16", ""])) == []
    holder = re.search(r"layers\.\d+\.(\w+)\.experts", names[0])[1]
    assert f".{holder}" in (MODELS / FILES[family]).read_text()


def test_other_names_are_seen():
    names = ["model.layers.0.mlp.experts.3.w1.weight_packed", "model.layers.0.mlp.experts.3.up_proj.codes"]
    assert len(misfits("qwen3_moe", names, parameters(*LAYOUTS["W4A16", ""]))) == 2
