"""Tiny models for the tests of GGUF's architectures: every family that can be written, and the variants that
are written in another way."""

import json
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

from attar.formats.gguf.placement import STACKED
from tests import tiny_models
from tests.tiny_models import GQA, MHA, WIDE

FOUR = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED |= {"n_shared_experts": 2, "first_k_dense_replace": 1}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
LATENT |= {"v_head_dim": 20, "num_key_value_heads": 4}
GROUPS = {"n_group": 2, "topk_group": 1}
FAMILIES = {
    **{family: tiny_models.FAMILIES[family] for family in tiny_models.DECODERS if family != "opt"},
    "gemma": ("GemmaConfig", "GemmaForCausalLM", WIDE),
    "phi": ("PhiConfig", "PhiForCausalLM", GQA),
    "starcoder2": ("Starcoder2Config", "Starcoder2ForCausalLM", GQA),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM", GQA),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", GQA),
    "granite": (
        "GraniteConfig",
        "GraniteForCausalLM",
        {**GQA, "embedding_multiplier": 1.5, "residual_multiplier": 0.7}
        | {"attention_multiplier": 0.25, "logits_scaling": 2.0},
    ),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", {**GQA, "num_hidden_layers": 5}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {**GQA, "num_local_experts": 4}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        {**GQA, **FOUR, "shared_expert_intermediate_size": 48},
    ),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**WIDE, **FOUR, "norm_topk_prob": True}),
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM", {**MHA, "num_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v2": (
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        {**MHA, **ROUTED, **LATENT, "routed_scaling_factor": 1.5},
    ),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", {**MHA, **ROUTED, **LATENT, **GROUPS}),
    "glm4_moe": ("Glm4MoeConfig", "Glm4MoeForCausalLM", {**GQA, **ROUTED, "head_dim": 16}),
    "granitemoe": (
        "GraniteMoeConfig",
        "GraniteMoeForCausalLM",
        {**GQA, "num_local_experts": 4, "num_experts_per_tok": 2, "embedding_multiplier": 1.5}
        | {"residual_multiplier": 0.7, "attention_multiplier": 0.25, "logits_scaling": 2.0},
    ),
    "granitemoeshared": (
        "GraniteMoeSharedConfig",
        "GraniteMoeSharedForCausalLM",
        {**GQA, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 48},
    ),
    "seed_oss": ("SeedOssConfig", "SeedOssForCausalLM", WIDE),
    "lfm2": tiny_models.HYBRIDS["lfm2"],
    "lfm2_moe": tiny_models.MIXTURES["lfm2_moe"],
    "mamba2": tiny_models.HYBRIDS["mamba2"],
    "granitemoehybrid": tiny_models.MIXTURES["granitemoehybrid"],
    "falcon_h1": tiny_models.HYBRIDS["falcon_h1"],
    "llama4": (
        *tiny_models.MIXTURES["llama4"][:2],
        {**tiny_models.MIXTURES["llama4"][2], "attention_chunk_size": 8192, "num_hidden_layers": 4}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    ),
    "qwen3_next": tiny_models.MIXTURES["qwen3_next"],
    "qwen3_5": tiny_models.STATEFUL["qwen3_5"],
    "qwen3_5_moe": (
        *tiny_models.STATEFUL["qwen3_5_moe"][:2],
        {key: n for key, n in tiny_models.STATEFUL["qwen3_5_moe"][2].items() if key != "intermediate_size"},
    ),
    "gemma3n": tiny_models.HYBRIDS["gemma3n"],
    "gemma4": (
        *tiny_models.HYBRIDS["gemma4"][:2],
        {**tiny_models.HYBRIDS["gemma4"][2], "global_head_dim": 32}
        | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    ),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {**WIDE, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 150000.0}},
    ),
}


def rope(kind, theta=10000.0, **settings):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **settings}}


