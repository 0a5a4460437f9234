"""Qwen3-Next in the table of architectures: most blocks have linear attention (a gated delta rule,
arXiv:2412.06464), the others attention whose output is gated; a head predicts further tokens.

The checkpoint has one matrix for q, k, v and z of linear attention, in groups of a head of keys; the file has
all q, all k and all v in one matrix and z in another. llama.cpp has one width for heads of keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from attar.errors import CheckpointError
from attar.formats.gguf.architecture import (
    NO_BIAS,
    SILU_RULE,
    Architecture,
    ConfigCount,
    ConfigRule,
    ModuleMapping,
    Sizes,
    attends,
)
from attar.formats.gguf.expert_families import EVERY_BLOCK, QWEN2_MOE
from attar.formats.gguf.modules import (
    attention,
    expert_counts,
    expert_neurons,
    head_norms,
    nextn,
    norm,
    outside,
)

_DELTA = "layers.{}.linear_attn"


def delta(gguf: str, name: str, shape: tuple[str, ...], **more: Any) -> ModuleMapping:
    """A module of linear attention."""
    return ModuleMapping(f"blk.{{}}.{gguf}", f"{_DELTA}.{name}", shape, mixer="state", **more)


_LINEAR_ATTENTION = (
    delta("attn_qkv", "in_proj_qkvz", ("delta_qkv", "hidden"), part="qkv", order="delta"),
    delta("attn_gate", "in_proj_qkvz", ("delta_values", "hidden"), part="gate"),
    delta("ssm_ba", "in_proj_ba", ("delta_betas", "hidden")),
    delta("ssm_conv1d", "conv1d", ("delta_qkv", "kernel"), matrix=False, form=("delta_qkv", "one", "kernel")),
    delta("ssm_dt", "dt_bias", ("delta_heads",), matrix=False, leaves=(".bias", "")),
    delta("ssm_a", "A_log", ("delta_heads",), matrix=False, leaves=("", ""), negative_exp=True),
    delta("ssm_norm", "norm", ("delta_state",), matrix=False),
    delta("ssm_out", "out_proj", ("hidden", "delta_values")),
)


def delta_misfit(config: Mapping[str, Any], sizes: Sizes) -> str:
    """What of a config's linear attention llama.cpp has not; empty: nothing."""
    width, keys = config.get("linear_value_head_dim", 128), sizes.of("delta_state")
    if width != keys:
        return f"linear_value_head_dim is {width!r}, but llama.cpp's heads of keys and values are {keys} wide"
    if sizes.of("delta_heads") % sizes.of("delta_groups"):
        return "linear_num_value_heads is no multiple of linear_num_key_heads"
    return ""


def delta_keys(config: Mapping[str, Any], sizes: Sizes, arch: Architecture) -> dict[str, Any]:
    """Further keys of a file with linear attention."""
    marks = attends(config, arch, sizes.layers)
    return {
        "ssm.inner_size": sizes.of("delta_values"),
        "attention.recurrent_layers": [not mark for mark in marks] + [False] * sizes.nextn,
        "full_attention_interval": config.get("full_attention_interval", arch.attention_interval),
    }


def _more_config(get: Callable[[str, Any], Any], sizes: Sizes, names: Collection[str]) -> dict[str, Any]:
    inner, wanted = get("ssm.inner_size", sizes.of("delta_values")), sizes.of("delta_values")
    if inner != wanted:
        raise CheckpointError(
            f"GGUF: ssm.inner_size is {inner}, but its heads of values are {wanted} wide together",
            hint="the file is damaged; get it again",
        )
    every = int(get("full_attention_interval", QWEN3_NEXT.attention_interval))
    return {"linear_value_head_dim": sizes.of("delta_state"), "full_attention_interval": every}


QWEN3_NEXT: Architecture = Architecture(
    family="qwen3_next",
    arch="qwen3next",
    model_class="Qwen3NextForCausalLM",
    outer=outside(plus=1.0),
    blocks=(
        *_LINEAR_ATTENTION,
        *(
            replace(
                module,
                mixer="attention",
                shape=("q_gated", "hidden") if "attn_q" in module.gguf else module.shape,
            )
            for module in attention()
        ),
        *(replace(module, mixer="attention") for module in head_norms(plus=1.0)),
        *(module for module in QWEN2_MOE.blocks if ".mlp." in module.stored),
        norm("blk.{}.attn_norm", "layers.{}.input_layernorm", plus=1.0),
        norm("blk.{}.post_attention_norm", "layers.{}.post_attention_layernorm", plus=1.0),
    ),
    defaults={"epsilon": 1e-6, "kv_heads": 2, "head": 256, "partial_rotary_factor": 0.25},
    counts=(
        *expert_counts("num_experts", total=512, used=10),
        expert_neurons("moe_intermediate_size", 512),
        ConfigCount(
            "shared_ff", "expert_shared_feed_forward_length", ("shared_expert_intermediate_size",), 512
        ),
        ConfigCount("kernel", "ssm.conv_kernel", ("linear_conv_kernel_dim",), 4),
        ConfigCount("delta_state", "ssm.state_size", ("linear_key_head_dim",), 128),
        ConfigCount("delta_groups", "ssm.group_count", ("linear_num_key_heads",), 16),
        ConfigCount("delta_heads", "ssm.time_step_rank", ("linear_num_value_heads",), 32),
    ),
    rules=(SILU_RULE, NO_BIAS, *EVERY_BLOCK, ConfigRule("norm_topk_prob", (True,), True)),
    layer_types=("full_attention", "linear_attention"),
    attention_interval=4,
    nextn=nextn(
        "mtp.",
        ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"),
        plus=1.0,
        block="mtp.layers.{}",
        key="mtp_num_hidden_layers",
    ),
    misfit=delta_misfit,
    more_keys=lambda config, sizes: delta_keys(config, sizes, QWEN3_NEXT),
    more_config=_more_config,
)
