"""The JSON files of a model folder: config, index of the shards, tokenizer, generation config.

An input is one JSON object, file name to content.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from attar.checkpoint.geometry import geometry
from attar.checkpoint.inspect import inspect
from attar.checkpoint.open import open_checkpoint
from attar.errors import AttarError
from tests import tiny_models

FILES = ("config.json", "model.safetensors.index.json", "generation_config.json", "tokenizer_config.json")
SHARD = "model-00001-of-00001.safetensors"


def seeds(folder: Path) -> list[bytes]:
    """The files of tiny models of several families."""
    contents = []
    for family in ("smollm", "gemma3", "gpt2", "bert"):
        index = {"metadata": {"total_size": 24}, "weight_map": {"a": SHARD}}
        quantization = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
        config = tiny_models.config(family).to_dict() | {"architectures": [tiny_models.FAMILIES[family][1]]}
        extra = {"quantization_config": quantization} if family == "smollm" else {}
        files: dict[str, Any] = {FILES[0]: config | extra, FILES[1]: index, FILES[2]: {"eos_token_id": [0]}}
        contents.append(
            json.dumps(files | {FILES[3]: {"tokenizer_class": "PreTrainedTokenizerFast"}}).encode()
        )
    return contents


def target(folder: Path) -> Callable[[bytes], bool]:
    """Opens and inspects a folder with these files."""
    save_file({name: torch.ones(2, 3) for name in "abcdef"}, folder / SHARD)  # as many as there are layers

    def handle(data: bytes) -> bool:
        if not _write(folder, data):
            return False
        try:
            checkpoint = open_checkpoint(folder)
            inspect(checkpoint)
            geometry(checkpoint.config, "bfloat16")
            return True
        except AttarError:
            return False

    return handle


def _write(folder: Path, data: bytes) -> bool:
    """The files of an input; False where it is no object of the known names."""
    try:
        contents = json.loads(data)
    except (ValueError, RecursionError):
        (folder / FILES[0]).write_bytes(data)
        return True
    if not isinstance(contents, dict):
        return False
    for name in FILES:
        if name in contents:
            text = json.dumps(contents[name])
            (folder / name).write_bytes(text.encode("utf-8", "surrogatepass"))
    return True
