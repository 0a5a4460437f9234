"""Quantized folders in the own code of vLLM and SGLang: their configs choose a method for each Linear, whose
parameters are the stored tensors, by name and shape (load_served_linears.py)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from attar.verbs import export, quantize
from tests import tiny_models

HOME = Path(os.environ.get("ATTAR_PEERS", "/nonexistent"))
ENGINES = {"vllm": HOME / "vllm-wheel" / "0.33.0", "sglang": HOME / "sglang-wheel" / "0.5.23"}
if not any(files.exists() for files in ENGINES.values()):
    pytest.skip("neither vllm-wheel nor sglang-wheel under $ATTAR_PEERS", allow_module_level=True)
pytestmark = pytest.mark.peers

TEXT = {"data": "python-docs", "samples": 4, "sequence_length": 32}
GROUPS = {"group_size": 32}
SCHEMES = {  # scheme: options, and the methods of vLLM and of SGLang; "": the engine has none for a Linear
    "W4A16": (GROUPS, "CompressedTensorsWNA16", "CompressedTensorsWNA16"),
    "W4A16_ASYM": (GROUPS, "CompressedTensorsWNA16", "CompressedTensorsWNA16"),
    "W8A16": (GROUPS, "CompressedTensorsWNA16", "CompressedTensorsWNA16"),
    "W8A8": ({}, "CompressedTensorsW8A8Int8", "CompressedTensorsW8A8Int8"),
    "FP8": (TEXT, "CompressedTensorsW8A8Fp8", "CompressedTensorsW8A8Fp8"),
    "FP8_DYNAMIC": ({}, "CompressedTensorsW8A8Fp8", "CompressedTensorsW8A8Fp8"),
    "NVFP4A16": ({}, "CompressedTensorsW4A4Fp4", "CompressedTensorsW4A16Fp4"),
    "NVFP4": (TEXT, "CompressedTensorsW4A4Fp4", "CompressedTensorsW4A16Fp4"),  # on SM90
    "MXFP4": ({}, "CompressedTensorsW4A4Mxfp4", ""),
    "MXFP8": ({}, "CompressedTensorsW8A8Mxfp8", ""),
    "W4AFP8": ({}, "CompressedTensorsW4A8Fp8", ""),
}
EXPORTS = {"gptq": "W4A16", "awq": "W4A16_ASYM", "modelopt": "FP8", "modelopt nvfp4": "NVFP4"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tiny Llama in every scheme and export."""
    home = tmp_path_factory.mktemp("folders")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_key_value_heads": 2}
    model = tiny_models.build("llama2", **sizes)
    tiny_models.save(model, home / "base", dtype=torch.bfloat16)
    for scheme, (options, *_) in SCHEMES.items():
        quantize(home / "base", home / scheme, method="rtn", scheme=scheme, check_tokens=0, **options)
    for format, scheme in EXPORTS.items():
        export(home / scheme, home / format, format=format.partition(" ")[0])
    return home


@pytest.fixture(scope="module", params=ENGINES)
def reports(request, folders):
    """What an engine makes of every folder."""
    if not ENGINES[request.param].exists():
        pytest.skip(f"no {request.param}-wheel: set ATTAR_PEERS")
    known = [name for name in SCHEMES if method(request.param, name)]
    return request.param, read(request.param, [folders / name for name in (*known, *EXPORTS)])


def method(engine, scheme):
    """The engine's method for a scheme."""
    return SCHEMES[scheme][1 + list(ENGINES).index(engine)]


def read(engine, folders):
    script = Path(__file__).with_name("load_served_linears.py")
    command = [sys.executable, str(script), str(ENGINES[engine]), engine, *map(str, folders)]
    process = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""})
    assert process.returncode == 0, process.stderr[-2000:]
    parsed = json.loads(process.stdout.splitlines()[-1])
    return {folder.name: report for folder, report in zip(folders, parsed, strict=True)}


@pytest.mark.parametrize("name", [*SCHEMES, *EXPORTS])
def test_every_parameter_has_its_tensor_and_every_tensor_its_parameter(reports, name):
    report = reports[1].get(name)
    if report is None:
        pytest.skip(f"{reports[0]} has no Linears in {name}")
    assert (report["missing"], report["unknown"], report["other"]) == ([], [], [])


@pytest.mark.parametrize("name", SCHEMES)
def test_the_engine_chooses_the_method_of_the_scheme_for_every_linear(reports, name):
    engine, found = reports
    if method(engine, name):
        assert set(found[name]["methods"].values()) == {method(engine, name)}


@pytest.mark.parametrize("name", EXPORTS)
def test_no_linear_of_an_export_stays_dense(reports, name):
    methods = set(reports[1][name]["methods"].values())
    assert len(methods) == 1 and "Unquantized" not in methods.pop()


def test_what_does_not_fit_is_seen(folders, reports, tmp_path):
    engine, _ = reports
    tensors = load_file(folders / "W4A16" / "model.safetensors")
    first = "model.layers.0.mlp.up_proj.weight_"
    tensors[f"{first}zero_point"] = tensors.pop(f"{first}scale")
    tensors["model.layers.1.mlp.up_proj.weight_scale"] = torch.zeros(256, 2)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text((folders / "W4A16" / "config.json").read_text())
    save_file(tensors, broken / "model.safetensors")
    report = read(engine, [broken])["broken"]
    assert [line.split()[0] for line in report["missing"]] == [f"{first}scale"]
    assert [line.split()[0] for line in report["unknown"]] == [f"{first}zero_point"]
    assert [line.split()[0] for line in report["other"]] == ["model.layers.1.mlp.up_proj.weight_scale"]
