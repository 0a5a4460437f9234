"""From a checkpoint's tensors to what the compiled step reads: names, fused rows, norms, rotary tables.

Every tensor of the checkpoint must have found its place: a layer with something that the compiled step does
not do (sinks, experts, another norm) is refused by the name of what is left over, and runs through
``modules.py``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attar.errors import ModelError
from attar.kernels.decode import LayerWeights, ModelWeights
from attar.kernels.memory import Arena
from attar.kernels.packed import Kind, Packed, pack

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3")
GEMMA = ("gemma", "gemma2", "gemma3_text")  # norms are of 1 + w, embeddings are scaled
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_tanh": "gelu_tanh"}
MOVING = ("dynamic", "longrope")  # rotary tables that change with the sequence's length


@dataclass
class Source:
    """Tensors by name, each asked for once; remembers which.

    Args:
        names: what there is.
        load: reads one.
    """

    names: frozenset[str]
    load: Callable[[str], Tensor]

    def __post_init__(self) -> None:
        self.used: list[str] = []

    def take(self, name: str) -> Tensor:
        """A tensor that must be there."""
        if name not in self.names:
            raise ModelError(f"no tensor {name!r}", hint="the compiled runner needs Llama's names")
        self.used.append(name)
        return self.load(name).detach()

    def ask(self, name: str) -> Tensor | None:
        """A tensor that may be there."""
        return self.take(name) if name in self.names else None

    def left(self) -> list[str]:
        """Names that nobody asked for."""
        used = frozenset(self.used)
        return sorted(name for name in self.names if name not in used and not name.endswith("inv_freq"))


def model_weights(
    config: Any,
    names: Iterable[str],
    load: Callable[[str], Tensor],
    *,
    weights: Kind = "bf16",
    head: Kind | None = None,
    group: int = 32,
    context: int | None = None,
) -> ModelWeights:
    """Weights for the compiled step.

    Args:
        config: of transformers.
        names: the checkpoint's tensors.
        load: reads one, dense.
        weights: what Linears become: bf16 (rounded), int8 or int4 (to nearest).
        head: the same of the head; None: as ``weights``.
        group: inputs that share a scale.
        context: rows of the rotary tables; None: the config's ``max_position_embeddings``.

    Raises:
        ModelError: the family, or something in the checkpoint, is not what the compiled step does.
    """
    _check(config)
    source, arena = Source(frozenset(names), load), Arena()
    tables = _rotary_tables(config, context or config.max_position_embeddings)
    layers = []
    for index in range(config.num_hidden_layers):
        parts = _Parts(config, source, f"model.layers.{index}.", arena, weights, group)
        layers.append(parts.layer(tables[_kind(config, index)], _window(config, index)))
    embedding = source.take("model.embed_tokens.weight")
    stored = source.ask("lm_head.weight")
    made = ModelWeights(
        embedding=embedding.to(
            torch.float32 if embedding.dtype == torch.float32 else torch.bfloat16
        ).contiguous(),
        norm=_norm(config, source.take("model.norm.weight")),
        head=pack(embedding if stored is None else stored, head or weights, group=group, arena=arena),
        layers=tuple(layers),
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=_head_dim(config),
        eps=config.rms_norm_eps,
        scale=(getattr(config, "query_pre_attn_scalar", None) or _head_dim(config)) ** -0.5,
        soft_cap=getattr(config, "attn_logit_softcapping", None) or 0.0,
        final_soft_cap=getattr(config, "final_logit_softcapping", None) or 0.0,
        embedding_scale=config.hidden_size**0.5 if config.model_type in GEMMA else 1.0,
        activation=ACTIVATIONS[_activation(config)],
    )
    if source.left():
        raise ModelError(f"the compiled runner has no place for {', '.join(source.left()[:3])}")
    return made


@dataclass
class _Parts:
    """One layer's tensors."""

    config: Any
    source: Source
    prefix: str
    arena: Arena
    kind: Kind
    group: int

    def layer(self, rotary: Tensor, window: int) -> LayerWeights:
        gemma = self._ask("pre_feedforward_layernorm") is not None
        return LayerWeights(
            before_attention=self._norm("input_layernorm"),
            before_mlp=self._norm("pre_feedforward_layernorm" if gemma else "post_attention_layernorm"),
            after_attention=self._norm("post_attention_layernorm") if gemma else None,
            after_mlp=self._norm("post_feedforward_layernorm") if gemma else None,
            query_norm=self._maybe_norm("self_attn.q_norm"),
            key_norm=self._maybe_norm("self_attn.k_norm"),
            qkv=self._product("self_attn.", ("q_proj", "k_proj", "v_proj"), "qkv_proj"),
            out=self._product("self_attn.", ("o_proj",)),
            gate_up=self._product("mlp.", ("gate_proj", "up_proj"), "gate_up_proj"),
            down=self._product("mlp.", ("down_proj",)),
            rotary=rotary,
            window=window,
        )

    def _ask(self, name: str) -> Tensor | None:
        return self.source.ask(f"{self.prefix}{name}.weight")

    def _norm(self, name: str) -> Tensor:
        return _norm(self.config, self.source.take(f"{self.prefix}{name}.weight"))

    def _maybe_norm(self, name: str) -> Tensor | None:
        found = self._ask(name)
        return None if found is None else _norm(self.config, found)

    def _product(self, room: str, names: tuple[str, ...], fused: str = "") -> Packed:
        """Several Linears with the same inputs as one."""
        if fused and f"{self.prefix}{room}{fused}.weight" in self.source.names:
            names = (fused,)
        weights = [self.source.take(f"{self.prefix}{room}{name}.weight") for name in names]
        biases = [self.source.ask(f"{self.prefix}{room}{name}.bias") for name in names]
        given = [bias for bias in biases if bias is not None]
        if 0 < len(given) < len(names):
            rows = zip(weights, biases, strict=True)
            given = [torch.zeros(len(weight)) if bias is None else bias.float() for weight, bias in rows]
        bias = torch.cat(given) if given else None
        return pack(torch.cat(weights), self.kind, group=self.group, bias=bias, arena=self.arena)


