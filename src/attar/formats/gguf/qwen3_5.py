"""Qwen3.5 in the table of architectures, dense and with experts: Qwen3-Next's blocks with a matrix for each
projection of linear attention.

Where several heads of values share a head of keys, the checkpoint has them side by side, and the file has the
first of every head of keys, then the second of every one, as ggml repeats heads. The inputs of the output
projection follow them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from attar.formats.gguf.architecture import NO_BIAS, SILU_RULE, Architecture, ModuleMapping, Sizes
from attar.formats.gguf.modules import gated_mlp, stacked_experts
from attar.formats.gguf.qwen3_next import QWEN3_NEXT, delta, delta_keys, delta_misfit

SECTIONS = (11, 11, 10, 0)
"""The sections of rotary dimensions of a config that has none."""


def _projection(gguf: str, name: str, rows: str, order: str) -> ModuleMapping:
    return delta(gguf, name, (rows, "hidden"), order=order)


def _tiled(module: ModuleMapping) -> ModuleMapping:
    """A module of Qwen3-Next's linear attention with heads of values in the file's order."""
    orders = {"conv1d": "tiled qkv", "dt_bias": "tiled heads", "A_log": "tiled heads"}
    name = module.stored.rpartition(".")[2]
    return replace(module, order=orders.get(name, ""), columns="tiled" if name == "out_proj" else "")


_LINEAR_ATTENTION = (
    _projection("attn_qkv", "in_proj_qkv", "delta_qkv", "tiled qkv"),
    _projection("attn_gate", "in_proj_z", "delta_values", "tiled"),
    _projection("ssm_beta", "in_proj_b", "delta_heads", "tiled heads"),
    _projection("ssm_alpha", "in_proj_a", "delta_heads", "tiled heads"),
    *(
        _tiled(module)
        for module in QWEN3_NEXT.blocks
        if ".linear_attn." in module.stored and ".in_proj" not in module.stored
    ),
)
_DEFAULTS = {"experts": 256, "used": 8}
_OTHERS = tuple(module for module in QWEN3_NEXT.blocks if ".linear_attn." not in module.stored)


def _in_block(config: Mapping[str, Any], sizes: Sizes, index: int, names: Collection[str]) -> Sizes:
    further = index - sizes.layers
    stacked = f"{f'mtp.layers.{further}' if further >= 0 else f'layers.{index}'}.mlp.experts.gate_up_proj"
    joint = stacked in names or f"model.{stacked}" in names
    return replace(sizes, more={**sizes.more, "joint_experts": int(joint), "single_experts": int(not joint)})


_EXPERTS = (
    *(replace(module, needs="single_experts" if module.experts else "") for module in _OTHERS),
    *(
        replace(module, needs="joint_experts")
        for module in stacked_experts(
            "layers.{}.mlp.experts", "gate_up_proj", "down_proj", width="expert_ff", modules=""
        )
    ),
)

QWEN3_5_MOE: Architecture = replace(
    QWEN3_NEXT,
    family="qwen3_5_moe_text",
    arch="qwen35moe",
    model_class="Qwen3_5MoeForCausalLM",
    blocks=(*_LINEAR_ATTENTION, *_EXPERTS),
    keys={"ff": "moe_intermediate_size"},
    rules=(SILU_RULE, NO_BIAS),
    counts=tuple(
        replace(count, default=_DEFAULTS.get(count.size, count.default)) for count in QWEN3_NEXT.counts
    ),
    sections=SECTIONS,
    more_keys=lambda config, sizes: delta_keys(config, sizes, QWEN3_5_MOE),
    in_block=_in_block,
)

QWEN3_5: Architecture = Architecture(
    family="qwen3_5_text",
    arch="qwen35",
    model_class="Qwen3_5ForCausalLM",
    outer=QWEN3_NEXT.outer,
    blocks=(
        *_LINEAR_ATTENTION,
        *(module for module in _OTHERS if ".mlp." not in module.stored),
        *gated_mlp(),
    ),
    defaults={**QWEN3_NEXT.defaults, "kv_heads": 4},
    counts=tuple(count for count in QWEN3_NEXT.counts if count.size.startswith(("kernel", "delta"))),
    rules=(SILU_RULE, NO_BIAS),
    layer_types=QWEN3_NEXT.layer_types,
    attention_interval=QWEN3_NEXT.attention_interval,
    nextn=QWEN3_NEXT.nextn,
    sections=SECTIONS,
    misfit=delta_misfit,
    more_keys=lambda config, sizes: delta_keys(config, sizes, QWEN3_5),
    more_config=QWEN3_NEXT.more_config,
)
