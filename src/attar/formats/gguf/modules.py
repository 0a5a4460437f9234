"""Modules that families share: attention, MLPs, norms, embeddings, experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from attar.formats.gguf.architecture import ConfigCount, ModuleMapping, NextnBlocks

SOFTMAX, SIGMOID = 1, 2
"""llama.cpp's numbers of the router's functions."""

CORRECTION = ModuleMapping(
    "blk.{}.exp_probs_b",
    "layers.{}.mlp.gate.e_score_correction_bias",
    ("experts",),
    matrix=False,
    leaves=(".bias", ""),
    blocks="experts",
)
"""What is added to the router's scores when experts are chosen, not when they are weighed."""


def norm(
    gguf: str, stored: str, *, size: str = "hidden", bias: bool = False, plus: float = 0.0
) -> ModuleMapping:
    """A norm's weight."""
    return ModuleMapping(gguf, stored, (size,), bias=bias, plus=plus, matrix=False)


def attention(
    *, bias: bool | str = False, out_bias: bool | str = False, pair: bool = False, out: str = "o_proj"
) -> tuple[ModuleMapping, ...]:
    """Separate projections; ``pair``: the rows of q and k are paired."""
    prefix, order = "blk.{}.attn_", ("q", "k", "") if pair else ("", "", "")
    inputs = (("q", "q"), ("k", "kv"), ("v", "kv"))
    return (
        *(
            ModuleMapping(
                f"{prefix}{part}", f"layers.{{}}.self_attn.{part}_proj", (size, "hidden"), bias, kind
            )
            for (part, size), kind in zip(inputs, order, strict=True)
        ),
        ModuleMapping(f"{prefix}output", f"layers.{{}}.self_attn.{out}", ("hidden", "q"), out_bias),
    )


def gated_mlp(bias: bool | str = False, *, blocks: str = "") -> tuple[ModuleMapping, ...]:
    """gate, up and down."""
    return (
        ModuleMapping("blk.{}.ffn_gate", "layers.{}.mlp.gate_proj", ("ff", "hidden"), bias, blocks=blocks),
        ModuleMapping("blk.{}.ffn_up", "layers.{}.mlp.up_proj", ("ff", "hidden"), bias, blocks=blocks),
        ModuleMapping("blk.{}.ffn_down", "layers.{}.mlp.down_proj", ("hidden", "ff"), bias, blocks=blocks),
    )


def plain_mlp(up: str, down: str, *, transposed: bool = False) -> tuple[ModuleMapping, ...]:
    """up and down, with biases."""
    return (
        ModuleMapping("blk.{}.ffn_up", up, ("ff", "hidden"), bias=True, transposed=transposed),
        ModuleMapping("blk.{}.ffn_down", down, ("hidden", "ff"), bias=True, transposed=transposed),
    )


def outside(
    embedding: str = "embed_tokens", final: str = "norm", *, bias: bool = False, plus: float = 0.0
) -> tuple[ModuleMapping, ...]:
    """Embedding and final norm."""
    return (
        ModuleMapping("token_embd", embedding, ("vocabulary", "hidden")),
        norm("output_norm", final, bias=bias, plus=plus),
    )


def pre_norms(*, bias: bool = False, plus: float = 0.0) -> tuple[ModuleMapping, ...]:
    """The norms before attention and MLP."""
    return (
        norm("blk.{}.attn_norm", "layers.{}.input_layernorm", bias=bias, plus=plus),
        norm("blk.{}.ffn_norm", "layers.{}.post_attention_layernorm", bias=bias, plus=plus),
    )


def around_norms(plus: float) -> tuple[ModuleMapping, ...]:
    """Gemma's norms before and after attention and MLP."""
    prefix = "layers.{}."
    return (
        norm("blk.{}.attn_norm", f"{prefix}input_layernorm", plus=plus),
        norm("blk.{}.post_attention_norm", f"{prefix}post_attention_layernorm", plus=plus),
        norm("blk.{}.ffn_norm", f"{prefix}pre_feedforward_layernorm", plus=plus),
        norm("blk.{}.post_ffw_norm", f"{prefix}post_feedforward_layernorm", plus=plus),
    )


def head_norms(*, q: str = "head", k: str = "head", plus: float = 0.0) -> tuple[ModuleMapping, ...]:
    """Norms of queries and keys."""
    return (
        norm("blk.{}.attn_q_norm", "layers.{}.self_attn.q_norm", size=q, plus=plus),
        norm("blk.{}.attn_k_norm", "layers.{}.self_attn.k_norm", size=k, plus=plus),
    )


