"""Layers with a linear recurrence as the compiled step reads them: csrc/decode/recurrence.h has the formulas.

Qwen3-Next and Qwen3.5 have the gated delta rule in three layers of four, and attention whose queries come
with gates. Qwen3-Next stores the rows of its products by groups of heads: they are sorted by what they are.

Mamba 2 is in every layer of Mamba 2, without MLPs, in most layers of Granite 4 hybrid and Bamba, and beside
attention in every layer of Falcon-H1. A layer of Nemotron-H is Mamba 2, attention, an MLP or a mixture alone.
One product makes gate, channels (v, k, q) and steps. Granite and Falcon-H1 multiply what products read and
give by constants: those are factors of the products, or of their rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attar.errors import ModelError
from attar.kernels.packed import scaled
from attar.kernels.recurrences import RecurrenceShape, RecurrenceWeights
from attar.runtime.runner.convolution_weights import depthwise
from attar.runtime.runner.expert_weights import LayerTensors

DELTA = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
GRANITE, FALCON, NEMOTRON = ("granitemoehybrid",), ("falcon_h1",), ("nemotron_h",)
ALONE = ("mamba2",)  # without attention and MLPs
FAMILIES = (*DELTA, "bamba", *GRANITE, *FALCON, *NEMOTRON, *ALONE)
SIZES = {
    "mamba2": ("num_heads", "head_dim", "state_size", "n_groups"),
    "nemotron_h": ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups"),
}
"""Of Mamba 2's heads, where a config does not call them as Bamba's."""
_EXPERTS = (
    (r"\.block_sparse_moe\.router\.(layer\.)?", ".mlp.gate."),
    (r"\.block_sparse_moe\.(experts\.gate_up_proj|input_linear\.weight)$", ".mlp.experts.gate_up_proj"),
    (r"\.block_sparse_moe\.(experts\.down_proj|output_linear\.weight)$", ".mlp.experts.down_proj"),
    (r"\.block_sparse_moe\.experts\.", ".mlp.experts."),
)
_BAMBA = (
    (r"^model\.final_layernorm\.", "model.norm."),
    (r"\.pre_ff_layernorm\.", ".post_attention_layernorm."),
    (r"\.feed_forward\.", ".mlp."),
)
NAMES = {
    "mamba2": (
        (r"^backbone\.embeddings?\.", "model.embed_tokens."),
        (r"^backbone\.norm_f\.", "model.norm."),
        (r"^backbone\.(layers\.\d+)\.norm\.", r"model.\1.input_layernorm."),
        (r"^backbone\.(layers\.\d+)\.mixer\.", r"model.\1.mamba."),
    ),
    "bamba": _BAMBA,
    "falcon_h1": _BAMBA,
    "nemotron_h": (
        (r"^(backbone|model)\.embeddings\.", "model.embed_tokens."),
        (r"^(backbone|model)\.norm_f\.", "model.norm."),
        (r"^(backbone|model)\.(layers\.\d+)\.norm\.", r"model.\2.input_layernorm."),
        (r"^(backbone|model)\.(layers\.\d+)\.mixer\.([qkvo]_proj)\.", r"model.\2.self_attn.\3."),
        (r"^(backbone|model)\.(layers\.\d+)\.mixer\.(in_proj|out_proj|conv1d|norm)\.", r"model.\2.mamba.\3."),
        (r"^(backbone|model)\.(layers\.\d+)\.mixer\.(A_log|D|dt_bias)$", r"model.\2.mamba.\3"),
        (r"^(backbone|model)\.(layers\.\d+)\.mixer\.", r"model.\2.mlp."),
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


@dataclass(frozen=True, kw_only=True)
class Multipliers:
    """Constants of a family. ``attention_in`` and ``mamba_in`` multiply what products read, all others what
    they give, biases included.

    Attributes:
        mamba: of gate, v, k, q and steps.
        gate: of the MLP, before its activation.
    """

    embedding: float = 1.0
    head: float = 1.0
    attention_in: float = 1.0
    keys: float = 1.0
    attention_out: float = 1.0
    mamba_in: float = 1.0
    mamba: tuple[float, ...] = (1.0,) * 5
    mamba_out: float = 1.0
    gate: float = 1.0
    down: float = 1.0


def multipliers(config: Any) -> Multipliers:
    """Of a config's family."""
    if config.model_type in GRANITE:
        added = config.residual_multiplier
        return Multipliers(
            embedding=config.embedding_multiplier,
            head=1 / config.logits_scaling,
            attention_out=added,
            mamba_out=added,
            down=added,
        )
    if config.model_type in FALCON:
        gate, down = config.mlp_multipliers
        return Multipliers(
            embedding=config.embedding_multiplier,
            head=config.lm_head_multiplier,
            attention_in=config.attention_in_multiplier,
            keys=config.key_multiplier,
            attention_out=config.attention_out_multiplier,
            mamba_in=config.ssm_in_multiplier,
            mamba=tuple(config.ssm_multipliers),
            mamba_out=config.ssm_out_multiplier,
            gate=gate,
            down=down,
        )
    return Multipliers()


