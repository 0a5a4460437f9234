"""The families whose blocks, or some of them, have a state in the place of attention: rows of the table of
architectures.

LFM2's is that of a short convolution. Mamba 2's (arXiv:2405.21060) is a state space: in the file, heads' A
and D are columns, the norm has a row for each group, and A is -exp(A_log). A file marks the blocks without
attention by 0 KV heads.
"""

from __future__ import annotations

import math
from dataclasses import replace

from attar.formats.gguf.architecture import (
    AUTO_WIDTH,
    NO_BIAS,
    SILU_RULE,
    Architecture,
    ConfigCount,
    ConfigRule,
    ModuleMapping,
)
from attar.formats.gguf.expert_families import GRANITE_MOE_SHARED
from attar.formats.gguf.modules import (
    CORRECTION,
    SIGMOID,
    attention,
    expert_counts,
    expert_neurons,
    experts,
    norm,
    outside,
    router,
)

INFINITY = {"__float__": "Infinity"}  # as transformers writes it in config.json
_UNLIMITED = [0.0, math.inf]
NO_LIMIT = ConfigRule(
    "time_step_limit", (_UNLIMITED, tuple(_UNLIMITED), [0.0, INFINITY], None), _UNLIMITED, stated=False
)
"""llama.cpp knows no bounds of time steps."""


def mamba(stored: str) -> tuple[ModuleMapping, ...]:
    """The mixer of Mamba 2."""

    def vector(gguf: str, name: str, leaf: str = "", *, negative_exp: bool = False) -> ModuleMapping:
        column = not leaf
        return ModuleMapping(
            f"blk.{{}}.{gguf}",
            f"{stored}.{name}",
            ("ssm_heads", "one") if column else ("ssm_heads",),
            matrix=False,
            leaves=(leaf, ""),
            mixer="state",
            form=("ssm_heads",) if column else (),
            negative_exp=negative_exp,
        )

    return (
        ModuleMapping("blk.{}.ssm_in", f"{stored}.in_proj", ("ssm_projected", "hidden"), mixer="state"),
        ModuleMapping(
            "blk.{}.ssm_conv1d",
            f"{stored}.conv1d",
            ("ssm_convolved", "ssm_kernel"),
            bias=True,
            matrix=False,
            mixer="state",
            form=("ssm_convolved", "one", "ssm_kernel"),
        ),
        vector("ssm_dt", "dt_bias", ".bias"),
        vector("ssm_a", "A_log", negative_exp=True),
        vector("ssm_d", "D"),
        ModuleMapping(
            "blk.{}.ssm_norm",
            f"{stored}.norm",
            ("ssm_groups", "ssm_group"),
            matrix=False,
            mixer="state",
            form=("ssm_inner",),
        ),
        ModuleMapping("blk.{}.ssm_out", f"{stored}.out_proj", ("hidden", "ssm_inner"), mixer="state"),
    )


def mamba_counts(
    kernel: str, state: str, groups: str, heads: str, head: str, defaults: tuple[int, ...]
) -> tuple[ConfigCount, ...]:
    """The sizes of Mamba 2 by the config's keys, and transformers' defaults of them."""
    keys = {"kernel": kernel, "state": state, "groups": groups, "heads": heads, "head": head}
    written = ("conv_kernel", "state_size", "group_count", "time_step_rank", "")
    return tuple(
        ConfigCount(f"ssm_{size}", f"ssm.{name}" if name else "", (key,), default)
        for (size, key), name, default in zip(keys.items(), written, defaults, strict=True)
    )