def _check(config: Any) -> None:
    """Raises ModelError where the config asks for what the step does not do."""
    if config.model_type not in FAMILIES:
        raise ModelError(f"the compiled runner does not run {config.model_type}", hint=f"it runs {FAMILIES}")
    if _activation(config) not in ACTIVATIONS:
        raise ModelError(f"the compiled runner has no activation {_activation(config)!r}")
    if config.hidden_size % 16:
        raise ModelError(f"hidden_size is {config.hidden_size}, the compiled runner takes multiples of 16")
    for kind, told in _rope(config).items():
        if told.get("rope_type", "default") in MOVING:
            raise ModelError(f"the compiled runner has no rotary embedding {told['rope_type']!r} ({kind})")


def _activation(config: Any) -> str:
    return str(getattr(config, "hidden_activation", None) or config.hidden_act)


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _norm(config: Any, weight: Tensor) -> Tensor:
    """float32, Gemma's 1 added."""
    return (weight.float() + 1.0 if config.model_type in GEMMA else weight.float()).contiguous()


def _kind(config: Any, index: int) -> str:
    """The layer's type, of which the rotary table depends."""
    types = getattr(config, "layer_types", None)
    return types[index] if types else "full_attention"


def _window(config: Any, index: int) -> int:
    """Keys that a token sees; 0: all."""
    if getattr(config, "layer_types", None) and _kind(config, index) != "sliding_attention":
        return 0
    return getattr(config, "sliding_window", None) or 0


def _rope(config: Any) -> dict[str, dict[str, Any]]:
    """Rotary parameters by type of layer."""
    told = config.rope_parameters
    return told if all(isinstance(value, dict) for value in told.values()) else {"full_attention": told}


def _rotary_tables(config: Any, context: int) -> dict[str, Tensor]:
    """Float32 (context, rotated dimensions) by type of layer, from the family's own module."""
    modeling = importlib.import_module(type(config).__module__.replace("configuration_", "modeling_"))
    name = next(name for name in sorted(vars(modeling)) if name.endswith("RotaryEmbedding"))
    module, tables = getattr(modeling, name)(config), {}
    kinds = dict.fromkeys(_kind(config, index) for index in range(config.num_hidden_layers))
    several = "full_attention" not in _rope(config) or len(_rope(config)) > 1
    for kind in kinds:
        given = (kind,) if several else ()
        cosines, sines = module(torch.zeros(1), torch.arange(context)[None], *given)
        half = cosines.shape[-1] // 2
        tables[kind] = torch.cat([cosines[0, :, :half], sines[0, :, :half]], dim=1).contiguous()
    return tables
