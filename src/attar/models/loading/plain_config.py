"""The config of a Llama-shaped model, and its tensors, read from config.json without transformers.

The compiled step needs twenty numbers of a config, and importing transformers to read them takes longer than
loading a small model. A config is read here only where its numbers mean what they say: a known family, every
field that the step uses written out, one rotary embedding of a known type. For all others the answer is None,
and :func:`attar.models.loading.configs.load_config` asks transformers, which knows defaults and refuses
nonsense.
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

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
}
HEAD = "lm_head.weight"


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
    """The config, or None where transformers must read it."""
    kind = config.get("model_type")
    activation = config.get("hidden_activation" if kind in GEMMA else "hidden_act")
    rope, head_dim, layers = _rope(config), _head_dim(config), _layers(config)
    sizes = {name: config.get(name) for name in _SIZES}
    numbers = (*sizes.values(), head_dim)
    if kind not in FAMILIES or not all(type(number) is int and number > 0 for number in numbers):
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
    """Width of a head. Other families have a default of their own."""
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
    """Fields that differ by layer, and Gemma 2's numbers; None where a field is left to its default."""
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
        complete = types is None and "sliding_window" in config
        return {"sliding_window": config["sliding_window"]} if complete else None
    sliding = config.get("use_sliding_window") or any(layer != "full_attention" for layer in types or ())
    return None if sliding else {}


def _positive(values: Mapping[str, Any], name: str) -> bool:
    return type(values.get(name)) in (int, float) and values[name] > 0


def plain_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]] | None:
    """Shape of every tensor of the model with its head, by its stored name; None where transformers must
    compute it.

    A tied head is one of them. Rows are outputs, as in ``nn.Linear``.
    """
    plain, width = plain_config(config), config.get("intermediate_size")
    if plain is None or type(width) is not int or width < 1 or not _builds(config, plain):
        return None
    layer = {**_linears(config, plain, width), **_norms(plain)}
    shapes: dict[str, tuple[int, ...]] = {
        f"model.layers.{index}.{name}": shape
        for index in range(plain.num_hidden_layers)
        for name, shape in layer.items()
    }
    table = (plain.vocab_size, plain.hidden_size)
    shapes |= {"model.embed_tokens.weight": table, "model.norm.weight": (plain.hidden_size,), HEAD: table}
    return shapes


def _builds(config: Mapping[str, Any], plain: PlainConfig) -> bool:
    """Whether transformers makes a model of this config without complaint."""
    pad = config.get("pad_token_id")
    return (
        config.get("architectures") == [_CLASSES[plain.model_type]]
        and plain.hidden_size % plain.num_attention_heads == 0
        and plain.num_attention_heads % plain.num_key_value_heads == 0
        and plain.hidden_act in ("silu", "gelu", "gelu_pytorch_tanh")
        and (pad is None or (type(pad) is int and 0 <= pad < plain.vocab_size))
    )


def _linears(config: Mapping[str, Any], plain: PlainConfig, width: int) -> dict[str, tuple[int, ...]]:
    """Weights and biases of a layer's Linears."""
    kind, hidden = plain.model_type, plain.hidden_size
    query = plain.num_attention_heads * plain.head_dim
    key = plain.num_key_value_heads * plain.head_dim
    attention = {"q": (query, hidden), "k": (key, hidden), "v": (key, hidden), "o": (hidden, query)}
    mlp = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    biased = config.get("attention_bias") and kind not in ("mistral", "qwen2")
    with_bias = [*"qkvo"] if biased else [*"qkv"] if kind == "qwen2" else []
    with_bias += [*mlp] if kind == "llama" and config.get("mlp_bias") else []
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in (attention | mlp).items():
        path = f"{'self_attn' if name in attention else 'mlp'}.{name}_proj"
        shapes[f"{path}.weight"] = shape
        if name in with_bias:
            shapes[f"{path}.bias"] = shape[:1]
    return shapes


def _norms(plain: PlainConfig) -> dict[str, tuple[int, ...]]:
    """Norms of a layer."""
    names = ["input_layernorm", "post_attention_layernorm"]
    if plain.model_type == "gemma2":
        names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    heads = ["self_attn.q_norm", "self_attn.k_norm"] if plain.model_type == "qwen3" else []
    wide: dict[str, tuple[int, ...]] = {f"{name}.weight": (plain.hidden_size,) for name in names}
    return wide | {f"{name}.weight": (plain.head_dim,) for name in heads}


def end_tokens(*sources: Any) -> tuple[int, ...]:
    """Tokens that end a completion: those of the first source that names any.

    Args:
        sources: generation config, config, tokenizer, in this order: mappings, objects or None.
    """
    for source in sources:
        mapping = isinstance(source, Mapping)
        ids = source.get("eos_token_id") if mapping else getattr(source, "eos_token_id", None)
        if ids is not None:
            return tuple(ids) if isinstance(ids, list | tuple) else (int(ids),)
    return ()
