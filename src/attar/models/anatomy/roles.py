"""Roles of the modules in a block, by their names and classes; and the config's numbers, which must agree."""

from __future__ import annotations

import itertools
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from attar.errors import ModelError
from attar.models.anatomy.parts import Projection

HINT = "attar takes apart transformers with self-attention and a dense MLP or experts in each block"

# Endings of module paths. The longest that fits wins, so "output.dense" is tried before "dense".
ATTENTION_ROLES = {
    "q": ("q_proj", "query", "q_lin", "wq", "query_proj", "q"),
    "k": ("k_proj", "key", "k_lin", "wk", "key_proj", "k"),
    "v": ("v_proj", "value", "v_lin", "wv", "value_proj", "v"),
    "qkv": ("qkv_proj", "c_attn", "query_key_value", "Wqkv", "qkv"),
    "q_a": ("q_a_proj",),
    "q_b": ("q_b_proj",),
    "kv_a": ("kv_a_proj_with_mqa",),
    "kv_b": ("kv_b_proj",),
    "o_a": ("o_a_proj",),
    "o_b": ("o_b_proj",),
    "o": ("o_proj", "out_proj", "out_lin", "c_proj", "dense", "wo", "Wo", "o"),
}
MLP_ROLES = {
    "gate": ("gate_proj", "w1"),
    "up": ("up_proj", "fc1", "c_fc", "dense_h_to_4h", "intermediate.dense", "lin1", "w3", "fc_in"),
    "gate_up": ("gate_up_proj", "Wi", "shared_mlp.input_linear"),
    "down": (
        *("down_proj", "fc2", "c_proj", "dense_4h_to_h", "output.dense", "lin2", "w2", "fc_out", "Wo"),
        "shared_mlp.output_linear",
    ),
}

# Fused weights in which q, k and v of one KV group are adjacent, group after group (GPT-NeoX, BLOOM,
# Falcon). Any other fused weight holds all of q, then all of k, then all of v (Phi-3, GPT-2).
ALTERNATING = ("query_key_value",)


def in_attention(path: str) -> bool:
    """Whether a path inside a block goes through self-attention (cross-attention is not meant)."""
    steps = path.lower().split(".")
    return any(("attn" in step or "attention" in step) and "cross" not in step for step in steps[:-1])


def in_cross_attention(path: str) -> bool:
    """Whether a path inside a block belongs to attention over another sequence."""
    return any("cross" in step.lower() for step in path.split("."))


def role_of(path: str) -> str | None:
    """Role of the module at ``path`` inside its block, or None for an unknown name."""
    if in_cross_attention(path):
        return None
    table = ATTENTION_ROLES if in_attention(path) else MLP_ROLES
    fits = [
        (len(ending), role)
        for role, endings in table.items()
        for ending in endings
        if path == ending or path.endswith("." + ending)
    ]
    return max(fits)[1] if fits else None


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a matrix applied to its input: Linear or Conv1D."""
    return isinstance(module, (nn.Linear, Conv1D))


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm, by its class name (every family brings its own RMSNorm)."""
    return "norm" in type(module).__name__.lower()


def measure(path: str, module: nn.Module) -> Projection:
    """A projection that has a module to itself."""
    conv = isinstance(module, Conv1D)
    rows, columns = reversed(module.weight.shape) if conv else module.weight.shape
    return Projection(path, "conv1d" if conv else "linear", rows, columns)


def agree(config: Any, key: str, count: int, what: str) -> None:
    """Raise where the config's number for ``key`` is not the model's."""
    configured = getattr(config, key, None)
    if isinstance(configured, int) and configured != count:
        raise ModelError(
            f"{config.model_type}: {what.format(count)}, but the config's {key} is {configured}", hint=HINT
        )


def common_parent(first: str, second: str) -> str:
    """Path of the innermost module that holds both."""
    steps = zip(first.split("."), second.split("."), strict=False)
    return ".".join(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], steps))