def router(stored: str, **more: Any) -> ModuleMapping:
    """The router's weight, which llama.cpp keeps in float32."""
    return ModuleMapping("blk.{}.ffn_gate_inp", stored, ("experts", "hidden"), matrix=False, **more)


def experts(
    stored: str,
    *,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    width: str = "ff",
    blocks: str = "",
) -> tuple[ModuleMapping, ...]:
    """gate, up and down of every expert, which the checkpoint stores one by one.

    Args:
        stored: where they are; the expert's number and name follow.
        names: of the three.
    """
    gate, up, down = (f"{stored}.{{{{}}}}.{name}" for name in names)
    shapes = ((width, "hidden"), (width, "hidden"), ("hidden", width))
    return tuple(
        ModuleMapping(f"blk.{{}}.ffn_{part}_exps", name, shape, blocks=blocks, experts=True)
        for part, name, shape in zip(("gate", "up", "down"), (gate, up, down), shapes, strict=True)
    )


def stacked_experts(
    stored: str,
    both: str,
    down: str,
    *,
    width: str = "ff",
    leaf: str = "",
    halves: tuple[str, str] = ("first", "second"),
    transposed: bool = False,
    modules: str = "experts.",
) -> tuple[ModuleMapping, ...]:
    """gate, up and down of all experts, which the checkpoint stacks, gate and up in one tensor.

    Args:
        both, down: names of the two tensors in ``stored``; ``leaf`` follows.
        halves: which rows of the one are gate and up.
        transposed: experts are stored as (in, out).
        modules: what lies between ``stored`` and an expert's number where experts are modules.
    """
    parts = (("gate", both, halves[0]), ("up", both, halves[1]), ("down", down, ""))
    return tuple(
        ModuleMapping(
            f"blk.{{}}.ffn_{name}_exps",
            f"{stored}.{tensor}",
            ("hidden", width) if name == "down" else (width, "hidden"),
            transposed=transposed,
            leaves=(".weight", leaf),
            experts=True,
            stacked=f"{stored}.{modules}{{{{}}}}.{name}_proj",
            part=part,
        )
        for name, tensor, part in parts
    )


def shared_expert(stored: str, *, blocks: str = "", width: str = "shared_ff") -> tuple[ModuleMapping, ...]:
    """gate, up and down of the expert that all tokens share."""
    return tuple(
        ModuleMapping(
            f"blk.{{}}.ffn_{part}_shexp",
            f"{stored}.{part}_proj",
            ("hidden", width) if part == "down" else (width, "hidden"),
            blocks=blocks,
        )
        for part in ("gate", "up", "down")
    )


def expert_counts(count: str, *, total: int = 0, used: int = 0) -> tuple[ConfigCount, ...]:
    """The number of experts, and of the experts of a token; ``count``: key of the first, ``total`` and
    ``used`` the defaults."""
    others = tuple(key for key in ("num_experts", "num_local_experts", "n_routed_experts") if key != count)
    return (
        ConfigCount("experts", "expert_count", (count, *others), total),
        ConfigCount("used", "expert_used_count", ("num_experts_per_tok",), used),
    )


def expert_neurons(key: str, default: int = 0) -> ConfigCount:
    """The width of an expert, where it is its own."""
    return ConfigCount("expert_ff", "expert_feed_forward_length", (key,), default)


def nextn(
    stored: str, names: tuple[str, str, str, str], *, plus: float = 0.0, block: str = "", key: str = ""
) -> NextnBlocks:
    """Blocks that predict further tokens.

    Args:
        stored: where the head's own modules are.
        names: of the projection, of the norms of embedding and hidden state, and of the last norm.
        plus: added to the norms.
        block: as :attr:`NextnBlocks.stored`; such a head has the model's embedding and head alone.
        key: of the config for their number; empty: the usual one.
    """
    joint, *norms = (f"{stored}{name}" for name in names)
    parts = ("enorm", "hnorm", "shared_head_norm")
    copies = () if block else ("embed_tokens", "shared_head_head")
    modules = (
        ModuleMapping("blk.{}.nextn.eh_proj", joint, ("hidden", "joined")),
        *(
            replace(norm(f"blk.{{}}.nextn.{part}", name, plus=plus), optional=part == "shared_head_norm")
            for part, name in zip(parts, norms, strict=True)
        ),
        *(
            ModuleMapping(
                f"blk.{{}}.nextn.{name}",
                f"{stored}{name.replace('head_head', 'head.head')}",
                ("vocabulary", "hidden"),
                optional=True,
            )
            for name in copies
        ),
    )
    return NextnBlocks(modules, block, key or NextnBlocks.key)
