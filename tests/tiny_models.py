"""Tiny models of every family, built from their configs with random weights, for the tests of all packages.

    from tests import tiny_models
    model = tiny_models.build("qwen2")                       seeded, float32, evaluation mode
    folder = tiny_models.save(model, tmp_path / "qwen2")     with a tokenizer
    rows = tiny_models.tokens(model, batch=2, length=12)

Weights are large enough that attention is not flat and that leaving anything out changes the logits.
"""

from __future__ import annotations

import functools
import json
import math
import textwrap
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCABULARY = 320
SHARED = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
SIZE = {"hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 96, "max_position_embeddings": 128}
MHA = {**SHARED, **SIZE, "num_attention_heads": 4}
GQA = {**SHARED, **SIZE, "num_attention_heads": 8, "num_key_value_heads": 4}
WIDE = {**SHARED, **SIZE, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}

# family -> (config class, model class, arguments of the config)
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama2": ("LlamaConfig", "LlamaForCausalLM", {**MHA, "tie_word_embeddings": False}),
    "llama3": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {**GQA, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    ),
    "smollm": ("LlamaConfig", "LlamaForCausalLM", {**GQA, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**GQA, "sliding_window": 8}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", GQA),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**WIDE, "tie_word_embeddings": True}),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {**WIDE, "sliding_window": 8, "query_pre_attn_scalar": 32, "layer_types": None},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {**WIDE, "sliding_window": 8, "query_pre_attn_scalar": 32},
    ),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {**GQA, "original_max_position_embeddings": 128}),
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {**SHARED, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128},
    ),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        {**SHARED, "hidden_size": 64, "num_hidden_layers": 3, "ffn_dim": 96, "num_attention_heads": 4}
        | {"max_position_embeddings": 128},
    ),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", MHA),
    "bert": ("BertConfig", "BertForMaskedLM", MHA),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", MHA),
    "distilbert": (
        "DistilBertConfig",
        "DistilBertForMaskedLM",
        {**SHARED, "dim": 64, "n_layers": 3, "n_heads": 4, "hidden_dim": 96, "max_position_embeddings": 128},
    ),
}
EXPERTS = 8
MLA = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
HYBRID = {**SHARED, **SIZE, "num_attention_heads": 4, "num_key_value_heads": 2}
MOE = {**HYBRID, "num_experts_per_tok": 2}
ROUTED = {**MOE, "n_routed_experts": EXPERTS, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}
DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16}

# families with experts, and with layers that are not attention: published configs, made 64 wide
MIXTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {**MOE, "num_local_experts": EXPERTS}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        {**MOE, "num_experts": EXPERTS, "num_experts_per_tok": 4, "moe_intermediate_size": 32}
        | {"shared_expert_intermediate_size": 64},
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {**MOE, "head_dim": 32, "num_experts": EXPERTS, "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
    "olmoe": (
        "OlmoeConfig",
        "OlmoeForCausalLM",
        {**MOE, "num_key_value_heads": 4, "num_experts": EXPERTS, "intermediate_size": 32},
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        {**ROUTED, **MLA, "num_key_value_heads": 4, "n_shared_experts": 2, "n_group": 2, "topk_group": 1}
        | {"topk_method": "group_limited_greedy"},
    ),
    "deepseek_v2_lite": (
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        {**ROUTED, **MLA, "q_lora_rank": None, "num_key_value_heads": 4, "n_shared_experts": 2}
        | {"topk_method": "greedy"},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {**ROUTED, **MLA, "num_key_value_heads": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1},
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        "Glm4MoeForCausalLM",
        {**ROUTED, "head_dim": 16, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "use_qk_norm": True},
    ),
    "phimoe": ("PhimoeConfig", "PhimoeForCausalLM", {**MOE, "num_local_experts": EXPERTS}),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {**MOE, "num_local_experts": EXPERTS, "head_dim": 16, "sliding_window": 8, "intermediate_size": 64},
    ),
    "granitemoe": (
        "GraniteMoeConfig",
        "GraniteMoeForCausalLM",
        {**MOE, "num_local_experts": EXPERTS, "intermediate_size": 32},
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {**MOE, **MAMBA, "num_local_experts": EXPERTS, "intermediate_size": 32, "mamba_expand": 2}
        | {"shared_intermediate_size": 64, "layer_types": ["mamba", "attention", "mamba"]},
    ),
    "llama4": (
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {**MOE, "num_local_experts": EXPERTS, "num_experts_per_tok": 1, "intermediate_size": 32}
        | {"intermediate_size_mlp": 96, "head_dim": 16, "interleave_moe_layer_step": 2}
        | {"attention_chunk_size": 8192},
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {**MOE, **DELTA, "head_dim": 32, "num_experts": EXPERTS, "moe_intermediate_size": 32}
        | {"shared_expert_intermediate_size": 32, "linear_value_head_dim": 16}
        | {"layer_types": ["linear_attention", "linear_attention", "full_attention"]},
    ),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        "Lfm2MoeForCausalLM",
        {**MOE, "layer_types": ["conv", "full_attention", "conv"], "num_experts": EXPERTS}
        | {"moe_intermediate_size": 32, "num_dense_layers": 1},
    ),
}
HYBRIDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "lfm2": ("Lfm2Config", "Lfm2ForCausalLM", {**HYBRID, "layer_types": ["conv", "full_attention", "conv"]}),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", HYBRID),
    "ministral3": ("Ministral3Config", "Ministral3ForCausalLM", {**HYBRID, "head_dim": 16}),
    "mamba2": (
        "Mamba2Config",
        "Mamba2ForCausalLM",
        {**SHARED, "hidden_size": 64, "num_hidden_layers": 3, "num_heads": 8, "head_dim": 16, "expand": 2}
        | {"state_size": 16, "n_groups": 1},
    ),
    "falcon_h1": (
        "FalconH1Config",
        "FalconH1ForCausalLM",
        {**HYBRID, **MAMBA, "mamba_d_ssm": 128, "head_dim": 16},
    ),
    "gemma3n": (
        "Gemma3nTextConfig",
        "Gemma3nForCausalLM",
        {
            **HYBRID,
            "head_dim": 16,
            "hidden_size_per_layer_input": 256,  # llama.cpp knows this width alone
            "vocab_size_per_layer_input": VOCABULARY,
        }
        | {"laurel_rank": 64, "num_kv_shared_layers": 0, "sliding_window": 8, "altup_num_inputs": 4}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        | {"activation_sparsity_pattern": [0.95] * 3},
    ),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", WIDE),
    "phi": ("PhiConfig", "PhiForCausalLM", GQA),
    "starcoder2": ("Starcoder2Config", "Starcoder2ForCausalLM", GQA),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM", GQA),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", GQA),
    "granite": ("GraniteConfig", "GraniteForCausalLM", {**GQA, "embedding_multiplier": 1.5}),
    "seed_oss": ("SeedOssConfig", "SeedOssForCausalLM", WIDE),
    "gemma4": (
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        {**HYBRID, "head_dim": 16, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
        | {"sliding_window": 8},
    ),
}
LAYERS = {"layer_types": ["linear_attention", "linear_attention", "full_attention"]}
MAMBA1 = {**SHARED, "hidden_size": 64, "num_hidden_layers": 3, "state_size": 16, "time_step_rank": 8}