YARN = rope("yarn", factor=4.0, original_max_position_embeddings=32)
LINEAR = rope("linear", factor=4.0)
LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0) | {"head_dim": 32}
LLAMA3["rope_parameters"]["original_max_position_embeddings"] = 64
LISTS = {"short_factor": [1.0, 1.2, 1.5, 2.0], "long_factor": [1.0, 2.0, 3.0, 4.0]}
LONGROPE = rope("longrope", factor=2.0, original_max_position_embeddings=256, **LISTS)
LONG_PHI3 = rope("longrope", **LISTS) | {"original_max_position_embeddings": 256}

GEMMA4_KINDS = ("sliding", "sliding", "full", "sliding", "full")
GAIN_ONE = ("gemma", "gemma2", "gemma3", "qwen3_next", "qwen3_5", "qwen3_5_moe")
"""Families whose norms multiply by 1 + weight."""
MSCALE = rope("yarn", factor=4.0, original_max_position_embeddings=32, mscale=0.7, mscale_all_dim=0.7)

# variant -> (family, what it changes)
VARIANTS = {
    **{family: (family, {}) for family in FAMILIES},
    "mistral": ("mistral", {"sliding_window": None}),
    "llama with rope of llama3": ("llama3", LLAMA3),
    "llama with biases": ("llama3", {"attention_bias": True, "mlp_bias": True}),
    "llama with wide heads": ("llama3", {"head_dim": 16}),
    "llama with linear rope": ("llama3", LINEAR),
    "llama with yarn": ("llama3", YARN),
    "llama with longrope": ("llama3", {**LONGROPE, "max_position_embeddings": 512}),
    "mistral with heads removed": (
        "mistral", {"head_dim": 8, "num_attention_heads": 6, "num_key_value_heads": 3}
        | {"sliding_window": None}),
    "qwen2 with yarn": ("qwen2", YARN),
    "qwen3 with yarn": ("qwen3", YARN),
    "gemma with linear rope": ("gemma", LINEAR),
    "gemma2 with marked layers": (
        "gemma2", {"layer_types": ["full_attention", "full_attention", "sliding_attention"]}),
    "gemma2 with linear rope": ("gemma2", LINEAR),
    "gemma3 with seven layers": ("gemma3", {"num_hidden_layers": 7}),
    "gemma3 without windows": ("gemma3", {"layer_types": ["full_attention"] * 3}),
    "gemma3 with marked layers": (
        "gemma3", {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        | {"rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}),
    "gemma3 with a cap": ("gemma3", {"final_logit_softcapping": 2.0}),
    "phi3 with part of each head turned": (
        "phi3", {"num_attention_heads": 4, "num_key_value_heads": 2}
        | rope("default", partial_rotary_factor=0.75)),
    "phi3 with longrope": ("phi3", {**LONG_PHI3, "max_position_embeddings": 512}),
    "gpt2 with a head": ("gpt2", {"tie_word_embeddings": False, "n_inner": 96}),
    "gpt_neox one after the other": (
        "gpt_neox", {"use_parallel_residual": False, "hidden_act": "gelu_new"}
        | rope("linear", factor=4.0, partial_rotary_factor=0.5)),
    "gpt_neox tied": ("gpt_neox", {"tie_word_embeddings": True, "hidden_act": "gelu_new"}),
    "phi with linear rope": ("phi", rope("linear", factor=4.0, partial_rotary_factor=0.5)),
    "starcoder2 with yarn": ("starcoder2", YARN),
    "stablelm with biases": ("stablelm", {**MHA, "use_qkv_bias": True, "tie_word_embeddings": True}),
    "olmo2 with yarn": ("olmo2", YARN),
    "granite with rope of llama3": ("granite", {**LLAMA3, "attention_bias": True, "num_attention_heads": 2}
        | {"num_key_value_heads": 1}),
    "mixtral with a tied head": ("mixtral", {"tie_word_embeddings": True, "num_experts_per_tok": 3}),
    "deepseek_v2 without a rank of queries": ("deepseek_v2", {"q_lora_rank": None, **MSCALE}),
    "deepseek_v3 without groups": (
        "deepseek_v3", {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "first_k_dense_replace": 0}),
    "glm4_moe with norms and biases": (
        "glm4_moe", {"use_qk_norm": True, "attention_bias": True, "routed_scaling_factor": 2.0}),
    "lfm2 with its width": (
        "lfm2", {"block_auto_adjust_ff_dim": False, "layer_types": ["conv", "conv", "full_attention"]}),
    "mamba2 with groups": ("mamba2", {"n_groups": 2, "tie_word_embeddings": True, "conv_kernel": 3}),
    "granitemoehybrid without experts": (
        "granitemoehybrid", {"num_local_experts": 0, "num_experts_per_tok": 0, "intermediate_size": 64}
        | {"embedding_multiplier": 1.5, "residual_multiplier": 0.7, "logits_scaling": 2.0}
        | {"layer_types": ["attention", "mamba", "mamba"]}),
    "falcon_h1 with multipliers": (
        "falcon_h1", {"embedding_multiplier": 5.5, "lm_head_multiplier": 0.04, "key_multiplier": 0.3}
        | {"attention_in_multiplier": 0.9, "attention_out_multiplier": 0.7, "ssm_in_multiplier": 1.25}
        | {"ssm_out_multiplier": 0.35, "mlp_multipliers": [0.8, 0.6], "mamba_rms_norm": True}
        | {"ssm_multipliers": [0.35, 0.25, 0.5, 0.7, 0.3], "mamba_norm_before_gate": False}
        | {"mamba_d_ssm": 96, "mamba_n_heads": 6, "mamba_n_groups": 2}),
    "llama4 with rope of llama3": (
        "llama4", rope("llama3", 500000.0, factor=16.0, low_freq_factor=1.0, high_freq_factor=1.0,
                       original_max_position_embeddings=16) | {"interleave_moe_layer_step": 1}),
    "qwen3_next by its interval": (
        "qwen3_next", {"layer_types": None, "num_hidden_layers": 5, "linear_num_value_heads": 6}),
    "qwen3_5 with one head of values for each of keys": (
        "qwen3_5", {"linear_num_key_heads": 4, "tie_word_embeddings": True, "num_hidden_layers": 5}
        | {"layer_types": None, "full_attention_interval": 2}),
    "qwen3_5 with three heads of values for each of keys": (
        "qwen3_5", {"linear_num_value_heads": 6}
        | rope("default", partial_rotary_factor=0.5, mrope_section=[3, 3, 2])),
    "gemma3n with shared keys": (
        "gemma3n", {"num_hidden_layers": 22, "num_kv_shared_layers": 2}
        | {"layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 4
           + ["full_attention", "sliding_attention"]}
        | {"activation_sparsity_pattern": [0.95] * 10 + [0.0] * 12}),
    "gemma4 with shared keys and embeddings for blocks": (
        "gemma4", {"num_hidden_layers": 5, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}
        | {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 320}
        | {"final_logit_softcapping": 30.0}
        | {"layer_types": [f"{kind}_attention" for kind in GEMMA4_KINDS]}),
    "gemma4 with keys for values": (
        "gemma4", {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_attention_heads": 4}),
    "gemma4 with experts": (
        "gemma4", {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
        | {"moe_intermediate_size": 32, "attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "gpt_oss with yarn": ("gpt_oss", YARN),
}  # fmt: skip


def config(variant):
    """The transformers config of a variant."""
    family, changes = VARIANTS[variant]
    kind, model, arguments = FAMILIES[family]
    result = getattr(transformers, kind)(
        **{**json.loads(json.dumps(arguments)), **json.loads(json.dumps(changes))}
    )
    result.architectures = [model]
    return result


def build(variant):
    """The model of a variant: seeded random weights, float32."""
    built_config = config(variant)
    with torch.random.fork_rng():
        torch.manual_seed(0)  # randomize adds to what vectors start with, which some families draw
        model = getattr(transformers, built_config.architectures[0])(built_config)
    model = tiny_models.randomize(model).eval()
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.linspace(-0.2, 0.3, len(buffer)))
    return model


PUBLISHED = (
    "gemma3n with shared keys", "gemma4 with shared keys and embeddings for blocks", "gemma4 with experts",
    "qwen3_5_moe",
)  # fmt: skip


def published(variant, folder):
    """A saved model as its family is published: keys of blocks that share those of others, a config without
    ``per_layer_config``, stacked experts."""
    path, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    tensors = load_file(path)
    layers = config["num_hidden_layers"]
    for index in range(layers - config.get("num_kv_shared_layers", 0), layers):
        kind = config["layer_types"][index]
        before = max(i for i in range(index) if config["layer_types"][i] == kind)
        for name in [
            name
            for name in tensors
            if f".layers.{before}.self_attn.k_" in name or f".layers.{before}.self_attn.v_" in name
        ]:
            tensors[name.replace(f".{before}.", f".{index}.")] = tensors[name] + 1
    for blocks in [config.pop("per_layer_config", {})]:
        for block in blocks.values():
            config["global_head_dim"] = block["head_dim"]
            config["num_global_key_value_heads"] = block.get("num_key_value_heads")
    for index in range(layers if variant == "qwen3_5_moe" else 0):
        mlp = f"model.layers.{index}.mlp.experts"
        parts = {
            part: torch.stack(
                [tensors.pop(f"{mlp}.{e}.{part}_proj.weight") for e in range(config["num_experts"])]
            )
            for part in ("gate", "up", "down")
        }
        tensors[f"{mlp}.gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], 1)
        tensors[f"{mlp}.down_proj"] = parts["down"]
    save_file(tensors, path, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def said(model_or_config):
    """The content of config.json."""
    result = getattr(model_or_config, "config", model_or_config)
    return json.loads(result.to_json_string(use_diff=False))


def stored(model):
    """What is stored of a model: tied weights once, experts as checkpoints of the family have them."""
    if "expert" in "".join(model.state_dict()):
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            return load_file(Path(folder) / "model.safetensors")
    state = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return state


def loaded(config, state):
    """The model of a config.json and what is stored of it."""
    if not any("expert" in name or "block_sparse_moe" in name for name in state):
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        missing, unexpected = model.load_state_dict(state, strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}
        model.tie_weights()
        return model
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        save_file(state, Path(folder) / "model.safetensors", {"format": "pt"})
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True
        )
    assert not found["unexpected_keys"] and set(found["missing_keys"]) <= {"lm_head.weight"}, found
    return model.eval()


def placed_tensors(placed, state):
    """The tensors of a file, experts stacked, from what is stored."""
    single = {item.piece: item.apply(state[item.stored]) if item.stored else item.value for item in placed}
    tensors = {}
    for item in placed:
        if item.expert is None:
            tensors[item.gguf] = single[item.piece]
        elif item.expert == 0:
            tensors[item.gguf] = torch.stack([single[f"{item.gguf}[{e}]"] for e in range(item.experts)])
    return tensors


def unstacked(tensors):
    """Tensors of a file with every expert, and every other matrix of a stack, by itself."""
    single = {}
    for name, tensor in tensors.items():
        if any(part in name for part in STACKED) and tensor.dim() > 1:
            single.update({f"{name}[{number}]": expert for number, expert in enumerate(tensor)})
        else:
            single[name] = tensor
    return single


def given_back(placed, tensors):
    """What is stored of a model, from a file's tensors with every expert by itself."""
    state = {}
    for item in placed:
        if item.part is None:
            state[item.stored] = item.undo(tensors[item.piece])
        else:
            if item.stored not in state:
                state[item.stored] = torch.full(item.stored_shape, torch.nan)
            item.fill(state[item.stored], tensors[item.piece])
    return state
