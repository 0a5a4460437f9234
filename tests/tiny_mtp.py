"""Multi-token prediction heads for tiny models, as published families store them.

folder = tiny_mtp.save("qwen3_next", tmp_path / "model")     a tiny model with its head, random weights
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests import tiny_models

JOINTS = {  # projection and the norms of its inputs
    "deepseek": ("eh_proj", "enorm", "hnorm"),
    "qwen": ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden"),
    "mimo": ("input_proj", "token_layernorm", "hidden_layernorm"),
    "ernie": ("mtp_linear_proj", "mtp_emb_norm", "mtp_hidden_norm"),
}
HEADS: dict[str, tuple[str, str, str]] = {
    "deepseek_v3": ("deepseek", "model.layers.{layers}.{{}}", "shared_head.norm"),
    "glm4_moe": ("deepseek", "model.layers.{layers}.{{}}", "shared_head.norm"),
    "qwen3_next": ("qwen", "mtp.{{}}", "norm"),
    "qwen3_5": ("qwen", "mtp.{{}}", "norm"),
    "qwen3_5_moe": ("qwen", "mtp.{{}}", "norm"),
    "qwen2": ("mimo", "model.mtp_layers.0.{{}}", "final_layernorm"),
    "llama2": ("ernie", "model.{{}}.0", ""),
}
"""Family of the tiny model: form of the joint, names of the head's own modules, its last norm."""


def block_name(family: str, layers: int) -> str:
    """Where the head's block is."""
    qwen = dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_moe"), "mtp.layers.0")
    names = {**qwen, "qwen2": "model.mtp_layers.0", "llama2": "model.mtp_block.0"}
    return names.get(family, f"model.layers.{layers}")


def save(family: str, folder: Path, *, dtype: torch.dtype | None = None, **changes: Any) -> Path:
    """A tiny model with a head of one layer, saved with its tokenizer."""
    tiny_models.save(tiny_models.build(family, **changes), folder, dtype=dtype)
    config = json.loads((folder / "config.json").read_text())
    config["num_nextn_predict_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, **head(family, tensors, config)}, folder / "model.safetensors", {"format": "pt"})
    return folder


def head(family: str, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The head's tensors: a block with the shapes of the model's last layer, and what is around it."""
    kind, own, last = HEADS[family]
    layers, width = config["num_hidden_layers"], config["hidden_size"]
    own = own.format(layers=layers)
    generator = torch.Generator().manual_seed(0)
    some = tensors["model.norm.weight"]

    def random(shape: tuple[int, ...]) -> torch.Tensor:
        return (0.2 * torch.randn(shape, generator=generator)).to(some.dtype)

    joint, *norms = JOINTS[kind]
    made = {own.format(joint) + ".weight": random((width, 2 * width))}
    made |= {own.format(norm) + ".weight": 1 + random((width,)) for norm in norms}
    if last:
        made[own.format(last) + ".weight"] = 1 + random((width,))
    if kind == "deepseek":
        table = tensors["model.embed_tokens.weight"]
        made[own.format("embed_tokens") + ".weight"] = table.clone()
        made[own.format("shared_head.head") + ".weight"] = tensors.get("lm_head.weight", table).clone()
    block = f"model.layers.{layers - 1}."
    for name, tensor in tensors.items():
        if name.startswith(block):
            new = f"{block_name(family, layers)}.{name.removeprefix(block)}"
            made[new] = tensor.clone() if tensor.dim() < 2 else random(tuple(tensor.shape))
    return made


def names(family: str, folder: Path) -> list[str]:
    """Names of the stored tensors of the head of a dense model that :func:`save` made."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    return sorted(name for name in tensors if name in head(family, tensors, config))