NEMOTRON = {**HYBRID, "head_dim": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16}
NEMOTRON |= {"n_groups": 1, "num_hidden_layers": 4, "time_step_min": 1e-9}

# further families with states, of which the table of families has Qwen3.5 alone
STATEFUL: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_5": (
        "Qwen3_5TextConfig",
        "Qwen3_5ForCausalLM",
        {**HYBRID, **DELTA, **LAYERS, "head_dim": 32, "linear_value_head_dim": 16},
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeForCausalLM",
        {**MOE, **DELTA, **LAYERS, "head_dim": 32, "num_experts": EXPERTS, "moe_intermediate_size": 32}
        | {"shared_expert_intermediate_size": 32, "linear_value_head_dim": 16},
    ),
    "olmo_hybrid": (
        "OlmoHybridConfig",
        "OlmoHybridForCausalLM",
        {**HYBRID, **DELTA, **LAYERS, "linear_num_key_heads": 4, "linear_value_head_dim": 32},
    ),
    "kimi_linear": (
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        {**ROUTED, **MLA, **LAYERS, "num_key_value_heads": 4, "num_experts": EXPERTS}
        | {"num_local_experts": EXPERTS, "linear_num_heads": 4, "linear_head_dim": 16},
    ),
    "bamba": ("BambaConfig", "BambaForCausalLM", {**HYBRID, **MAMBA, "attn_layer_indices": [1]}),
    "nemotron_h": (
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {**NEMOTRON, "layers_block_type": ["mamba", "attention", "mlp", "mamba"]},
    ),
    "nemotron_h_moe": (
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {**NEMOTRON, "layers_block_type": ["mamba", "moe", "attention", "moe"], "n_routed_experts": EXPERTS}
        | {"moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 64, "n_group": 2}
        | {"num_experts_per_tok": 3, "routed_scaling_factor": 2.5},
    ),
    "jamba": (
        "JambaConfig",
        "JambaForCausalLM",
        {**MOE, "num_experts": 4, "attn_layer_period": 3, "attn_layer_offset": 1, "mamba_dt_rank": 8}
        | {"expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 16},
    ),
    "mamba": ("MambaConfig", "MambaForCausalLM", MAMBA1),
    "falcon_mamba": ("FalconMambaConfig", "FalconMambaForCausalLM", MAMBA1),
    "lfm3": ("Lfm3Config", "Lfm3ForCausalLM", {**HYBRID, "layer_types": ["conv", "full_attention", "conv"]}),
    "zaya": ("ZayaConfig", "ZayaForCausalLM", {**HYBRID, "head_dim": 16}),
}
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
TOWER |= {"image_size": 28, "patch_size": 14}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}

