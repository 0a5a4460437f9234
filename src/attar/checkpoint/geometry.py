"""A model's geometry from ``config.json``: layers, heads, context, and the size of its KV cache.

Families use different keys for the same number. A number that the config does not state is None.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_KEYS: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "multi_query_group_num"),
    "head_dim": ("head_dim", "kv_channels"),
    "vocabulary": ("vocab_size",),
    "context": ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "n_ctx"),
}
_WITHOUT_CACHE = ("linear", "mamba", "conv", "recurrent", "ssm")
_CAUSAL = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}


@dataclass(frozen=True)
class ModelGeometry:
    """Sizes in elements, context in tokens.

    Attributes:
        causal: whether the architecture generates text, and so has a KV cache.
        kv_bytes_per_token: bytes of keys and values of one token in all layers; None for encoders.
        sliding_layers: layers that attend to the last ``window`` tokens only.
    """

    causal: bool
    layers: int | None
    hidden: int | None
    heads: int | None
    kv_heads: int | None
    head_dim: int | None
    vocabulary: int | None
    context: int | None
    kv_bytes_per_token: int | None
    sliding_layers: int
    window: int | None


def geometry(config: dict[str, Any], dtype: str) -> ModelGeometry:
    """The geometry of a model.

    Args:
        config: content of ``config.json``; of a multimodal model, ``text_config`` is read.
        dtype: torch's name of the KV cache's type, such as ``"bfloat16"``.
    """
    text = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    numbers = {name: _number(text, keys) for name, keys in _KEYS.items()}
    heads, hidden = numbers["heads"], numbers["hidden"]
    if numbers["kv_heads"] is None:
        numbers["kv_heads"] = 1 if text.get("multi_query") else heads
    if numbers["head_dim"] is None and heads and hidden:
        numbers["head_dim"] = hidden // heads
    causal = any(str(name).endswith(_CAUSAL) for name in config.get("architectures") or [])
    kinds = _layer_types(text)
    complete = causal and all(numbers[name] for name in ("layers", "kv_heads", "head_dim"))
    window = _number(text, ("sliding_window",))
    return ModelGeometry(
        causal=causal,
        kv_bytes_per_token=_kv_elements(text, numbers, kinds) * _BYTES.get(dtype, 2) if complete else None,
        sliding_layers=_sliding(text, numbers["layers"] or 0, kinds) if window else 0,
        window=window,
        **numbers,
    )


def _sliding(text: dict[str, Any], layers: int, kinds: list[str]) -> int:
    """Layers with a sliding window: by ``layer_types``, or all of a config that has a window alone."""
    if kinds:
        return sum("sliding" in kind for kind in kinds)
    return layers if text.get("use_sliding_window", True) else 0


def _kv_elements(text: dict[str, Any], numbers: dict[str, int | None], kinds: list[str]) -> int:
    """Elements of keys and values of one token."""
    layers = numbers["layers"] or 0
    if kinds:
        layers = sum(not kind.startswith(_WITHOUT_CACHE) for kind in kinds)
    layers -= _number(text, ("num_kv_shared_layers",)) or 0
    latent = _number(text, ("kv_lora_rank",))
    if latent:  # multi-head latent attention keeps one compressed vector and one rotary key
        return layers * (latent + (_number(text, ("qk_rope_head_dim",)) or 0))
    return 2 * layers * (numbers["kv_heads"] or 0) * (numbers["head_dim"] or 0)


def _layer_types(text: dict[str, Any]) -> list[str]:
    kinds = text.get("layer_types")
    return [str(kind) for kind in kinds] if isinstance(kinds, list) else []


def _number(text: dict[str, Any], keys: tuple[str, ...]) -> int | None:
    """The first of these keys that holds a whole number."""
    for key in keys:
        value = text.get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None
