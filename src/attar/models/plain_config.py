"""The config of a Llama-shaped model, read from config.json without transformers.

The compiled step needs twenty numbers of a config, and importing transformers to read them takes longer than
loading a small model. A config is read here only where its numbers mean what they say: a known family, every
field that the step uses written out, one rotary embedding of a known type. For all others the answer is None,
and :func:`attar.models.configs.load_config` asks transformers, which knows defaults and refuses nonsense.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2")
GEMMA = ("gemma", "gemma2")
ROPE_TYPES = ("default", "linear", "llama3")
_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "vocab_size",
)
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True, kw_only=True)
class PlainConfig:
    """The fields of a transformers config that the compiled step reads, by the same names."""

    model_type: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int
    vocab_size: int
    head_dim: int
    rms_norm_eps: float
    hidden_act: str
    rope_parameters: dict[str, Any]
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    query_pre_attn_scalar: float | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None


def plain_config(config: Mapping[str, Any]) -> PlainConfig | None:
    """The config, or None where transformers must read it.

    Args:
        config: content of config.json.
    """
    kind = config.get("model_type")
    activation = config.get("hidden_activation" if kind in GEMMA else "hidden_act")
    rope, head_dim, layers = _rope(config), _head_dim(config), _layers(config)
    sizes = {name: config.get(name) for name in _SIZES}
    numbers = (*sizes.values(), head_dim)
    if kind not in FAMILIES or not all(type(each) is int and each > 0 for each in numbers):
        return None
    if rope is None or layers is None or type(activation) is not str or not _positive(config, "rms_norm_eps"):
        return None
    assert head_dim is not None
    return PlainConfig(
        model_type=str(kind),
        head_dim=head_dim,
        rms_norm_eps=config["rms_norm_eps"],
        hidden_act=activation,
        rope_parameters=rope,
        **sizes,  # type: ignore[arg-type]
        **layers,
    )


def _head_dim(config: Mapping[str, Any]) -> int | None:
    """Of each head. Families other than these two have a default of their own."""
    if config.get("head_dim") is None and config.get("model_type") in ("llama", "qwen2", "mistral"):
        width, heads = config.get("hidden_size"), config.get("num_attention_heads")
        return width // heads if type(width) is int and type(heads) is int and heads > 0 else None
    return config.get("head_dim")


def _rope(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Rotary parameters in one dictionary; None where they are none of ROPE_TYPES, or incomplete."""
    stored = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(stored, Mapping) or config.get("partial_rotary_factor") is not None:
        return None
    kind = stored.get("rope_type", stored.get("type", "default"))
    rope = {"rope_theta": config.get("rope_theta"), **stored, "rope_type": kind}
    needed = {"default": (), "linear": ("factor",), "llama3": _LLAMA3}
    if kind not in ROPE_TYPES or "partial_rotary_factor" in rope:
        return None
    return rope if all(_positive(rope, name) for name in ("rope_theta", *needed[kind])) else None


def _layers(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """What tells layers apart, and Gemma 2's numbers; None where something is left to a default."""
    kind, types = config.get("model_type"), config.get("layer_types")
    if kind == "gemma2":
        names = (
            "sliding_window",
            "query_pre_attn_scalar",
            "attn_logit_softcapping",
            "final_logit_softcapping",
        )
        if types is None or any(name not in config for name in names):
            return None
        return {"layer_types": types, **{name: config[name] for name in names}}
    if kind == "mistral":
        whole = types is None and "sliding_window" in config
        return {"sliding_window": config["sliding_window"]} if whole else None
    sliding = config.get("use_sliding_window") or any(each != "full_attention" for each in types or ())
    return None if sliding else {}


def _positive(values: Mapping[str, Any], name: str) -> bool:
    return type(values.get(name)) in (int, float) and values[name] > 0