# families with a vision tower: the text part's family, the tower's config
VISION: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma3_vision": (
        "Gemma3Config",
        "Gemma3ForConditionalGeneration",
        {"text": "gemma3", "vision_config": {**TOWER, "model_type": "siglip_vision_model"}}
        | {"mm_tokens_per_image": 4, "image_token_index": 319},
    ),
    "mistral3_vision": (
        "Mistral3Config",
        "Mistral3ForConditionalGeneration",
        {"text": "ministral3", "vision_config": {**TOWER, "model_type": "pixtral", "head_dim": 16}}
        | {"image_token_index": 319},
    ),
    "qwen3_vl": (
        "Qwen3VLConfig",
        "Qwen3VLForConditionalGeneration",
        {"text": {**WIDE, "rope_parameters": MROPE}, "image_token_id": 319, "video_token_id": 318}
        | {"vision_start_token_id": 317}
        | {"vision_config": {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2}
           | {"out_hidden_size": 64, "num_position_embeddings": 16, "deepstack_visual_indexes": []}},
    ),
    "llama4_vision": (
        "Llama4Config",
        "Llama4ForConditionalGeneration",
        {"text": "llama4", "image_token_index": 319}
        | {"vision_config": {**TOWER, "vision_output_dim": 32, "projector_input_dim": 32}
           | {"projector_output_dim": 32, "pixel_shuffle_ratio": 0.5}},
    ),
}  # fmt: skip
ENCODERS = ("bert", "roberta", "distilbert")
DECODERS = tuple(family for family in FAMILIES if family not in ENCODERS)


def config(family: str, **changes: Any) -> Any:
    """The config of a tiny model; ``changes`` are further arguments in the family's own names."""
    config_class, model_class, arguments = (FAMILIES | MIXTURES | HYBRIDS | STATEFUL | VISION)[family]
    if "text" in arguments:
        text = (
            arguments["text"] if isinstance(arguments["text"], dict) else config(arguments["text"]).to_dict()
        )
        arguments = {**arguments, "text_config": {**text, **changes}}
        del arguments["text"]
        changes = {"tie_word_embeddings": arguments["text_config"].get("tie_word_embeddings", False)}
    result = getattr(transformers, config_class)(**{**arguments, **changes})
    result.architectures = [model_class]
    return result


def build(family: str, *, seed: int = 0, **changes: Any) -> Any:
    """A tiny model in evaluation mode with seeded random weights, float32."""
    built_config = config(family, **changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # decays and time steps of states are drawn by the model
        model = getattr(transformers, built_config.architectures[0])(built_config)
    return randomize(model, seed).eval()


@torch.no_grad()
def randomize(model: Any, seed: int = 0) -> Any:
    """Seeded random values: matrices keep the size of their input, vectors stay near their start."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1:
            parameter.copy_(noise / math.sqrt(parameter.shape[-1]))
        else:
            parameter.add_(0.1 * noise)
    return model


def tokens(model: Any, *, batch: int = 2, length: int = 12, seed: int = 0) -> torch.Tensor:
    """Random token ids (batch, length); special tokens (0, 1, 2) do not occur."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, model.config.vocab_size, (batch, length), generator=generator)


@torch.no_grad()
def logits(model: Any, rows: torch.Tensor) -> torch.Tensor:
    """Logits (batch, length, vocabulary)."""
    return model(input_ids=rows).logits


@functools.lru_cache(maxsize=1)
def tokenizer_json() -> str:
    """A byte-level BPE of :data:`VOCABULARY` tokens trained on three files of the standard library."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>", "<pad>", "<mask>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = [Path(module.__file__).read_text(encoding="utf-8") for module in (functools, json, textwrap)]
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str()


def tokenizer() -> Any:
    """The tokenizer of all tiny models."""
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokenizer_json()),
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        pad_token="<pad>",
        mask_token="<mask>",
        model_max_length=128,
    )


def encoder_tokenizer() -> Any:
    """The same tokenizer, with a token in front of a text and one behind each, as encoders have; type 1 in
    the second text of a pair."""
    result = tokenizer()
    result.add_special_tokens({"cls_token": "<cls>", "sep_token": "<sep>"})
    cls, sep = result.cls_token_id, result.sep_token_id
    result.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<cls> $A <sep>",
        pair="<cls> $A <sep> $B:1 <sep>:1",
        special_tokens=[("<cls>", cls), ("<sep>", sep)],
    )
    return result


def save_encoder(model: Any, folder: Path) -> Path:
    """Write an encoder of two tokens more than :data:`VOCABULARY`, and its tokenizer, to a folder."""
    model.save_pretrained(folder)
    encoder_tokenizer().save_pretrained(folder)
    return folder


def save(model: Any, folder: Path, *, dtype: torch.dtype | None = None) -> Path:
    """Write the model and the tokenizer to a folder, the way transformers does."""
    if dtype is not None:
        model = model.to(dtype)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