def _lfm2_mlp(blocks: str = "") -> tuple[ModuleMapping, ...]:
    """gate, up and down, in LFM2's spelling."""
    names = (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    return tuple(
        ModuleMapping(
            f"blk.{{}}.ffn_{part}",
            f"layers.{{}}.feed_forward.{name}",
            ("hidden", "ff") if part == "down" else ("ff", "hidden"),
            blocks=blocks,
        )
        for part, name in names
    )


LFM2 = Architecture(
    family="lfm2",
    arch="lfm2",
    model_class="Lfm2ForCausalLM",
    outer=(outside()[0], norm("token_embd_norm", "embedding_norm")),
    blocks=(
        *(replace(module, mixer="attention") for module in attention(out="out_proj")),
        *(
            replace(
                norm(f"blk.{{}}.attn_{part}_norm", f"layers.{{}}.self_attn.{part}_layernorm", size="head"),
                mixer="attention",
            )
            for part in ("q", "k")
        ),
        ModuleMapping(
            "blk.{}.shortconv.conv",
            "layers.{}.conv.conv",
            ("hidden", "kernel"),
            matrix=False,
            mixer="state",
            form=("hidden", "one", "kernel"),
        ),
        ModuleMapping(
            "blk.{}.shortconv.in_proj", "layers.{}.conv.in_proj", ("conv_projected", "hidden"), mixer="state"
        ),
        ModuleMapping(
            "blk.{}.shortconv.out_proj", "layers.{}.conv.out_proj", ("hidden", "hidden"), mixer="state"
        ),
        *_lfm2_mlp(),
        norm("blk.{}.attn_norm", "layers.{}.operator_norm"),
        norm("blk.{}.ffn_norm", "layers.{}.ffn_norm"),
    ),
    keys={"epsilon": "norm_eps"},
    defaults={"epsilon": 1e-5, "kv_heads": 8, "context": 128000, "tie_word_embeddings": True},
    counts=(ConfigCount("kernel", "shortconv.l_cache", ("conv_L_cache",), 3),),
    rules=(
        SILU_RULE,
        ConfigRule("conv_bias", (False,), False),
    ),
    square=True,
    layer_types=("full_attention", "conv"),
    stated={AUTO_WIDTH: False},
)

_FEED_FORWARD = "layers.{}.feed_forward"
LFM2_MOE = replace(
    LFM2,
    family="lfm2_moe",
    arch="lfm2moe",
    model_class="Lfm2MoeForCausalLM",
    blocks=(
        *(module for module in LFM2.blocks if ".feed_forward." not in module.stored),
        *_lfm2_mlp("dense"),
        router(f"{_FEED_FORWARD}.gate", blocks="experts"),
        *experts(f"{_FEED_FORWARD}.experts", names=("w1", "w3", "w2"), width="expert_ff", blocks="experts"),
        replace(CORRECTION, stored=f"{_FEED_FORWARD}.expert_bias"),
    ),
    counts=(
        *LFM2.counts,
        *expert_counts("num_experts", total=32, used=4),
        expert_neurons("moe_intermediate_size", 1792),
        ConfigCount("dense", "leading_dense_block_count", ("num_dense_layers",), 2, zero=True),
    ),
    fixed=(("expert_gating_func", SIGMOID),),
    rules=(
        *LFM2.rules,
        ConfigRule("use_expert_bias", (True,), True),
        ConfigRule("norm_topk_prob", (True,), True),
        ConfigRule("routed_scaling_factor", (1.0,), 1.0),
    ),
    stated={},
)

MAMBA2 = Architecture(
    family="mamba2",
    arch="mamba2",
    model_class="Mamba2ForCausalLM",
    prefix="backbone.",
    outer=outside("embeddings", "norm_f"),
    blocks=(norm("blk.{}.attn_norm", "layers.{}.norm"), *mamba("layers.{}.mixer")),
    keys={"epsilon": "layer_norm_epsilon"},
    defaults={"epsilon": 1e-5},
    counts=mamba_counts(
        *("conv_kernel", "state_size", "n_groups", "num_heads", "head_dim"), defaults=(4, 128, 8, 128, 64)
    ),
    rules=(
        SILU_RULE,
        NO_LIMIT,
        ConfigRule("expand", (2,), 2),
        ConfigRule("use_bias", (False,), False),
        ConfigRule("use_conv_bias", (True,), True),
    ),
    grouped=False,
    ropes=(),
    attention_free=True,
)

_EXPERT_PARTS = ("ffn_gate_inp", "_exps", "_shexp")
_SHARED = "layers.{}.shared_mlp"

GRANITE_HYBRID = replace(
    GRANITE_MOE_SHARED,
    family="granitemoehybrid",
    arch="granitehybrid",
    model_class="GraniteMoeHybridForCausalLM",
    blocks=(
        *mamba("layers.{}.mamba"),
        *(
            replace(
                module,
                mixer="attention" if ".self_attn." in module.stored else "",
                needs="experts" if any(part in module.gguf for part in _EXPERT_PARTS) else "",
            )
            for module in GRANITE_MOE_SHARED.blocks
        ),
        *(
            ModuleMapping(
                f"blk.{{}}.ffn_{name}",
                f"{_SHARED}.input_linear",
                ("ff", "hidden"),
                part=part,
                lacks="experts",
            )
            for name, part in (("gate", "first"), ("up", "second"))
        ),
        ModuleMapping("blk.{}.ffn_down", f"{_SHARED}.output_linear", ("hidden", "ff"), lacks="experts"),
    ),
    counts=(
        *(replace(count, zero=True) for count in expert_counts("num_local_experts", total=8, used=2)),
        ConfigCount("shared_ff", "expert_shared_feed_forward_length", ("shared_intermediate_size",), 1024),
        *mamba_counts(
            *("mamba_d_conv", "mamba_d_state", "mamba_n_groups", "mamba_n_heads", "mamba_d_head"),
            defaults=(4, 256, 1, 128, 64),
        ),
    ),
    rules=(
        SILU_RULE,
        NO_BIAS,
        NO_LIMIT,
        ConfigRule("mamba_expand", (2,), 2),
        ConfigRule("mamba_proj_bias", (False,), False),
        ConfigRule("mamba_conv_bias", (True,), True),
        ConfigRule("position_embedding_type", (None, "nope"), None),
    ),
    fixed=(("rope.scaling.finetuned", False),),
    square=True,
    ropes=(),
    layer_types=("attention", "mamba"),
)

STATE_FAMILIES = (LFM2, LFM2_MOE, MAMBA2, GRANITE_HYBRID)
"""Every family of states that can be written."""
