"""Llama 4's language model in the table of architectures.

llama.cpp (src/models/llama4.cpp) fixes what config.json states: chunks of 8192 tokens, no rotary embedding in
each 4th block, the temperature of attention, and norms of queries and keys but in the model of 128 experts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from attar.formats.gguf.architecture import (
    LLAMA_ROPES,
    NO_BIAS,
    SILU_RULE,
    Architecture,
    ConfigCount,
    ConfigRule,
    ModuleMapping,
    Sizes,
)
from attar.formats.gguf.modules import (
    attention,
    expert_counts,
    expert_neurons,
    norm,
    outside,
    router,
    shared_expert,
    stacked_experts,
)

INTERVAL = 4
"""Each 4th block attends to all tokens and has no rotary embedding."""
WITHOUT_NORMS = 128
"""Experts of the model without norms of queries and keys, by which llama.cpp knows it."""
_MLP = "layers.{}.feed_forward"


def _kinds(layers: int) -> list[str]:
    return ["chunked_attention" if (index + 1) % INTERVAL else "full_attention" for index in range(layers)]


def _misfit(config: Mapping[str, Any], sizes: Sizes) -> str:
    step = sizes.of("moe_step")
    mixtures, kinds = list(range(step - 1, sizes.layers, step)), _kinds(sizes.layers)
    norms, count = config.get("use_qk_norm", True), sizes.of("experts")
    if config.get("moe_layers") not in (None, mixtures):
        return f"moe_layers is {config['moe_layers']!r}, but llama.cpp has experts in the blocks {mixtures}"
    if config.get("layer_types") not in (None, kinds):
        return f"layer_types is {config['layer_types']!r}, but llama.cpp has {kinds}"
    if norms != (count != WITHOUT_NORMS):
        return f"use_qk_norm is {norms!r}, which llama.cpp does not compute for {count} experts"
    return ""


def _more_config(get: Callable[[str, Any], Any], sizes: Sizes, names: Collection[str]) -> dict[str, Any]:
    return {"use_qk_norm": sizes.of("experts") != WITHOUT_NORMS, "layer_types": _kinds(sizes.layers)}


def _dense(part: str, shape: tuple[str, str]) -> ModuleMapping:
    return ModuleMapping(f"blk.{{}}.ffn_{part}", f"{_MLP}.{part}_proj", shape, blocks="dense")


LLAMA4 = Architecture(
    family="llama4_text",
    arch="llama4",
    model_class="Llama4ForCausalLM",
    outer=outside(),
    blocks=(
        *attention(),
        _dense("gate", ("ff", "hidden")),
        _dense("up", ("ff", "hidden")),
        _dense("down", ("hidden", "ff")),
        router(f"{_MLP}.router", blocks="experts"),
        *(
            replace(module, blocks="experts")
            for module in stacked_experts(
                f"{_MLP}.experts", "gate_up_proj", "down_proj", width="expert_ff", transposed=True, modules=""
            )
        ),
        *shared_expert(f"{_MLP}.shared_expert", blocks="experts", width="expert_ff"),
        norm("blk.{}.attn_norm", "layers.{}.input_layernorm"),
        norm("blk.{}.ffn_norm", "layers.{}.post_attention_layernorm"),
    ),
    keys={"ff": "intermediate_size_mlp"},
    defaults={"epsilon": 1e-5, "kv_heads": 8, "head": 128, "rope_theta": 500000.0},
    counts=(
        *expert_counts("num_local_experts", total=16, used=1),
        expert_neurons("intermediate_size", 8192),
        ConfigCount("moe_step", "interleave_moe_layer_step", ("interleave_moe_layer_step",), 1),
    ),
    rules=(
        SILU_RULE,
        NO_BIAS,
        ConfigRule("attention_chunk_size", (8192,), 8192),
        ConfigRule("floor_scale", (8192,), 8192),
        ConfigRule("attn_scale", (0.1,), 0.1),
        ConfigRule("attn_temperature_tuning", (True, 4), True),
    ),
    ropes=LLAMA_ROPES,
    no_rope_interval=INTERVAL,
    misfit=_misfit,
    more_config=_more_config,
)
