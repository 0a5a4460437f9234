"""Names of weights that a quantization leaves dense, as engines ask for them.

An engine makes a quantized Linear of every module that its config covers, so each matrix without codes is
named, or it does not load. Engines run some Linears as one and name that (vLLM's ``packed_modules_mapping``,
which their multi-token prediction classes often lack), and know such a head's layers by other names than
files have.

Sources: vLLM 0.33, model_executor/models/{mimo,ernie,deepseek,glm4_moe,qwen3_next}_mtp.py; SGLang 0.5.23,
srt/models/{deepseek,glm4_moe}_nextn.py.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from typing import Any

from attar.checkpoint.geometry import geometry
from attar.checkpoint.parts import part_of

FUSED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa"), "fused_qkv_a_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
}
"""vLLM's names of modules that it fuses of several."""

_EXPERTS = re.compile(r"(.*\.experts)\.(gate_up|down)_proj(\.weight)?")
_NUMBERED = re.compile(r"(.*?)mtp_(?:layers|block)\.(\d+)\.(.*)")
_BEHIND = re.compile(r"(.*?)layers\.(\d+)\.(.*)")


def fused_name(weight: str) -> str:
    """A weight's name with its module's as an engine fuses it."""
    parent, _, leaf = weight.removesuffix(".weight").rpartition(".")
    return f"{parent}.{FUSED.get(leaf, leaf)}"


def dense_names(tensors: Mapping[str, Any], coded: Container[str], config: Mapping[str, Any]) -> list[str]:
    """The modules of matrices without codes, one by one and under the names that engines have for them.

    Args:
        tensors: stored tensors of modules that transformers does not know, by name, with their shapes.
        coded: names of those that are quantized.
        config: of the model.
    """
    layers = geometry(dict(config), "float32").layers or 0
    modules = (
        module
        for name, info in tensors.items()
        if name not in coded and part_of(name) != "embedding"
        for module in _modules(name, tuple(info.shape))
    )
    return list(dict.fromkeys(name for module in modules for name in _spellings(module, layers)))


def _modules(name: str, shape: tuple[int, ...]) -> Iterator[str]:
    """The module of a matrix; those of each expert of a stack; nothing for other tensors."""
    stack = _EXPERTS.fullmatch(name)
    if stack is not None and len(shape) == 3:
        leaves = ("down_proj",) if stack[2] == "down" else ("gate_proj", "up_proj")
        yield stack[1]
        yield from (f"{stack[1]}.{expert}.{leaf}" for expert in range(shape[0]) for leaf in leaves)
    elif len(shape) == 2 and name.endswith(".weight"):
        yield name.removesuffix(".weight")


def _spellings(module: str, layers: int) -> Iterator[str]:
    """A module's names: its own, that of the fused module, and both as an engine numbers its layer."""
    parent, _, leaf = module.rpartition(".")
    fused = [module, f"{parent}.{FUSED[leaf]}"] if leaf in FUSED else [module]
    yield from fused
    for name in fused:
        if match := _NUMBERED.fullmatch(name):  # vLLM: MiMo, Ernie
            yield f"{match[1]}layers.{layers + int(match[2])}.{match[3]}"
        elif (match := _BEHIND.fullmatch(name)) and int(match[2]) >= layers:  # SGLang: DeepSeek, GLM
            yield f"{match[1]}decoder.{match[3]}"
