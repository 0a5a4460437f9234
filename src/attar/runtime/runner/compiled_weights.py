"""From a checkpoint's tensors to what the compiled step reads: names, fused rows, norms, rotary tables.

The codes of a quantized checkpoint are kept (codes.py). Where the parts of a fused weight have layouts that
no kernel joins, and where a weight is no grid of integers (FP8, NF4), it is kept in bfloat16. So are
embeddings, unless the model is float32.

Mixtures of experts are read by expert_weights.py, latent attention by latent_weights.py, short convolutions
by convolution_weights.py, recurrences by recurrent_weights.py.

Every tensor of the checkpoint must be used: a layer with a part that the compiled step does not support
(another norm, a layer of another kind) is refused by the name of the unused tensor, and runs through
``modules.py``. Layers behind the last, which predict further tokens (GLM-4 MoE), are left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from attar.errors import ModelError
from attar.kernels.decode import LayerWeights, ModelWeights
from attar.kernels.experts import MixtureWeights
from attar.kernels.memory import Arena
from attar.kernels.packed import Kind, Pays, pack, scaled
from attar.runtime.runner import convolution_weights, expert_weights, latent_weights, recurrent_weights
from attar.runtime.runner.codes import PackedCodes, fused
from attar.runtime.runner.step_config import layer_kind, rope, rotary_tables

DENSE = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3")
_OTHERS = (expert_weights, latent_weights, convolution_weights, recurrent_weights)
FAMILIES = tuple(dict.fromkeys((*DENSE, *(family for module in _OTHERS for family in module.FAMILIES))))
GEMMA = ("gemma", "gemma2", "gemma3_text")  # embeddings are scaled
CENTRED = (*GEMMA, *recurrent_weights.DELTA)  # norms are of 1 + w
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_tanh": "gelu_tanh"}
ACTIVATIONS |= {"swiglu 7.0 1.702": "clamped_swiglu", "relu2 without a gate": "relu"}
CAPPED_SCORES, CAPPED_LOGITS = ("gemma2",), ("gemma2", "gemma3_text")
"""Families that transformers computes with soft caps; others may have the keys in their config."""
SINKS = "self_attn.sinks"
HEAD_NORMS = {"query_norm": "self_attn.q_norm", "key_norm": "self_attn.k_norm"}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
MOVING = ("dynamic", "longrope")  # rotary tables that change with the sequence's length


class WeightPacker(Protocol):
    """Makes what a runner multiplies by: a weight of its kind, with ``rows``, ``columns`` and ``nbytes``."""

    def codes(self, weight: PackedCodes, bias: Tensor | None, *, sparse: bool) -> Any:
        """Of codes, which are kept; bias (N,). ``sparse``: a 2:4 weight may be kept as such."""
        ...

    def dense(self, weight: Tensor, bias: Tensor | None, *, sparse: bool) -> Any:
        """Of a dense matrix (N, K)."""
        ...

    def unrounded(self, weight: Tensor) -> Any:
        """Of a dense matrix (N, K) that is not rounded, whatever others are."""
        ...

    def stack(self, experts: tuple[Any, ...]) -> Any:
        """Of the experts of a layer."""
        ...

    def mixture(self, weights: MixtureWeights) -> MixtureWeights:
        """A layer's mixture as the runner has it."""
        ...


@dataclass(frozen=True)
class PanelPacker:
    """Panels of the compiled step (kernels/packed.py): dense matrices in one kind, with a scale for ``group``
    inputs."""

    kind: Kind
    group: int
    arena: Arena
    pays: Pays | None

    def codes(self, weight: PackedCodes, bias: Tensor | None, *, sparse: bool) -> Any:
        return weight.pack(bias, self.arena, self.pays if sparse else None)

    def dense(self, weight: Tensor, bias: Tensor | None, *, sparse: bool) -> Any:
        pays = self.pays if sparse else None
        return pack(weight, self.kind, group=self.group, bias=bias, arena=self.arena, pays=pays)

    def unrounded(self, weight: Tensor) -> Any:
        return pack(weight, "bf16", arena=self.arena)

    def stack(self, experts: tuple[Any, ...]) -> Any:
        return experts

    def mixture(self, weights: MixtureWeights) -> MixtureWeights:
        return weights


