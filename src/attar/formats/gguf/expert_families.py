"""The families with experts, and Granite without: rows of the table of architectures (families.py says what a
row is).

llama.cpp, ``build_moe_ffn`` (src/llama-graph.cpp): scores of the router by softmax or sigmoid, the highest
chosen (within the best groups of experts), their scores perhaps divided by their sum and scaled. A family
whose loader fixes one of these has a rule here.

PhiMoE is not among them: llama.cpp weighs its experts by softmax, transformers by its SparseMixer.
"""

from __future__ import annotations

from dataclasses import replace

from attar.formats.gguf.architecture import (
    LLAMA_ROPES,
    NO_BIAS,
    SILU_RULE,
    Architecture,
    ConfigCount,
    ConfigRule,
    ModuleMapping,
)
from attar.formats.gguf.latent_families import DEEPSEEK_V2, DEEPSEEK_V3
from attar.formats.gguf.modules import (
    CORRECTION,
    SIGMOID,
    attention,
    expert_counts,
    expert_neurons,
    experts,
    gated_mlp,
    head_norms,
    nextn,
    norm,
    outside,
    pre_norms,
    router,
    shared_expert,
    stacked_experts,
)

EVERY_BLOCK = (
    ConfigRule("decoder_sparse_step", (1,), 1),
    ConfigRule("mlp_only_layers", ([], None), []),
)


MIXTRAL = Architecture(
    family="mixtral",
    arch="llama",
    model_class="MixtralForCausalLM",
    outer=outside(),
    blocks=(
        *attention(pair=True),
        router("layers.{}.block_sparse_moe.gate"),
        *experts("layers.{}.block_sparse_moe.experts", names=("w1", "w3", "w2")),
        *pre_norms(),
    ),
    defaults={"epsilon": 1e-5, "kv_heads": 8, "rope_theta": 1e6},
    counts=expert_counts("num_local_experts", total=8, used=2),
    rules=(SILU_RULE,),
    ropes=LLAMA_ROPES,
    window="all",
)

QWEN2_MOE = Architecture(
    family="qwen2_moe",
    arch="qwen2moe",
    model_class="Qwen2MoeForCausalLM",
    outer=outside(),
    blocks=(
        *attention(bias=True),
        router("layers.{}.mlp.gate"),
        *experts("layers.{}.mlp.experts", width="expert_ff"),
        ModuleMapping(
            "blk.{}.ffn_gate_inp_shexp",
            "layers.{}.mlp.shared_expert_gate",
            ("one", "hidden"),
            matrix=False,
        ),
        *shared_expert("layers.{}.mlp.shared_expert"),
        *pre_norms(),
    ),
    head="needed",
    defaults={"epsilon": 1e-6, "kv_heads": 16},
    counts=(
        *expert_counts("num_experts", total=60, used=4),
        expert_neurons("moe_intermediate_size", 1408),
        ConfigCount(
            "shared_ff", "expert_shared_feed_forward_length", ("shared_expert_intermediate_size",), 5632
        ),
    ),
    rules=(
        SILU_RULE,
        *EVERY_BLOCK,
        ConfigRule("qkv_bias", (True,), True),
        ConfigRule("norm_topk_prob", (False,), False),
        ConfigRule("use_sliding_window", (False,), False),
    ),
    square=True,
)

QWEN3_MOE = Architecture(
    family="qwen3_moe",
    arch="qwen3moe",
    model_class="Qwen3MoeForCausalLM",
    outer=outside(),
    blocks=(
        *attention(),
        router("layers.{}.mlp.gate"),
        *experts("layers.{}.mlp.experts", width="expert_ff"),
        *pre_norms(),
        *head_norms(),
    ),
    defaults={"epsilon": 1e-6, "kv_heads": 4},
    counts=(*expert_counts("num_experts", total=128, used=8), expert_neurons("moe_intermediate_size", 768)),
    rules=(
        SILU_RULE,
        NO_BIAS,
        *EVERY_BLOCK,
        ConfigRule("norm_topk_prob", (True,), False),
        ConfigRule("use_sliding_window", (False,), False),
    ),
)

OLMOE = Architecture(
    family="olmoe",
    arch="olmoe",
    model_class="OlmoeForCausalLM",
    outer=outside(),
    blocks=(
        *attention(),
        router("layers.{}.mlp.gate"),
        *experts("layers.{}.mlp.experts"),
        *head_norms(q="q", k="kv"),
        *pre_norms(),
    ),
    head="needed",
    defaults={"epsilon": 1e-5},
    counts=expert_counts("num_experts", total=64, used=8),
    rules=(
        SILU_RULE,
        NO_BIAS,
        ConfigRule("clip_qkv", (None,), None),
        ConfigRule("norm_topk_prob", (False,), False),
    ),
    square=True,
    equal_heads=True,
)

