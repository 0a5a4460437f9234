"""The families with latent attention (MLA; DeepSeek-V2, arXiv:2405.04434): rows of the table of
architectures.

The checkpoint has one matrix for the keys and values of all heads, ``kv_b_proj``; the file has them apart,
keys turned, so that llama.cpp multiplies queries instead of keys and caches the latent vector alone.
"""

from __future__ import annotations

from attar.formats.gguf.architecture import (
    NO_BIAS,
    SILU_RULE,
    Architecture,
    ConfigCount,
    ConfigRule,
    ModuleMapping,
)
from attar.formats.gguf.modules import (
    CORRECTION,
    SIGMOID,
    SOFTMAX,
    expert_counts,
    expert_neurons,
    experts,
    gated_mlp,
    norm,
    outside,
    pre_norms,
    router,
    shared_expert,
)

_LATENT_ATTENTION = (
    ModuleMapping("blk.{}.attn_q", "layers.{}.self_attn.q_proj", ("q", "hidden"), lacks="q_rank"),
    ModuleMapping("blk.{}.attn_q_a", "layers.{}.self_attn.q_a_proj", ("q_rank", "hidden"), needs="q_rank"),
    ModuleMapping("blk.{}.attn_q_b", "layers.{}.self_attn.q_b_proj", ("q", "q_rank"), needs="q_rank"),
    ModuleMapping(
        "blk.{}.attn_q_a_norm",
        "layers.{}.self_attn.q_a_layernorm",
        ("q_rank",),
        matrix=False,
        needs="q_rank",
    ),
    ModuleMapping("blk.{}.attn_kv_a_mqa", "layers.{}.self_attn.kv_a_proj_with_mqa", ("kv_latent", "hidden")),
    norm("blk.{}.attn_kv_a_norm", "layers.{}.self_attn.kv_a_layernorm", size="kv_rank"),
    ModuleMapping(
        "blk.{}.attn_k_b", "layers.{}.self_attn.kv_b_proj", ("heads", "kv_rank", "nope"), part="keys"
    ),
    ModuleMapping(
        "blk.{}.attn_v_b", "layers.{}.self_attn.kv_b_proj", ("heads", "value", "kv_rank"), part="values"
    ),
    ModuleMapping("blk.{}.attn_output", "layers.{}.self_attn.o_proj", ("hidden", "values")),
)
_DEEPSEEK_BLOCK = (
    *_LATENT_ATTENTION,
    *gated_mlp(blocks="dense"),
    router("layers.{}.mlp.gate", blocks="experts"),
    *experts("layers.{}.mlp.experts", width="expert_ff", blocks="experts"),
    *shared_expert("layers.{}.mlp.shared_experts", blocks="experts"),
    *pre_norms(),
)


def _latent_counts(q_rank: int) -> tuple[ConfigCount, ...]:
    """The sizes of MLA; llama.cpp's keys have ``nope`` and ``rope`` in one number (metadata.py)."""
    return (
        ConfigCount("q_rank", "attention.q_lora_rank", ("q_lora_rank",), q_rank, zero=True),
        ConfigCount("kv_rank", "attention.kv_lora_rank", ("kv_lora_rank",), 512),
        ConfigCount("nope", "", ("qk_nope_head_dim",), 128),
        ConfigCount("rope", "rope.dimension_count", ("qk_rope_head_dim",), 64),
        ConfigCount("value", "attention.value_length_mla", ("v_head_dim",), 128),
    )


DEEPSEEK_V2 = Architecture(
    family="deepseek_v2",
    arch="deepseek2",
    model_class="DeepseekV2ForCausalLM",
    outer=outside(),
    blocks=_DEEPSEEK_BLOCK,
    defaults={"epsilon": 1e-6},
    counts=(
        *expert_counts("n_routed_experts", total=64, used=8),
        expert_neurons("moe_intermediate_size", 1407),
        ConfigCount("shared", "expert_shared_count", ("n_shared_experts",), 2),
        ConfigCount("dense", "leading_dense_block_count", ("first_k_dense_replace",), 0, zero=True),
        *_latent_counts(1536),
    ),
    fixed=(("expert_gating_func", SOFTMAX),),
    rules=(
        SILU_RULE,
        NO_BIAS,
        ConfigRule("mlp_bias", (False,), False),
        ConfigRule("topk_method", ("greedy",), "greedy"),
    ),
    extras=(("expert_weights_scale", "routed_scaling_factor"),),
    ropes=("default", "linear", "yarn"),
)

DEEPSEEK_V3 = Architecture(
    family="deepseek_v3",
    arch="deepseek2",
    model_class="DeepseekV3ForCausalLM",
    outer=outside(),
    blocks=(*_DEEPSEEK_BLOCK, CORRECTION),
    defaults={"epsilon": 1e-6, "kv_heads": 128, "routed_scaling_factor": 2.5, "norm_topk_prob": True},
    counts=(
        *expert_counts("n_routed_experts", total=256, used=8),
        expert_neurons("moe_intermediate_size", 2048),
        ConfigCount("shared", "expert_shared_count", ("n_shared_experts",), 1),
        ConfigCount("dense", "leading_dense_block_count", ("first_k_dense_replace",), 3, zero=True),
        ConfigCount("groups", "expert_group_count", ("n_group",), 8),
        ConfigCount("used_groups", "expert_group_used_count", ("topk_group",), 4),
        *_latent_counts(1536),
    ),
    fixed=(("expert_gating_func", SIGMOID),),
    rules=(SILU_RULE, NO_BIAS, ConfigRule("rope_interleave", (True,), True)),
    extras=(
        ("expert_weights_scale", "routed_scaling_factor"),
        ("expert_weights_norm", "norm_topk_prob"),
    ),
    ropes=("default", "linear", "yarn"),
)
