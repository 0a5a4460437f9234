"""Bounds of the numbers in config.json: what is outside them is refused by its key, before anything of that
size is built.

A key may be missing, and null where its family has a default for it. Numbers are checked at the top and in
``text_config``; rotary parameters at any depth.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from attar.checkpoint.oddities import Oddity, oddity

LAYERS, WIDTH, COUNT, EXPERTS, ROWS, CONTEXT = 10_000, 1 << 24, 1 << 16, 1 << 14, 1 << 27, 1 << 28

NEEDED: dict[str, tuple[int, int]] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), (1, LAYERS)),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim"), (1, WIDTH)),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), (1, COUNT)),
    "vocab_size": (1, ROWS),
}
"""Least and most of whole numbers that no model can do without."""

OPTIONAL: dict[str, tuple[int, int]] = {
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "multi_query_group_num"), (1, COUNT)),
    **dict.fromkeys(("head_dim", "kv_channels", "intermediate_size", "ffn_dim", "n_inner"), (1, WIDTH)),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), (0, WIDTH)),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim"), (0, WIDTH)),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), (0, EXPERTS)),
    **dict.fromkeys(("num_experts_per_tok", "n_shared_experts"), (0, EXPERTS)),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "n_ctx"),
        (1, CONTEXT),
    ),
    "sliding_window": (-1, 1 << 31),
}
"""Of whole numbers that may be null."""

REALS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps"), (0.0, 1.0)),
    **dict.fromkeys(("rope_theta", "rotary_emb_base", "query_pre_attn_scalar"), (0.0, 1e15)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), (0.0, 1e9)),
    **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
                    (0.0, 1e9)),
}  # fmt: skip
"""Of real numbers, above the first and up to the second; null where the family has a default."""

ROPE = ("rope_scaling", "rope_parameters")
FLAGS = ("tie_word_embeddings", "attention_bias", "mlp_bias", "qkv_bias", "use_bias", "use_sliding_window")
LISTS = ("intermediate_size", "num_key_value_heads", "num_attention_heads", "ffn_dim", "num_kv_heads")
"""Numbers that some families have for each layer."""
TYPES = ("dtype", "torch_dtype")
FLOATS = ("float32", "float16", "bfloat16", "float64", "float8_e4m3fn", "float8_e5m2", "auto")
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id")


def odd_number(config: Mapping[str, Any]) -> Oddity | None:
    """The first number of a config that is none, or outside its bounds; None where all are right."""
    text = config.get("text_config")
    parts = [("", config)] + ([("text_config.", text)] if isinstance(text, Mapping) else [])
    if text is not None and not isinstance(text, Mapping):
        return _odd("text_config", text, "a mapping")
    return next((odd for prefix, part in parts for odd in _odd_ones(prefix, part)), None)


def _odd_ones(prefix: str, config: Mapping[str, Any]) -> Iterator[Oddity]:
    for bounds, null in ((NEEDED, False), (OPTIONAL, True)):
        for key, (least, most) in bounds.items():
            if key in config and not _integer(key, config[key], least, most, null):
                yield _odd(prefix + key, config[key], f"a whole number from {least} to {most}")
    for key, (above, upto) in REALS.items():
        if key in config and not (config[key] is None or _real(config[key], above, upto)):
            yield _odd(prefix + key, config[key], f"a number above {above:g}, up to {upto:g}")
    for key in FLAGS:
        if config.get(key) is not None and not isinstance(config[key], bool):
            yield _odd(prefix + key, config[key], "true or false")
    for key in TYPES:
        name = config.get(key)
        if name is not None and not (isinstance(name, str) and name.removeprefix("torch.") in FLOATS):
            yield _odd(prefix + key, name, ", ".join(FLOATS[:-1]) + f" or {FLOATS[-1]}")
    if not isinstance(config.get("quantization_config"), Mapping | None):
        yield _odd(prefix + "quantization_config", config["quantization_config"], "a mapping")
    for key in TOKENS:
        if key in config and not _token(config[key]):
            yield _odd(prefix + key, config[key], "the number of a token, or several in a list")
    for key in ROPE:
        yield from _odd_rope(prefix + key, config.get(key))


def _odd_rope(key: str, rope: Any) -> Iterator[Oddity]:
    """Of rotary parameters, which some families have by type of layer."""
    if rope is None:
        return
    if not isinstance(rope, Mapping):
        yield _odd(key, rope, "a mapping, or null")
        return
    for name, value in rope.items():
        if isinstance(value, Mapping):
            yield from _odd_rope(f"{key}.{name}", value)
        elif name in REALS and not _real(value, *REALS[name]):
            yield _odd(f"{key}.{name}", value, f"a number above {REALS[name][0]:g}, up to {REALS[name][1]:g}")
        elif name in ("type", "rope_type") and not isinstance(value, str):
            yield _odd(f"{key}.{name}", value, "the name of a kind of rotary embedding")


def _integer(key: str, value: Any, least: int, most: int, null: bool) -> bool:
    if isinstance(value, list) and value and key in LISTS:
        return all(_integer("", element, 0, most, False) for element in value)
    return (value is None and null) or (type(value) is int and least <= value <= most)


def _real(value: Any, above: float, upto: float) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and above < value <= upto


def _token(value: Any) -> bool:
    values = value if isinstance(value, list) else [value]
    return all(token is None or (type(token) is int and -1 <= token < 1 << 31) for token in values)


def _odd(key: str, value: Any, allowed: str) -> Oddity:
    text = repr(value)
    return oddity("number", key=key, value=text if len(text) <= 40 else f"{text[:40]}...", allowed=allowed)
