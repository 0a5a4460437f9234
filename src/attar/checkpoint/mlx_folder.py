"""Folders of mlx-lm as a checkpoint: tensors under the family's published names, experts one by one, and the
quantization where other folders have theirs.

mlx-lm's model classes have their own names for some modules and stack the experts of a layer. A stack's
tensors are the experts' one behind the other, so each expert is a part of the file. What mlx-lm computes into
the weights of other families (norms plus one, turned convolutions) is not undone: those are not read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from attar.checkpoint.config_numbers import EXPERTS
from attar.checkpoint.tensors import TensorInfo

METHOD = "mlx"


class ModuleRename(NamedTuple):
    """A module's name in mlx-lm, by regular expressions both ways."""

    published: str
    to_mlx: str
    mlx: str
    to_published: str


def _leaf(published: str, mlx: str) -> ModuleRename:
    return ModuleRename(rf"\.{published}(?=$|\.)", f".{mlx}", rf"\.{mlx}(?=$|\.)", f".{published}")


_SWITCH = (_leaf("experts", "switch_mlp"),)
_W123 = (_leaf("w1", "gate_proj"), _leaf("w2", "down_proj"), _leaf("w3", "up_proj"))
FAMILIES: Mapping[str, tuple[ModuleRename, ...]] = {
    **dict.fromkeys(
        ("llama", "mistral", "ministral3", "qwen2", "qwen3", "smollm3", "seed_oss", "granite"), ()
    ),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "phi3", "olmo2", "starcoder2", "stablelm"), ()),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "olmoe", "glm4_moe", "granitemoe"), _SWITCH),
    "mixtral": (*_SWITCH, *_W123),
    "gpt_oss": (),
    "gpt2": (ModuleRename(r"^(transformer\.)?", "model.", r"^model\.", "transformer."),),
}
"""Families that attar reads and writes, by ``model_type``; in tests/peers/test_mlx.py mlx-lm runs each."""

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.+)")
_STACK = re.compile(r"(.*\.experts)\.((?:gate|up|down)_proj|w[123])\.(\w+)")


def mlx_name(module: str, family: str) -> str:
    """mlx-lm's name of a published module; of an expert's, that of the stack."""
    expert = _EXPERT.fullmatch(module)
    module = f"{expert[1]}.{expert[3]}" if expert else module
    for rename in FAMILIES.get(family, ()):
        module = re.sub(rename.published, rename.to_mlx, module)
    return module


def published(tensors: Mapping[str, TensorInfo], family: str) -> tuple[dict[str, TensorInfo], list[str]]:
    """mlx-lm's tensors under the names of the family's published checkpoints, experts one by one; and the
    names that more than one tensor has then."""
    single: dict[str, TensorInfo] = {}
    twice: list[str] = []

    def add(info: TensorInfo) -> None:
        twice.extend([info.name] * (info.name in single))
        single[info.name] = info

    for name, info in tensors.items():
        for rename in FAMILIES[family]:
            name = re.sub(rename.mlx, rename.to_published, name)
        stack = _STACK.fullmatch(name)
        if stack is None or not info.shape or not 0 < info.shape[0] <= EXPERTS:
            add(replace(info, name=name))
            continue
        size = info.nbytes // info.shape[0]
        for expert in range(info.shape[0]):
            part = f"{stack[1]}.{expert}.{stack[2]}.{stack[3]}"
            offset = info.offset + expert * size
            add(replace(info, name=part, shape=info.shape[1:], nbytes=size, offset=offset))
    return single, twice


def is_mlx(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> bool:
    """Whether a folder is one of mlx-lm's: its config says how MLX quantized it, or experts have mlx-lm's
    names."""
    stated, other = config.get("quantization"), config.get("quantization_config")
    method = other.get("quant_method", METHOD) if isinstance(other, Mapping) else METHOD
    coded = isinstance(stated, Mapping) and "group_size" in stated and method == METHOD
    coded = coded or (stated is None and _is_nameless(other, tensors))
    return coded or (config.get("model_type") in FAMILIES and any(".switch_mlp." in name for name in tensors))


def _is_nameless(stated: Any, tensors: Mapping[str, TensorInfo]) -> bool:
    """Whether a ``quantization_config`` names no method and is MLX's: packed words with scales of groups."""
    named = (
        not isinstance(stated, Mapping) or "quant_method" in stated or not {"group_size", "bits"} <= {*stated}
    )
    return not named and any(
        info.dtype == "U32" and name.endswith(".weight") and f"{name.removesuffix('weight')}scales" in tensors
        for name, info in tensors.items()
    )


def with_method(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with MLX's ``quantization`` as a ``quantization_config`` that names its method."""
    stated = config.get("quantization", config.get("quantization_config"))
    if not isinstance(stated, Mapping) or "quant_method" in stated:
        return dict(config)
    bare = {key: value for key, value in config.items() if key != "quantization"}
    return {**bare, "quantization_config": {**stated, "quant_method": METHOD}}
