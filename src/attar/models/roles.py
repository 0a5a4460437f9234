"""Which projection a module is: its role, read from the path inside the block.

A path that goes through something called attention (``self_attn``, ``attn``, ``attention``) is looked up
among the attention roles, any other among the MLP roles. Names only propose; :mod:`attar.models.blocks`
checks the shapes.
"""

from __future__ import annotations

# Endings of module paths. The longest that fits wins, so "output.dense" is tried before "dense".
ATTENTION_ROLES = {
    "q": ("q_proj", "query", "q_lin", "wq", "query_proj", "q"),
    "k": ("k_proj", "key", "k_lin", "wk", "key_proj", "k"),
    "v": ("v_proj", "value", "v_lin", "wv", "value_proj", "v"),
    "qkv": ("qkv_proj", "c_attn", "query_key_value", "Wqkv", "qkv"),
    "o": ("o_proj", "out_proj", "out_lin", "c_proj", "dense", "wo", "Wo", "o"),
}
MLP_ROLES = {
    "gate": ("gate_proj", "w1"),
    "up": ("up_proj", "fc1", "c_fc", "dense_h_to_4h", "intermediate.dense", "lin1", "w3", "fc_in"),
    "gate_up": ("gate_up_proj", "Wi"),
    "down": ("down_proj", "fc2", "c_proj", "dense_4h_to_h", "output.dense", "lin2", "w2", "fc_out", "Wo"),
}

# Fused weights in which q, k and v of one KV group stand together, group after group (GPT-NeoX, BLOOM,
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
    """Role of the module at ``path`` inside its block, or None when the name says nothing."""
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
