"""Tiny models in every quantized layout that is published, for the tests of all verbs.

from tests import quantized_sources
source = quantized_sources.make("fp8", tmp_path)       a folder, or a GGUF file
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from attar.deployment.settings import ExportSettings
from attar.deployment.stage import export
from attar.quantization.stage import quantize
from tests import tiny_models
from tests.quantization.packing import settings_for

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
BLOCK = 128

# kind -> (family, scheme of compressed-tensors, format and options of the export from it; "": none)
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "fp8": ("llama3", "", {}),
    "fp8-tensor": ("llama3", "", {}),
    "mxfp4": ("gpt_oss", "MXFP4A16", {"format": "mxfp4"}),
    "nvfp4": ("llama3", "NVFP4A16", {}),
    "modelopt": ("llama3", "NVFP4A16", {"format": "modelopt"}),
    "compressed-tensors": ("llama3", "W4A16", {}),
    "w8a8": ("llama3", "W8A8", {}),
    "gptq": ("llama3", "W4A16_ASYM", {"format": "gptq"}),
    "awq": ("llama3", "W4A16", {"format": "awq"}),
    "nf4": ("llama3", "NF4", {}),
    "int8": ("llama3", "W8A8", {"format": "bitsandbytes"}),
    "gguf": ("llama3", "", {"format": "gguf", "type": "Q8_0"}),
    "mlx": ("llama3", "", {"format": "mlx"}),
    "mlx-mxfp4": ("llama3", "", {"format": "mlx", "type": "mxfp4"}),
}


def make(kind: str, folder: Path) -> Path:
    """A tiny model of one of :data:`KINDS` below a folder; its dense original is ``folder / "dense"``."""
    family, scheme, options = KINDS[kind]
    sizes = {**SIZES, "intermediate_size": 64, "hidden_size": 64} if family == "gpt_oss" else SIZES
    model = tiny_models.build(family, **sizes)
    dense = source = tiny_models.save(model, folder / "dense", dtype=torch.bfloat16)
    if kind.startswith("fp8"):
        return to_fp8(dense, folder / kind, blocks=kind == "fp8")
    if scheme:
        source = folder / "packed"
        ignore = ("re:self_attn",) if family == "gpt_oss" else ()
        settings = settings_for(
            "rtn", scheme=scheme, group_size=32 if "W4" in scheme else -1, ignore=ignore, check_tokens=0
        )
        quantize(dense, source, settings)
    if not options:
        return source
    out = folder / (f"{kind}.gguf" if kind == "gguf" else kind)
    export(source, out, ExportSettings(**options))
    return out


def to_fp8(dense: Path, folder: Path, *, blocks: bool = True, inverse: str = "weight_scale_inv") -> Path:
    """A folder as DeepSeek (blocks) and Mistral (one scale a weight) publish: float8 Linears of the layers,
    scales that multiply."""
    folder.mkdir()
    tensors = {}
    for name, tensor in load_file(dense / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        height, width = (BLOCK, BLOCK) if blocks else tensor.shape
        rows, columns = tensor.shape
        padded = torch.nn.functional.pad(tensor.float(), (0, -columns % width, 0, -rows % height))
        tiles = padded.unflatten(1, (-1, width)).unflatten(0, (-1, height))
        scale = tiles.abs().amax((1, 3)) / 448
        codes = (tiles / scale[:, None, :, None]).flatten(2).flatten(0, 1)[:rows, :columns]
        tensors[name] = codes.to(torch.float8_e4m3fn)
        tensors[name.replace("weight", inverse)] = scale if blocks else scale.reshape(()).bfloat16()
        if not blocks:
            tensors[name.replace("weight", "activation_scale")] = torch.tensor(0.02, dtype=torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((dense / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic" if blocks else "static",
        "weight_block_size": [BLOCK, BLOCK] if blocks else None,
    }
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((dense / name).read_bytes())
    return folder