@dataclass
class TensorSource:
    """Tensors by name, with a record of which were used.

    Args:
        coded: reads the codes of a tensor; None where it has none.
        coded_experts: reads those of each expert of a stack; likewise.
    """

    names: frozenset[str]
    load: Callable[[str], Tensor]
    coded: Callable[[str], PackedCodes | None] = lambda name: None
    coded_experts: Callable[[str], list[PackedCodes] | None] = lambda name: None

    def __post_init__(self) -> None:
        self.used: list[str] = []

    def required(self, name: str) -> Tensor:
        """A tensor that must exist."""
        if name not in self.names:
            raise ModelError(f"no tensor {name!r}", hint="the compiled runner needs Llama's names")
        self.used.append(name)
        return self.load(name).detach()

    def codes(self, names: Sequence[str]) -> list[PackedCodes] | None:
        """Several weights as codes; None where one has none."""
        parts = [self.coded(name) if name in self.names else None for name in names]
        codes = [part for part in parts if part is not None]
        if len(codes) < len(names):
            return None
        for name, part in zip(names, codes, strict=True):
            if part.order is not None:
                raise ModelError(f"{name} is in act-order, which the compiled runner does not sort")
        self.used += names
        return codes

    def expert_codes(self, name: str) -> list[PackedCodes] | None:
        """Each expert of a stack as codes; None where it has none."""
        codes = self.coded_experts(name) if name in self.names else None
        self.used += [name] if codes else []
        return codes

    def optional(self, name: str) -> Tensor | None:
        """A tensor that may exist."""
        return self.required(name) if name in self.names else None

    def unused(self) -> list[str]:
        """Names of tensors that were not used."""
        used = frozenset(self.used)
        return sorted(name for name in self.names if name not in used and not name.endswith("inv_freq"))


def model_weights(
    config: Any,
    names: Iterable[str],
    load: Callable[[str], Tensor],
    coded: Callable[[str], PackedCodes | None] = lambda name: None,
    *,
    coded_experts: Callable[[str], list[PackedCodes] | None] = lambda name: None,
    weights: Kind = "bf16",
    head: Kind | None = None,
    group: int = 32,
    context: int | None = None,
    embedding: torch.dtype | None = None,
    pays: Pays | None = None,
    packer: WeightPacker | None = None,
) -> ModelWeights:
    """Weights for the compiled step, or with a packer for another runner.

    Args:
        names: the checkpoint's tensors.
        load: reads one, dense.
        coded: reads the codes of one, which are kept; None where it has none.
        coded_experts: reads those of each expert of a stack; likewise.
        weights: what other Linears become: bf16 (rounded), int8 or int4 (to nearest).
        head: the same of the head; None: as ``weights``.
        group: inputs that share a scale.
        context: rows of the rotary tables; None: the config's ``max_position_embeddings``.
        embedding: float16, bfloat16 or float32; None: float32 where it is stored so, else bfloat16.
        pays: whether 2:4 weights are packed as such (sparse_choice.py); None: no.
        packer: makes the products, in place of ``weights``, ``head``, ``group`` and ``pays``.

    Raises:
        ModelError: the family, or a part of the checkpoint, is not supported by the compiled step.
    """
    check_config(config)
    behind = f"model.layers.{config.num_hidden_layers}."
    ahead = config.model_type in expert_weights.PREDICTING_AHEAD
    known = frozenset(name for name in names if not (ahead and name.startswith(behind)))
    source, arena = _source(config, known, load, coded, coded_experts), Arena()
    of_layers = packer or PanelPacker(weights, group, arena, pays)
    of_head = packer or PanelPacker(head or weights, group, arena, pays)
    tables = {} if _positionless(config) else rotary_tables(config, context or config.max_position_embeddings)
    latent = latent_weights.latent_shape(config)
    layers = []
    for index in range(config.num_hidden_layers):
        tensors = _LayerTensors(config, source, f"model.layers.{index}.", of_layers)
        layers.append(tensors.layer(tables.get(layer_kind(config, index)), _window(config, index)))
    table, factors = source.required(EMBEDDING), recurrent_weights.multipliers(config)
    keep_float32 = table.dtype == torch.float32 and embedding is None
    model = ModelWeights(
        embedding=table.to(torch.float32 if keep_float32 else embedding or torch.bfloat16).contiguous(),
        norm=_norm(config, source.required("model.norm.weight")),
        head=scaled(_head(source, table, of_head), factors.head),
        layers=tuple(layers),
        heads=getattr(config, "num_attention_heads", 1),
        kv_heads=1 if latent else getattr(config, "num_key_value_heads", 1),
        head_dim=_head_dim(config),
        eps=_eps(config),
        scale=_scale(config),
        soft_cap=_of(config, CAPPED_SCORES, "attn_logit_softcapping"),
        final_soft_cap=_of(config, CAPPED_LOGITS, "final_logit_softcapping"),
        embedding_scale=config.hidden_size**0.5 if config.model_type in GEMMA else factors.embedding,
        activation=ACTIVATIONS[_activation(config)],
        wide_norms=config.model_type in expert_weights.WIDE_NORMS,
        latent=latent,
    )
    if source.unused():
        raise ModelError(f"the compiled runner has no place for {', '.join(source.unused()[:3])}")
    return model