GLM4_MOE = Architecture(
    family="glm4_moe",
    arch="glm4moe",
    model_class="Glm4MoeForCausalLM",
    outer=outside(),
    blocks=(
        *attention(bias="attention_bias"),
        ModuleMapping(
            "blk.{}.attn_q_norm",
            "layers.{}.self_attn.q_norm",
            ("head",),
            matrix=False,
            flag="use_qk_norm",
        ),
        ModuleMapping(
            "blk.{}.attn_k_norm",
            "layers.{}.self_attn.k_norm",
            ("head",),
            matrix=False,
            flag="use_qk_norm",
        ),
        *gated_mlp(blocks="dense"),
        router("layers.{}.mlp.gate", blocks="experts"),
        *experts("layers.{}.mlp.experts", width="expert_ff", blocks="experts"),
        *shared_expert("layers.{}.mlp.shared_experts", blocks="experts"),
        CORRECTION,
        norm("blk.{}.attn_norm", "layers.{}.input_layernorm"),
        norm("blk.{}.post_attention_norm", "layers.{}.post_attention_layernorm"),
    ),
    defaults={
        "epsilon": 1e-5,
        "kv_heads": 8,
        "partial_rotary_factor": 0.5,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
    },
    counts=(
        *expert_counts("n_routed_experts", total=128, used=8),
        expert_neurons("moe_intermediate_size", 1408),
        ConfigCount("shared", "expert_shared_count", ("n_shared_experts",), 1),
        ConfigCount("dense", "leading_dense_block_count", ("first_k_dense_replace",), 1, zero=True),
        ConfigCount("groups", "expert_group_count", ("n_group",), 1),
        ConfigCount("used_groups", "expert_group_used_count", ("topk_group",), 1),
    ),
    fixed=(("expert_gating_func", SIGMOID),),
    rules=(SILU_RULE,),
    extras=(
        ("expert_weights_scale", "routed_scaling_factor"),
        ("expert_weights_norm", "norm_topk_prob"),
    ),
    nextn=nextn("layers.{}.", ("eh_proj", "enorm", "hnorm", "shared_head.norm")),
)


GRANITE = Architecture(
    family="granite",
    arch="granite",
    model_class="GraniteForCausalLM",
    outer=outside(),
    blocks=(
        *attention(bias="attention_bias", out_bias="attention_bias", pair=True),
        *gated_mlp("mlp_bias"),
        *pre_norms(),
    ),
    defaults={
        "epsilon": 1e-6,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "logits_scaling": 1.0,
    },
    rules=(SILU_RULE,),
    extras=(
        ("embedding_scale", "embedding_multiplier"),
        ("residual_scale", "residual_multiplier"),
        ("attention.scale", "attention_multiplier"),
        ("logit_scale", "logits_scaling"),
    ),
    ropes=LLAMA_ROPES,
)

GRANITE_MOE = replace(
    GRANITE,
    family="granitemoe",
    arch="granitemoe",
    model_class="GraniteMoeForCausalLM",
    blocks=(
        *attention(pair=True),
        router("layers.{}.block_sparse_moe.router.layer"),
        *stacked_experts("layers.{}.block_sparse_moe", "input_linear", "output_linear", leaf=".weight"),
        *pre_norms(),
    ),
    counts=expert_counts("num_local_experts", total=8, used=2),
    rules=(SILU_RULE, NO_BIAS),
)

GRANITE_MOE_SHARED = replace(
    GRANITE_MOE,
    family="granitemoeshared",
    model_class="GraniteMoeSharedForCausalLM",
    blocks=(
        *GRANITE_MOE.blocks,
        *(
            ModuleMapping(
                f"blk.{{}}.ffn_{name}_shexp",
                "layers.{}.shared_mlp.input_linear",
                ("shared_ff", "hidden"),
                part=part,
            )
            for name, part in (("gate", "first"), ("up", "second"))
        ),
        ModuleMapping("blk.{}.ffn_down_shexp", "layers.{}.shared_mlp.output_linear", ("hidden", "shared_ff")),
    ),
    counts=(
        *GRANITE_MOE.counts,
        ConfigCount("shared_ff", "expert_shared_feed_forward_length", ("shared_intermediate_size",)),
    ),
)


def _expert_bias(part: str, stored: str, half: str) -> ModuleMapping:
    """A bias of gpt-oss's experts, which the checkpoint stacks."""
    return ModuleMapping(
        f"blk.{{}}.ffn_{part}_exps",
        f"layers.{{}}.mlp.experts.{stored}",
        ("hidden" if part == "down" else "expert_ff",),
        matrix=False,
        leaves=(".bias", "_bias"),
        experts=True,
        stacked=f"layers.{{}}.mlp.experts.{{{{}}}}.{part}_proj",
        part=half,
    )


GPT_OSS = Architecture(
    family="gpt_oss",
    arch="gpt-oss",
    model_class="GptOssForCausalLM",
    outer=outside(),
    blocks=(
        *attention(bias=True, out_bias=True),
        ModuleMapping(
            "blk.{}.attn_sinks",
            "layers.{}.self_attn.sinks",
            ("heads",),
            matrix=False,
            leaves=(".weight", ""),
        ),
        router("layers.{}.mlp.router", bias=True),
        *stacked_experts(
            "layers.{}.mlp.experts",
            "gate_up_proj",
            "down_proj",
            width="expert_ff",
            halves=("even", "odd"),
            transposed=True,
            modules="",
        ),
        _expert_bias("gate", "gate_up_proj", "even"),
        _expert_bias("up", "gate_up_proj", "odd"),
        _expert_bias("down", "down_proj", ""),
        norm("blk.{}.attn_norm", "layers.{}.input_layernorm"),
        norm("blk.{}.post_attention_norm", "layers.{}.post_attention_layernorm"),
    ),
    head="needed",
    defaults={"epsilon": 1e-5, "kv_heads": 8, "head": 64, "sliding_window": 128},
    counts=(
        *expert_counts("num_local_experts", total=128, used=4),
        expert_neurons("intermediate_size", 2880),
    ),
    rules=(
        SILU_RULE,
        ConfigRule("attention_bias", (True,), True),
        ConfigRule("swiglu_limit", (7.0,), 7.0),
        ConfigRule("swiglu_alpha", (1.702,), 1.702),
    ),
    ropes=("default", "linear", "yarn"),
    window=2,
    window_applied=True,
    window_needed=True,
)

EXPERT_FAMILIES = (
    MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE, DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE, GRANITE_MOE,
    GRANITE_MOE_SHARED, GPT_OSS,
)  # fmt: skip
"""Every family with experts that can be written."""
