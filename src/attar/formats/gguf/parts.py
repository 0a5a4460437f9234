"""What the table of architectures (families.py) is made of: parts of a model, rules about its config, and
the parts that many families share.

A :class:`ModuleMapping` is a weight with its bias; ``{}`` in its names is the block. Names of sizes:
``hidden``, ``ff`` (MLP width), ``gate_up`` (twice that), ``q`` and ``kv`` (all heads together), ``qkv``,
``head`` (one head), ``vocabulary``, ``context``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SILU = ("silu", "swish")
GELU = ("gelu_pytorch_tanh", "gelu_new", "gelu", "gelu_fast")
"""llama.cpp's one GELU is the tanh approximation; "gelu" means the exact one, which it comes near."""

LLAMA_ROPES = ("default", "linear", "yarn", "llama3", "longrope")
ROPES = ("default", "linear", "yarn")


@dataclass(frozen=True)
class ModuleMapping:
    """A weight, and the bias beside it.

    Attributes:
        gguf: name in the file, without ``.weight``.
        stored: name in the checkpoint, without the model's prefix and ``.weight``.
        shape: names of the sizes in the file, rows first.
        bias: True, False, or the config's key that says whether there is one.
        order: ``q`` or ``k``: paired rows; ``groups``: fused rows of KV groups to be sorted.
        plus: added to the weight.
        transposed: stored as (in, out).
        matrix: may be quantized.
    """

    gguf: str
    stored: str
    shape: tuple[str, ...]
    bias: bool | str = False
    order: str = ""
    plus: float = 0.0
    transposed: bool = False
    matrix: bool = True


@dataclass(frozen=True)
class ConfigRule:
    """A key of the config, and the values that llama.cpp's code agrees with.

    Attributes:
        allowed: None: any number.
        default: what transformers takes where the key is missing; a config made from a file says it too.
    """

    key: str
    allowed: tuple[Any, ...] | None
    default: Any


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A family of models.

    Attributes:
        family: its ``model_type``.
        written: ``general.architecture``.
        model_class: its causal language model in transformers.
        prefix: of all stored names but the head's.
        outer: parts outside the blocks; blocks: parts of a block.
        head: ``output.weight`` is ``optional`` (left out where it is the embedding), ``needed`` or ``never``.
        head_bias: the head has a bias.
        heads_stored: names of the head, the usual one first.
        layer_norm: LayerNorm, not RMSNorm.
        keys: the config's keys where they are not the usual ones.
        defaults: of transformers, where a config leaves a key out.
        rules: what the config must say.
        extras: further (key of the file, key of the config) that are copied.
        grouped: its config has a number of KV heads.
        square: heads times their width must be the hidden size.
        ropes: known kinds of rotary embedding; none: there is no rotary embedding.
        window: ``all``: every block has the sliding window; ``marked``: those that the config names; a number
            n: every block but each n-th, where the config names none; None: there is none.
        window_applied: llama.cpp applies it; window_needed: and needs a block that has it.
        scale_by_layers: blocks at which llama.cpp divides queries by the root of hidden / heads, not of the
            head's width; 0: the config has no such number (Gemma's ``query_pre_attn_scalar``).
        unturned: each n-th block has no rotary embedding; 0: all have it.
    """

    family: str
    written: str
    model_class: str
    prefix: str = "model."
    outer: tuple[ModuleMapping, ...]
    blocks: tuple[ModuleMapping, ...]
    head: str = "optional"
    head_bias: bool = False
    heads_stored: tuple[str, ...] = ("lm_head",)
    layer_norm: bool = False
    keys: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    rules: tuple[ConfigRule, ...] = ()
    extras: tuple[tuple[str, str], ...] = ()
    grouped: bool = True
    square: bool = False
    ropes: tuple[str, ...] = ROPES
    window: str | int | None = None
    window_applied: bool = False
    window_needed: bool = False
    scale_by_layers: int = 0
    unturned: int = 0

    @property
    def activation(self) -> str:
        """The config's key of the activation."""
        return next(rule.key for rule in self.rules if rule.allowed in (SILU, GELU))


USUAL = {
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head": "head_dim",
    "ff": "intermediate_size",
    "vocabulary": "vocab_size",
    "context": "max_position_embeddings",
    "epsilon": "rms_norm_eps",
}
"""The config's usual keys."""


def norm(
    gguf: str, stored: str, *, size: str = "hidden", bias: bool = False, plus: float = 0.0
) -> ModuleMapping:
    """A norm's weight."""
    return ModuleMapping(gguf, stored, (size,), bias=bias, plus=plus, matrix=False)


def attention(
    *, bias: bool | str = False, out_bias: bool | str = False, pair: bool = False, out: str = "o_proj"
) -> tuple[ModuleMapping, ...]:
    """Separate projections; ``pair``: q and k have their rows paired."""
    place, order = "blk.{}.attn_", ("q", "k", "") if pair else ("", "", "")
    into = (("q", "q"), ("k", "kv"), ("v", "kv"))
    return (
        *(
            ModuleMapping(
                f"{place}{part}", f"layers.{{}}.self_attn.{part}_proj", (size, "hidden"), bias, kind
            )
            for (part, size), kind in zip(into, order, strict=True)
        ),
        ModuleMapping(f"{place}output", f"layers.{{}}.self_attn.{out}", ("hidden", "q"), out_bias),
    )


def gated_mlp(bias: bool | str = False) -> tuple[ModuleMapping, ...]:
    """gate, up and down."""
    return (
        ModuleMapping("blk.{}.ffn_gate", "layers.{}.mlp.gate_proj", ("ff", "hidden"), bias),
        ModuleMapping("blk.{}.ffn_up", "layers.{}.mlp.up_proj", ("ff", "hidden"), bias),
        ModuleMapping("blk.{}.ffn_down", "layers.{}.mlp.down_proj", ("hidden", "ff"), bias),
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
    place = "layers.{}."
    return (
        norm("blk.{}.attn_norm", f"{place}input_layernorm", plus=plus),
        norm("blk.{}.post_attention_norm", f"{place}post_attention_layernorm", plus=plus),
        norm("blk.{}.ffn_norm", f"{place}pre_feedforward_layernorm", plus=plus),
        norm("blk.{}.post_ffw_norm", f"{place}post_feedforward_layernorm", plus=plus),
    )


def head_norms(*, q: str = "head", k: str = "head", plus: float = 0.0) -> tuple[ModuleMapping, ...]:
    """Norms of queries and keys."""
    return (
        norm("blk.{}.attn_q_norm", "layers.{}.self_attn.q_norm", size=q, plus=plus),
        norm("blk.{}.attn_k_norm", "layers.{}.self_attn.k_norm", size=k, plus=plus),
    )
