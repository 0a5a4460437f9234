"""Layers with a linear recurrence as the compiled step reads them: csrc/decode/recurrence.h has the formulas.

Qwen3-Next and Qwen3.5 have the gated delta rule in three layers of four, and attention whose queries come
with gates. Qwen3-Next stores the rows of its products by groups of heads: they are sorted by what they are.

Mamba 2 is in every layer of Mamba 2, without MLPs, and in most layers of Granite 4 hybrid and Bamba. One
product makes gate, channels (v, k, q) and steps. Granite multiplies what is added to the residual stream: the
scales of those weights have it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from attar.kernels.recurrences import RecurrenceShape, RecurrenceWeights
from attar.runtime.runner.convolution_weights import depthwise
from attar.runtime.runner.expert_weights import LayerTensors

DELTA = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
GRANITE, ALONE = ("granitemoehybrid",), ("mamba2",)  # ALONE: without attention and MLPs
FAMILIES = (*DELTA, "bamba", *GRANITE, *ALONE)
_EXPERTS = (
    (r"\.block_sparse_moe\.router\.(layer\.)?", ".mlp.gate."),
    (r"\.block_sparse_moe\.(experts\.gate_up_proj|input_linear\.weight)$", ".mlp.experts.gate_up_proj"),
    (r"\.block_sparse_moe\.(experts\.down_proj|output_linear\.weight)$", ".mlp.experts.down_proj"),
    (r"\.block_sparse_moe\.experts\.", ".mlp.experts."),
)
NAMES = {
    "mamba2": (
        (r"^backbone\.embeddings?\.", "model.embed_tokens."),
        (r"^backbone\.norm_f\.", "model.norm."),
        (r"^backbone\.(layers\.\d+)\.norm\.", r"model.\1.input_layernorm."),
        (r"^backbone\.(layers\.\d+)\.mixer\.", r"model.\1.mamba."),
    ),
    "bamba": (
        (r"^model\.final_layernorm\.", "model.norm."),
        (r"\.pre_ff_layernorm\.", ".post_attention_layernorm."),
        (r"\.feed_forward\.", ".mlp."),
    ),
    "granitemoehybrid": (
        (r"\.shared_mlp\.input_linear\.", ".mlp.gate_up_proj."),
        (r"\.shared_mlp\.output_linear\.", ".mlp.down_proj."),
    ),
    "granitemoehybrid with experts": (
        *_EXPERTS,
        (r"\.shared_mlp\.input_linear\.", ".mlp.shared_expert.gate_up_proj."),
        (r"\.shared_mlp\.output_linear\.", ".mlp.shared_expert.down_proj."),
    ),
}
"""Patterns of a family's names, and what stands in their place in Llama's."""


def names(config: Any) -> tuple[tuple[str, str], ...]:
    """Of a config's family."""
    experts = config.model_type in GRANITE and config.num_local_experts > 0
    return NAMES.get(f"{config.model_type} with experts" if experts else config.model_type, ())


def mixer(config: Any, layer: LayerTensors) -> dict[str, Any] | None:
    """The fields of a layer whose recurrence is in the place of attention; None where it attends."""
    if config.model_type in DELTA and layer.has("linear_attn.A_log"):
        return _delta_rule(config, layer)
    return _mamba(config, layer) if layer.has("mamba.A_log") else None


def query_rows(config: Any) -> Tensor | None:
    """The rows of a layer's product in the order that the step reads: queries, keys, values, gates; None
    where they are stored so."""
    if config.model_type not in DELTA:
        return None
    heads, dim = config.num_attention_heads, config.head_dim
    queries, others = 2 * heads * dim, 2 * config.num_key_value_heads * dim
    pairs = torch.arange(queries).view(heads, 2, dim)
    return torch.cat([pairs[:, 0].flatten(), torch.arange(queries, queries + others), pairs[:, 1].flatten()])


def _delta_rule(config: Any, layer: LayerTensors) -> dict[str, Any]:
    heads, groups = config.linear_num_value_heads, config.linear_num_key_heads
    keys, values = config.linear_key_head_dim, config.linear_value_head_dim
    channels = 2 * groups * keys + heads * values
    shape = RecurrenceShape(
        heads=heads,
        groups=groups,
        keys=keys,
        values=values,
        channels_at=0,
        queries_at=0,
        keys_at=groups * keys,
        values_at=2 * groups * keys,
        gate_at=channels,
        steps_at=0,
        delta=True,
        norm_size=values,
        eps=config.rms_norm_eps,
    )
    if config.model_type == "qwen3_next":
        shares = [keys, keys, heads // groups * values, heads // groups * values]
        first = layer.product("linear_attn.", ("in_proj_qkvz",), rows=_by_kind(groups, shares))
        ratio = heads // groups
        c, d = _by_kind(groups, [ratio, ratio]).split(heads)
        steps = layer.product("linear_attn.", ("in_proj_ba",), rows=torch.cat([d, c]))
    else:
        first = layer.product("linear_attn.", ("in_proj_qkv", "in_proj_z"))
        steps = layer.product("linear_attn.", ("in_proj_a", "in_proj_b"))
    recurrence = RecurrenceWeights(
        shape=shape,
        decay=layer.tensor("linear_attn.A_log").float().exp(),
        step_bias=layer.tensor("linear_attn.dt_bias").float(),
        norm=layer.tensor("linear_attn.norm.weight").float().repeat(heads),
        steps=steps,
    )
    return {
        "convolution": depthwise(layer, "linear_attn.conv1d"),
        "recurrence": recurrence,
        "qkv": first,
        "out": layer.product("linear_attn.", ("out_proj",)),
    }


def _mamba(config: Any, layer: LayerTensors) -> dict[str, Any]:
    alone = config.model_type in ALONE
    sizes = ("num_heads", "head_dim", "state_size", "n_groups")
    if not alone:
        sizes = ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups")
    heads, values, keys, groups = (getattr(config, size) for size in sizes)
    width, least_most = heads * values, config.time_step_limit or (0.0, math.inf)
    shape = RecurrenceShape(
        heads=heads,
        groups=groups,
        keys=keys,
        values=values,
        channels_at=width,
        queries_at=width + groups * keys,
        keys_at=width,
        values_at=0,
        gate_at=0,
        steps_at=2 * width + 2 * groups * keys,
        delta=False,
        norm_size=width // groups,
        eps=config.layer_norm_epsilon if alone else config.rms_norm_eps,
        least=least_most[0],
        most=least_most[1],
    )
    recurrence = RecurrenceWeights(
        shape=shape,
        decay=layer.tensor("mamba.A_log").float().exp(),
        step_bias=layer.tensor("mamba.dt_bias").float(),
        norm=layer.tensor("mamba.norm.weight").float(),
        skip=layer.tensor("mamba.D").float(),
    )
    return {
        "convolution": depthwise(layer, "mamba.conv1d"),
        "recurrence": recurrence,
        "qkv": layer.product("mamba.", ("in_proj",)),
        "out": layer.product("mamba.", ("out_proj",)),
    }


def _by_kind(groups: int, shares: list[int]) -> Tensor:
    """The order in which rows that are stored group by group, each with its share of every kind, are sorted
    by kind."""
    rows = torch.arange(groups * sum(shares)).view(groups, -1)
    return torch.cat([part.flatten() for part in rows.split(shares, dim=1)])
