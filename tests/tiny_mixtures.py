"""Tiny mixtures of experts with random weights, as ``tiny_models``' are.

    from tests import tiny_mixtures
    model = tiny_mixtures.build("mixtral")

Routers' weights are larger, so that scores differ more than rounding moves them.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

from tests import tiny_models

BASE = {**tiny_models.GQA, "num_attention_heads": 4, "num_key_value_heads": 2}
NARROW = {**BASE, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
DEEPSEEK = {**NARROW, **LATENT, "num_key_value_heads": 4, "n_routed_experts": 8, "first_k_dense_replace": 1}

# family -> (config class, model class, arguments of the config)
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {**BASE, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        {**NARROW, "num_experts": 8, "shared_expert_intermediate_size": 48, "mlp_only_layers": [1]},
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {**NARROW, "head_dim": 32, "num_experts": 8, "norm_topk_prob": True},
    ),
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM", {**BASE, "num_experts": 8, "num_experts_per_tok": 2}),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {**BASE, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 150000.0}},
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        {**DEEPSEEK, "q_lora_rank": None, "n_shared_experts": 2},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {**DEEPSEEK, "q_lora_rank": 24, "n_shared_experts": 1, "n_group": 4, "topk_group": 2},
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        "Glm4MoeForCausalLM",
        {**NARROW, "head_dim": 16, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1}
        | {"n_group": 1, "topk_group": 1, "use_qk_norm": True},
    ),
    "granitemoe": (
        "GraniteMoeConfig",
        "GraniteMoeForCausalLM",
        {**BASE, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "phimoe": (
        "PhimoeConfig",
        "PhimoeForCausalLM",
        {**BASE, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "llama4": (
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {**BASE, "head_dim": 16, "intermediate_size_mlp": 96, "num_local_experts": 4}
        | {"num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "attention_chunk_size": 64},
    ),
}


def config(family: str, **changes: Any) -> Any:
    """The config of a tiny mixture; ``changes`` are further arguments in the family's own names."""
    config_class, model_class, arguments = FAMILIES[family]
    result = getattr(transformers, config_class)(**{**arguments, **changes})
    result.architectures = [model_class]
    return result


@torch.no_grad()
def build(family: str, *, seed: int = 0, **changes: Any) -> Any:
    """A tiny mixture in evaluation mode with seeded random weights, float32."""
    built = config(family, **changes)
    model = tiny_models.randomize(getattr(transformers, built.architectures[0])(built), seed).eval()
    generator = torch.Generator().manual_seed(seed + 1)
    experts = getattr(built, "num_local_experts", None) or built.num_experts
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith("e_score_correction_bias"):
            tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))
        if tensor.shape == (experts, built.hidden_size):
            tensor.mul_(4)
    return model