def _source(config: Any, names: frozenset[str], *readers: Callable[[str], Any]) -> TensorSource:
    """Tensors by Llama's names, whatever the family calls them."""
    convolutions = config.model_type in convolution_weights.FAMILIES
    patterns = convolution_weights.NAMES if convolutions else recurrent_weights.names(config)
    if not patterns:
        return TensorSource(names, *readers)
    stored = {llama_name(name, patterns): name for name in names}

    def renamed(read: Callable[[str], Any]) -> Callable[[str], Any]:
        return lambda name: read(stored[name])

    return TensorSource(frozenset(stored), *map(renamed, readers))


def llama_name(name: str, patterns: Sequence[tuple[str, str]]) -> str:
    """The name that Llama has for a tensor: by the first pattern that it has."""
    for pattern, replacement in patterns:
        name, count = re.subn(pattern, replacement, name)
        if count:
            return name
    return name


def _positionless(config: Any) -> bool:
    """Whether attention has no positions, or there is none."""
    granite = config.model_type in recurrent_weights.GRANITE and config.position_embedding_type != "rope"
    return granite or config.model_type in (*recurrent_weights.ALONE, *recurrent_weights.NEMOTRON)


def _eps(config: Any) -> float:
    """Of the norms."""
    convolutions = config.model_type in convolution_weights.FAMILIES
    return float(config.norm_eps) if convolutions else recurrent_weights.eps(config)


def _of(config: Any, families: Sequence[str], key: str) -> float:
    """A number of the config, in these families; 0 elsewhere, and where it is null."""
    return float(getattr(config, key, None) or 0.0) if config.model_type in families else 0.0


