"""The table of architectures: the names of each family's tensors, and the config values with which llama.cpp
computes the same function.

Sources: llama.cpp's loaders (src/models/*.cpp: names, shapes, what is optional, what is fixed in code) and
its converters (conversion/*.py: names of the metadata). A value that its code fixes is a rule here: another
one in the config is refused, because the file would load and compute another function.
"""

from __future__ import annotations

from attar.formats.gguf.architecture import (
    GELU,
    LLAMA_ROPES,
    NO_BIAS,
    SILU_RULE,
    Architecture,
    ConfigRule,
    ModuleMapping,
)
from attar.formats.gguf.expert_families import EXPERT_FAMILIES, GRANITE
from attar.formats.gguf.falcon_h1 import FALCON_H1
from attar.formats.gguf.gemma3n import GEMMA3N
from attar.formats.gguf.gemma4 import GEMMA4
from attar.formats.gguf.llama4 import LLAMA4
from attar.formats.gguf.modules import (
    around_norms,
    attention,
    gated_mlp,
    head_norms,
    norm,
    outside,
    plain_mlp,
    pre_norms,
)
from attar.formats.gguf.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from attar.formats.gguf.qwen3_next import QWEN3_NEXT
from attar.formats.gguf.state_families import STATE_FAMILIES

CAUSAL = ConfigRule("use_bidirectional_attention", (None, False), None)

_LLAMA_BLOCK = (
    *attention(bias="attention_bias", out_bias="attention_bias", pair=True),
    *gated_mlp("mlp_bias"),
    *pre_norms(),
)

LLAMA = Architecture(
    family="llama",
    arch="llama",
    model_class="LlamaForCausalLM",
    outer=outside(),
    blocks=_LLAMA_BLOCK,
    defaults={"epsilon": 1e-6},
    rules=(SILU_RULE,),
    ropes=LLAMA_ROPES,
)

MISTRAL = Architecture(
    family="mistral",
    arch="llama",
    model_class="MistralForCausalLM",
    outer=outside(),
    blocks=(*attention(pair=True), *gated_mlp(), *pre_norms()),
    defaults={"epsilon": 1e-6, "kv_heads": 8, "sliding_window": 4096},
    rules=(SILU_RULE,),
    ropes=LLAMA_ROPES,
    window="all",
)

QWEN2 = Architecture(
    family="qwen2",
    arch="qwen2",
    model_class="Qwen2ForCausalLM",
    outer=outside(),
    blocks=(*attention(bias=True), *gated_mlp(), *pre_norms()),
    defaults={"epsilon": 1e-6, "kv_heads": 32},
    rules=(SILU_RULE,),
    square=True,
    window="marked",
)

QWEN3 = Architecture(
    family="qwen3",
    arch="qwen3",
    model_class="Qwen3ForCausalLM",
    outer=outside(),
    blocks=(*attention(), *gated_mlp(), *pre_norms(), *head_norms()),
    defaults={"epsilon": 1e-6, "kv_heads": 32, "head": 128},
    rules=(SILU_RULE, NO_BIAS),
    window="marked",
)

GEMMA = Architecture(
    family="gemma",
    arch="gemma",
    model_class="GemmaForCausalLM",
    outer=outside(plus=1.0),
    blocks=(*attention(), *gated_mlp(), *pre_norms(plus=1.0)),
    head="never",
    defaults={"epsilon": 1e-6, "kv_heads": 16, "head": 256, "tie_word_embeddings": True},
    rules=(ConfigRule("hidden_act", GELU, "gelu_pytorch_tanh"), NO_BIAS, CAUSAL),
    ropes=("default", "linear"),
)

