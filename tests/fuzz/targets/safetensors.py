"""safetensors files inside a model folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save

from attar.checkpoint.open import open_checkpoint
from attar.errors import AttarError

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}


def seeds(folder: Path) -> list[bytes]:
    """Files of several dtypes, one without metadata, one without tensors."""
    tensors = {"a": torch.ones(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16), "c": torch.tensor(1)}
    return [save(tensors, metadata={"format": "pt"}), save({"x": torch.ones(0, 4)}), save({})]


def target(folder: Path) -> Callable[[bytes], bool]:
    """Opens a folder with the bytes as its weights, and loads every tensor."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    path = folder / "model.safetensors"

    def handle(data: bytes) -> bool:
        path.write_bytes(data)
        try:
            checkpoint = open_checkpoint(folder)
            for name in checkpoint.tensors:
                checkpoint.load(name)
            return True
        except AttarError:
            return False

    return handle