@dataclass
class _LayerTensors:
    """One layer's tensors."""

    config: Any
    source: TensorSource
    prefix: str
    packer: WeightPacker

    def layer(self, rotary: Tensor | None, window: int) -> LayerWeights:
        gemma = self._optional("pre_feedforward_layernorm") is not None
        sinks = self.tensor(SINKS).float().contiguous() if self.config.model_type == "gpt_oss" else None
        mixers, mlp = self._mixers(rotary, window), self._mlp(gemma=gemma)
        return LayerWeights(
            before_attention=self._norm("input_layernorm") if mixers else None,
            after_attention=self._norm("post_attention_layernorm") if gemma else None,
            after_mlp=self._norm("post_feedforward_layernorm") if gemma else None,
            **mixers,
            **mlp,
            sinks=sinks,
        )

    def _mlp(self, *, gemma: bool) -> dict[str, Any]:
        """The MLP, or the mixture in its place; empty where there is none."""
        if not recurrent_weights.has_mlp(self.config, self):
            return {}
        alone = self.config.model_type in recurrent_weights.NEMOTRON  # with the layer's one norm
        name = "input_layernorm" if alone else "post_attention_layernorm"
        before_mlp = self._norm("pre_feedforward_layernorm" if gemma else name)
        mixture = expert_weights.mixture_weights(self.config, self)
        factors = recurrent_weights.multipliers(self.config)
        if mixture is None:
            gate_up, down = expert_weights.first_product(self, "mlp."), self.product("mlp.", ("down_proj",))
            parts = recurrent_weights.by_part((factors.gate, 1.0), (gate_up.rows // 2,) * 2)
            mlp = {"gate_up": scaled(gate_up, parts), "down": scaled(down, factors.down)}
            return {"before_mlp": before_mlp, **mlp}
        if factors.down != 1.0:
            experts, shared = tuple(scaled(down, factors.down) for down in mixture.down), mixture.shared_down
            shared = None if shared is None else scaled(shared, factors.down)
            mixture = replace(mixture, down=experts, shared_down=shared)
        return {"before_mlp": before_mlp, "mixture": self.packer.mixture(mixture)}

    def _mixers(self, rotary: Tensor | None, window: int) -> dict[str, Any]:
        """Attention, and what stands in its place or beside it; empty where there is none."""
        convolution = convolution_weights.convolution_weights(self)
        if convolution is not None:
            qkv, out = convolution_weights.convolution_products(self)
            return {"convolution": convolution, "qkv": qkv, "out": out}
        recurrence = recurrent_weights.mixer(self.config, self)
        if not recurrent_weights.attends(self.config, self):
            return recurrence
        return {**recurrence, **self._attention(), "rotary": rotary, "window": window}

    def _attention(self) -> dict[str, Any]:
        shape, norms = latent_weights.latent_shape(self.config), HEAD_NORMS
        latents, factors = None, recurrent_weights.multipliers(self.config)
        if shape is None:
            order, keys = recurrent_weights.query_rows(self.config), _key_rows(self.config)
            qkv = self.product("self_attn.", ("q_proj", "k_proj", "v_proj"), "qkv_proj", rows=order)
            parts = recurrent_weights.by_part((1.0, factors.keys, 1.0), (qkv.rows - 2 * keys, keys, keys))
            qkv = scaled(qkv, parts, factors.attention_in)
        else:
            latents, norms = latent_weights.latent_weights(self.config, shape, self), latent_weights.NORMS
            qkv = latent_weights.first_product(self)
        of_heads = {name: self._maybe_norm(path) for name, path in norms.items()}
        out = scaled(self.product("self_attn.", ("o_proj",)), factors.attention_out)
        return {"qkv": qkv, "out": out, "latents": latents, **of_heads}

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a tensor of this layer."""
        return f"{self.prefix}{name}" in self.source.names

    def tensor(self, name: str) -> Tensor:
        """A tensor of this layer, dense."""
        return self.source.required(f"{self.prefix}{name}")

    def codes(self, name: str) -> PackedCodes | None:
        """A tensor of this layer as codes; None where it is dense."""
        codes = self.source.codes([f"{self.prefix}{name}"])
        return codes[0] if codes else None

    def unrounded(self, weight: Tensor) -> Any:
        """A dense matrix that is not rounded, whatever others are."""
        return self.packer.unrounded(weight)

    def expert_codes(self, name: str) -> list[PackedCodes] | None:
        """Each expert of a stack of this layer as codes; None where it is dense."""
        return self.source.expert_codes(f"{self.prefix}{name}")

    def packed(self, weight: Tensor | PackedCodes, bias: Tensor | None = None) -> Any:
        """Codes as they are; a dense matrix in the kind that was asked for."""
        if isinstance(weight, PackedCodes):
            return self.packer.codes(weight, bias, sparse=False)
        return self.packer.dense(weight, bias, sparse=False)

    def stack(self, experts: tuple[Any, ...]) -> Any:
        """A layer's experts as the runner multiplies them."""
        return self.packer.stack(experts)

    def _optional(self, name: str) -> Tensor | None:
        return self.source.optional(f"{self.prefix}{name}.weight")

    def _norm(self, name: str) -> Tensor:
        return _norm(self.config, self.source.required(f"{self.prefix}{name}.weight"))

    def _maybe_norm(self, name: str) -> Tensor | None:
        weight = self._optional(name)
        return None if weight is None else _norm(self.config, weight)

    def product(
        self,
        module: str,
        names: tuple[str, ...],
        fused_name: str = "",
        *,
        sparse: bool = True,
        rows: Tensor | None = None,
    ) -> Any:
        """Several Linears with the same inputs as one; ``sparse``: 2:4 weights may be packed as such;
        ``rows``: their order."""
        if fused_name and f"{self.prefix}{module}{fused_name}.weight" in self.source.names:
            names = (fused_name,)
        paths = [f"{self.prefix}{module}{name}" for name in names]
        biases = [self.source.optional(f"{path}.bias") for path in paths]
        order = slice(None) if rows is None else rows
        parts = self.source.codes([f"{path}.weight" for path in paths])
        joined = fused(parts) if parts else None
        if parts and joined is not None:
            bias = _joined(biases, [len(part.codes) for part in parts], order)
            return self.packer.codes(joined.rows(order), bias, sparse=sparse)
        weights = [self.source.required(f"{path}.weight") for path in paths]
        bias = _joined(biases, [len(weight) for weight in weights], order)
        return self.packer.dense(torch.cat(weights)[order], bias, sparse=sparse)


def _head(source: TensorSource, table: Tensor, packer: WeightPacker) -> Any:
    """The head; tied to the embedding ``table`` where it is not stored."""
    name = HEAD if HEAD in source.names else EMBEDDING
    parts = source.codes([name])
    if parts:
        return packer.codes(parts[0], None, sparse=True)
    weight = source.required(HEAD) if name == HEAD else table
    return packer.dense(weight, None, sparse=True)


def _joined(biases: Sequence[Tensor | None], rows: Sequence[int], order: slice | Tensor) -> Tensor | None:
    """The biases of several Linears as one, in this order; zeros where only some have one."""
    if all(bias is None for bias in biases):
        return None
    pairs = zip(biases, rows, strict=True)
    return torch.cat([torch.zeros(n) if bias is None else bias.float() for bias, n in pairs])[order]


def check_config(config: Any) -> None:
    """Raises ModelError where the compiled step does not support the config."""
    if config.model_type not in FAMILIES:
        raise ModelError(f"the compiled runner does not run {config.model_type}", hint=f"it runs {FAMILIES}")
    if _activation(config) not in ACTIVATIONS:
        raise ModelError(f"the compiled runner has no activation {_activation(config)!r}")
    recurrent_weights.check(config)
    if getattr(config, "clip_qkv", None) is not None:
        raise ModelError("the compiled runner does not clip queries, keys and values (clip_qkv)")
    if config.hidden_size % 16:
        raise ModelError(f"hidden_size is {config.hidden_size}, the compiled runner takes multiples of 16")
    for kind, parameters in rope(config).items():
        rope_type = parameters.get("rope_type", "default")
        if rope_type in MOVING:
            raise ModelError(f"the compiled runner has no rotary embedding {rope_type!r} ({kind})")


def _activation(config: Any) -> str:
    if config.model_type in convolution_weights.FAMILIES:
        return "silu"
    if config.model_type == "gpt_oss":
        return f"swiglu {config.swiglu_limit} {config.swiglu_alpha}"
    if config.model_type in recurrent_weights.NEMOTRON:
        return f"{config.mlp_hidden_act} without a gate"
    return str(getattr(config, "hidden_activation", None) or config.hidden_act)


def _scale(config: Any) -> float:
    """What multiplies queries."""
    if config.model_type in latent_weights.FAMILIES:
        return latent_weights.latent_scale(config)
    if config.model_type in recurrent_weights.GRANITE:
        return float(config.attention_multiplier)
    return float((_of(config, CAPPED_LOGITS, "query_pre_attn_scalar") or _head_dim(config)) ** -0.5)


def _head_dim(config: Any) -> int:
    if config.model_type in latent_weights.FAMILIES:
        return int(config.qk_nope_head_dim + config.qk_rope_head_dim)
    if config.model_type in recurrent_weights.ALONE:  # attends nowhere
        return 2
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _key_rows(config: Any) -> int:
    """Rows of a layer's product that are keys."""
    return int(config.num_key_value_heads) * _head_dim(config)


def _norm(config: Any, weight: Tensor) -> Tensor:
    """float32, the 1 of Gemma and Qwen3-Next added."""
    return (weight.float() + 1.0 if config.model_type in CENTRED else weight.float()).contiguous()


def _window(config: Any, index: int) -> int:
    """Keys that a token sees; 0: all."""
    if getattr(config, "layer_types", None) and layer_kind(config, index) != "sliding_attention":
        return 0
    return getattr(config, "sliding_window", None) or 0