GEMMA2 = Architecture(
    family="gemma2",
    arch="gemma2",
    model_class="Gemma2ForCausalLM",
    outer=outside(plus=1.0),
    blocks=(*attention(), *gated_mlp(), *around_norms(1.0)),
    head="never",
    defaults={
        "epsilon": 1e-6,
        "kv_heads": 4,
        "head": 256,
        "tie_word_embeddings": True,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    rules=(
        ConfigRule("hidden_activation", GELU, "gelu_pytorch_tanh"),
        NO_BIAS,
        CAUSAL,
        ConfigRule("attn_logit_softcapping", None, 50.0),
        ConfigRule("final_logit_softcapping", None, 30.0),
    ),
    extras=(
        ("attn_logit_softcapping", "attn_logit_softcapping"),
        ("final_logit_softcapping", "final_logit_softcapping"),
    ),
    ropes=("default", "linear"),
    window=2,
    window_applied=True,
    window_needed=True,
    scale_by_layers=46,
)

GEMMA3 = Architecture(
    family="gemma3_text",
    arch="gemma3",
    model_class="Gemma3ForCausalLM",
    outer=outside(plus=1.0),
    blocks=(*attention(), *gated_mlp(), *around_norms(1.0), *head_norms(plus=1.0)),
    defaults={
        "epsilon": 1e-6,
        "kv_heads": 4,
        "head": 256,
        "context": 131072,
        "tie_word_embeddings": True,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
    },
    rules=(
        ConfigRule("hidden_activation", GELU, "gelu_pytorch_tanh"),
        NO_BIAS,
        ConfigRule("use_bidirectional_attention", (None, False), False),
        ConfigRule("attn_logit_softcapping", (None,), None),
    ),
    extras=(("final_logit_softcapping", "final_logit_softcapping"),),
    ropes=("default", "linear"),
    local_rope=True,
    window=6,
    window_applied=True,
    scale_by_layers=62,
)

PHI3 = Architecture(
    family="phi3",
    arch="phi3",
    model_class="Phi3ForCausalLM",
    outer=outside(),
    blocks=(
        ModuleMapping("blk.{}.attn_qkv", "layers.{}.self_attn.qkv_proj", ("qkv", "hidden")),
        ModuleMapping("blk.{}.attn_output", "layers.{}.self_attn.o_proj", ("hidden", "q")),
        ModuleMapping("blk.{}.ffn_up", "layers.{}.mlp.gate_up_proj", ("gate_up", "hidden")),
        ModuleMapping("blk.{}.ffn_down", "layers.{}.mlp.down_proj", ("hidden", "ff")),
        *pre_norms(),
    ),
    defaults={"epsilon": 1e-5, "original_max_position_embeddings": 4096},
    rules=(SILU_RULE,),
    square=True,
    ropes=("default", "longrope"),
    window="all",
)

GPT2 = Architecture(
    family="gpt2",
    arch="gpt2",
    model_class="GPT2LMHeadModel",
    prefix="transformer.",
    outer=(
        *outside("wte", "ln_f", bias=True),
        ModuleMapping("position_embd", "wpe", ("context", "hidden"), matrix=False),
    ),
    blocks=(
        norm("blk.{}.attn_norm", "h.{}.ln_1", bias=True),
        ModuleMapping("blk.{}.attn_qkv", "h.{}.attn.c_attn", ("qkv", "hidden"), bias=True, transposed=True),
        ModuleMapping("blk.{}.attn_output", "h.{}.attn.c_proj", ("hidden", "q"), bias=True, transposed=True),
        norm("blk.{}.ffn_norm", "h.{}.ln_2", bias=True),
        *plain_mlp("h.{}.mlp.c_fc", "h.{}.mlp.c_proj", transposed=True),
    ),
    layer_norm=True,
    keys={
        "hidden": "n_embd",
        "layers": "n_layer",
        "heads": "n_head",
        "ff": "n_inner",
        "context": "n_positions",
        "epsilon": "layer_norm_epsilon",
    },
    defaults={"epsilon": 1e-5, "tie_word_embeddings": True},
    rules=(
        ConfigRule("activation_function", GELU, "gelu_new"),
        ConfigRule("scale_attn_weights", (True,), True),
        ConfigRule("scale_attn_by_inverse_layer_idx", (False,), False),
        ConfigRule("add_cross_attention", (False,), False),
    ),
    grouped=False,
    square=True,
    ropes=(),
)

GPT_NEOX = Architecture(
    family="gpt_neox",
    arch="gptneox",
    model_class="GPTNeoXForCausalLM",
    prefix="gpt_neox.",
    outer=outside("embed_in", "final_layer_norm", bias=True),
    blocks=(
        *pre_norms(bias=True),
        ModuleMapping(
            "blk.{}.attn_qkv",
            "layers.{}.attention.query_key_value",
            ("qkv", "hidden"),
            bias=True,
            order="groups",
        ),
        ModuleMapping("blk.{}.attn_output", "layers.{}.attention.dense", ("hidden", "q"), bias=True),
        *plain_mlp("layers.{}.mlp.dense_h_to_4h", "layers.{}.mlp.dense_4h_to_h"),
    ),
    head="needed",
    head_names=("embed_out", "lm_head"),
    layer_norm=True,
    keys={"epsilon": "layer_norm_eps"},
    defaults={"epsilon": 1e-5, "partial_rotary_factor": 0.25, "use_parallel_residual": True},
    rules=(ConfigRule("hidden_act", GELU, "gelu"), ConfigRule("attention_bias", (True,), True)),
    extras=(("use_parallel_residual", "use_parallel_residual"),),
    grouped=False,
    square=True,
)

PHI = Architecture(
    family="phi",
    arch="phi2",
    model_class="PhiForCausalLM",
    outer=outside("embed_tokens", "final_layernorm", bias=True),
    blocks=(
        norm("blk.{}.attn_norm", "layers.{}.input_layernorm", bias=True),
        *attention(bias=True, out_bias=True, out="dense"),
        *plain_mlp("layers.{}.mlp.fc1", "layers.{}.mlp.fc2"),
    ),
    head="needed",
    head_bias=True,
    layer_norm=True,
    keys={"epsilon": "layer_norm_eps"},
    defaults={"epsilon": 1e-5, "partial_rotary_factor": 0.5},
    rules=(ConfigRule("hidden_act", GELU, "gelu_new"), ConfigRule("qk_layernorm", (False,), False)),
    square=True,
)

STARCODER2 = Architecture(
    family="starcoder2",
    arch="starcoder2",
    model_class="Starcoder2ForCausalLM",
    outer=outside(bias=True),
    blocks=(
        *attention(bias=True, out_bias=True),
        *plain_mlp("layers.{}.mlp.c_fc", "layers.{}.mlp.c_proj"),
        *pre_norms(bias=True),
    ),
    layer_norm=True,
    keys={"epsilon": "norm_epsilon"},
    defaults={"epsilon": 1e-5, "kv_heads": 2, "tie_word_embeddings": True},
    rules=(ConfigRule("hidden_act", GELU, "gelu_pytorch_tanh"), ConfigRule("use_bias", (True,), True)),
    square=True,
    window="all",
)

STABLELM = Architecture(
    family="stablelm",
    arch="stablelm",
    model_class="StableLmForCausalLM",
    outer=outside(bias=True),
    blocks=(*attention(bias="use_qkv_bias"), *gated_mlp(), *pre_norms(bias=True)),
    head="needed",
    layer_norm=True,
    keys={"epsilon": "layer_norm_eps"},
    defaults={
        "epsilon": 1e-5,
        "kv_heads": 32,
        "partial_rotary_factor": 0.25,
        "use_parallel_residual": False,
    },
    extras=(("use_parallel_residual", "use_parallel_residual"),),
    rules=(
        SILU_RULE,
        ConfigRule("qk_layernorm", (False,), False),
        ConfigRule("use_parallel_residual", (False,), False),
    ),
    square=True,
)

OLMO2 = Architecture(
    family="olmo2",
    arch="olmo2",
    model_class="Olmo2ForCausalLM",
    outer=outside(),
    blocks=(
        *attention(),
        *gated_mlp(),
        *head_norms(q="q", k="kv"),
        norm("blk.{}.post_attention_norm", "layers.{}.post_attention_layernorm"),
        norm("blk.{}.post_ffw_norm", "layers.{}.post_feedforward_layernorm"),
    ),
    head="needed",
    defaults={"epsilon": 1e-5},
    rules=(SILU_RULE, NO_BIAS),
    square=True,
)

SMOLLM3 = Architecture(
    family="smollm3",
    arch="smollm3",
    model_class="SmolLM3ForCausalLM",
    outer=outside(),
    blocks=(*attention(pair=True), *gated_mlp(), *pre_norms()),
    defaults={"epsilon": 1e-6, "kv_heads": 4, "tie_word_embeddings": True, "rope_theta": 2e6},
    rules=(
        SILU_RULE,
        NO_BIAS,
        ConfigRule("mlp_bias", (False,), False),
        ConfigRule("use_sliding_window", (False,), False),
    ),
    no_rope_interval=4,
)

SEED_OSS = Architecture(
    family="seed_oss",
    arch="seed_oss",
    model_class="SeedOssForCausalLM",
    outer=outside(),
    blocks=(
        *attention(bias=True),
        *gated_mlp(),
        norm("blk.{}.attn_norm", "layers.{}.input_layernorm"),
        norm("blk.{}.post_attention_norm", "layers.{}.post_attention_layernorm"),
    ),
    defaults={"epsilon": 1e-6, "kv_heads": 8, "head": 128},
    rules=(
        SILU_RULE,
        ConfigRule("attention_bias", (True,), True),
        ConfigRule("attention_out_bias", (False,), False),
        ConfigRule("mlp_bias", (False,), False),
    ),
)

ARCHITECTURES = {
    known.family: known
    for known in (
        LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA, GEMMA2, GEMMA3, PHI3,
        GPT2, GPT_NEOX, PHI, STARCODER2, STABLELM, OLMO2, GRANITE, SMOLLM3, SEED_OSS,
        *EXPERT_FAMILIES, *STATE_FAMILIES, FALCON_H1, LLAMA4, QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE,
        GEMMA3N, GEMMA4,
    )
}  # fmt: skip
"""Every family that can be written, by its ``model_type``."""
