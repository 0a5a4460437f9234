"""Falcon-H1 (arXiv:2507.22448) in the table of architectures: every block has attention and a state space,
side by side.

Its config has numbers (muP) by which embeddings, inputs and outputs of the layers are multiplied. llama.cpp
knows none of them: a file has them in the weights, and a config made from a file has ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from attar.formats.gguf.architecture import NO_BIAS, SILU_RULE, Architecture, ConfigCount, ConfigRule, Sizes
from attar.formats.gguf.modules import attention, norm, outside
from attar.formats.gguf.state_families import NO_LIMIT, mamba, mamba_counts

_SCALES = {
    "attn_q": ("attention_in_multiplier",),
    "attn_k": ("key_multiplier", "attention_in_multiplier"),
    "attn_v": ("attention_in_multiplier",),
    "attn_output": ("attention_out_multiplier",),
    "ssm_in": ("ssm_in_multiplier", "ssm_multipliers"),
    "ssm_out": ("ssm_out_multiplier",),
    "ffn_gate": ("mlp_multipliers.0",),
    "ffn_down": ("mlp_multipliers.1",),
    "token_embd": ("embedding_multiplier",),
}
"""What each tensor is multiplied with, in the order of llama.cpp's converter."""
_LISTS = {"mlp_multipliers": 2, "ssm_multipliers": 5}


def _scaled(modules: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        replace(module, scales=_SCALES.get(module.gguf.removeprefix("blk.{}."), ()), mixer="")
        for module in modules
    )


def _misfit(config: Mapping[str, Any], sizes: Sizes) -> str:
    if config.get("mamba_rms_norm") and config.get("mamba_norm_before_gate", True):
        return "mamba_norm_before_gate is true, but llama.cpp applies the gate before the norm"
    return ""


_MLP = (
    ("ffn_gate", "gate_proj", ("ff", "hidden")),
    ("ffn_up", "up_proj", ("ff", "hidden")),
    ("ffn_down", "down_proj", ("hidden", "ff")),
)
_MIXER = tuple(
    replace(module, flag="mamba_rms_norm") if module.gguf.endswith("ssm_norm") else module
    for module in mamba("layers.{}.mamba")
)

FALCON_H1 = Architecture(
    family="falcon_h1",
    arch="falcon-h1",
    model_class="FalconH1ForCausalLM",
    outer=_scaled(outside(final="final_layernorm")),
    blocks=_scaled(
        (
            *_MIXER,
            *attention(),
            *(
                replace(
                    attention()[0],
                    gguf=f"blk.{{}}.{gguf}",
                    stored=f"layers.{{}}.feed_forward.{name}",
                    shape=shape,
                )
                for gguf, name, shape in _MLP
            ),
            norm("blk.{}.attn_norm", "layers.{}.input_layernorm"),
            replace(norm("blk.{}.ffn_norm", "layers.{}.pre_ff_layernorm"), leaves=("", ".weight")),
        )
    ),
    defaults={"epsilon": 1e-5, "kv_heads": 8},
    counts=(
        *mamba_counts(
            *("mamba_d_conv", "mamba_d_state", "mamba_n_groups", "mamba_n_heads", "mamba_d_head"),
            defaults=(4, 256, 1, 128, 0),
        ),
        ConfigCount("ssm_inner", "ssm.inner_size", ("mamba_d_ssm",), 1024),
    ),
    rules=(
        SILU_RULE,
        NO_BIAS,
        NO_LIMIT,
        ConfigRule("mlp_bias", (False,), False),
        ConfigRule("projectors_bias", (False,), False),
        ConfigRule("mamba_proj_bias", (False,), False),
        ConfigRule("mamba_conv_bias", (True,), True),
    ),
    head_scale="lm_head_multiplier",
    misfit=_misfit,
    stated={
        "mamba_norm_before_gate": False,
        "lm_head_multiplier": 1.0,
        **{key: 1.0 for keys in _SCALES.values() for key in keys if key.partition(".")[0] not in _LISTS},
        **{key: [1.0] * count for key, count in _LISTS.items()},
    },
)