def by_part(factors: Sequence[float], rows: Sequence[int]) -> float | Tensor:
    """A factor for the rows of each part of a product: float32 (N,), or one number where all are the same."""
    if len(set(factors)) == 1:
        return factors[0]
    return torch.tensor(factors).repeat_interleave(torch.tensor(rows))


def names(config: Any) -> tuple[tuple[str, str], ...]:
    """Of a config's family."""
    experts = config.model_type in GRANITE and config.num_local_experts > 0
    return NAMES.get(f"{config.model_type} with experts" if experts else config.model_type, ())


def check(config: Any) -> None:
    """Raises ModelError where a family's variant is not one that the compiled step runs."""
    if config.model_type not in FAMILIES:
        return
    activation = config.mamba_hidden_act if config.model_type in NEMOTRON else config.hidden_act
    if activation != "silu":
        raise ModelError(f"the compiled runner's convolutions have silu, and this one {activation!r}")
    if getattr(config, "moe_latent_size", None) is not None:
        raise ModelError("the compiled runner has no experts of latents (moe_latent_size)")


def attends(config: Any, layer: LayerTensors) -> bool:
    """Whether a layer has attention, in the place of a recurrence or beside it."""
    if config.model_type in NEMOTRON:
        return layer.has("self_attn.q_proj.weight")
    return config.model_type in FALCON or not (layer.has("mamba.A_log") or layer.has("linear_attn.A_log"))


def has_mlp(config: Any, layer: LayerTensors) -> bool:
    """Whether a layer has an MLP, or a mixture."""
    if config.model_type in NEMOTRON:
        return layer.has("mlp.down_proj.weight") or layer.has("mlp.gate.weight")
    return config.model_type not in ALONE


def mixer(config: Any, layer: LayerTensors) -> dict[str, Any]:
    """The convolution and the recurrence of a layer; empty where it has none."""
    if config.model_type in DELTA and layer.has("linear_attn.A_log"):
        return _delta_rule(config, layer)
    return _mamba(config, layer) if layer.has("mamba.A_log") else {}


def eps(config: Any) -> float:
    """Of the norms."""
    named = config.model_type in (*ALONE, *NEMOTRON)
    return float(config.layer_norm_epsilon if named else config.rms_norm_eps)


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
        gated_norm=False,
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
        first=first,
        steps=steps,
        out=layer.product("linear_attn.", ("out_proj",)),
    )
    return {"convolution": depthwise(layer, "linear_attn.conv1d"), "recurrence": recurrence}


def _mamba(config: Any, layer: LayerTensors) -> dict[str, Any]:
    named = SIZES.get(config.model_type, ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups"))
    heads, values, keys, groups = (getattr(config, size) for size in named)
    width, factors = heads * values, multipliers(config)
    least, most = config.time_step_limit or (0.0, math.inf)
    if config.model_type in NEMOTRON:
        least, most = config.time_step_min, math.inf
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
        gated_norm=not getattr(config, "mamba_norm_before_gate", False),
        norm_size=width // groups,
        eps=eps(config),
        least=least,
        most=most,
    )
    first, out = layer.product("mamba.", ("in_proj",)), layer.product("mamba.", ("out_proj",))
    parts = by_part(factors.mamba, (width, width, groups * keys, groups * keys, heads))
    recurrence = RecurrenceWeights(
        shape=shape,
        decay=layer.tensor("mamba.A_log").float().exp(),
        step_bias=layer.tensor("mamba.dt_bias").float(),
        first=scaled(first, parts, factors.mamba_in),
        out=scaled(out, factors.mamba_out),
        norm=layer.tensor("mamba.norm.weight").float() if layer.has("mamba.norm.weight") else None,
        skip=layer.tensor("mamba.D").float(),
    )
    return {"convolution": depthwise(layer, "mamba.conv1d"), "recurrence": recurrence}


def _by_kind(groups: int, shares: list[int]) -> Tensor:
    """The order in which rows that are stored group by group, each with its share of every kind, are sorted
    by kind."""
    rows = torch.arange(groups * sum(shares)).view(groups, -1)
    return torch.cat([part.flatten() for part in rows.split(shares, dim=1)])
