"""The transformer layers of a draft head as published configs state them: the keys of a Llama or a Qwen3.

The base of the rotary frequencies is written twice, as transformers 4 and 5 have it: vLLM and llama.cpp read
the new key, SGLang and DeepSpec the old one. Layers that attar's heads do not have are refused: other
activations, rotary frequencies that change with the length, sliding windows, biases of the MLP.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from attar.errors import CheckpointError, ModelError
from attar.formats.draft_heads.content import HeadTarget, entry
from attar.formats.draft_heads.rope_scaling import rope_scaling

CONTEXT = 32768  # of a head whose target's longest sequence is not known


@dataclass(frozen=True)
class DecoderLayers:
    """Layers of a head.

    Attributes:
        depth: how many.
        intermediate: neurons of the MLP.
        bias: of the projections to queries, keys and values.
        head_norms: of each query and key: a Qwen3; without them a Llama.
        rope_scaling: of the rotary frequencies (attar.models.draft_heads.decoder_layer).
    """

    depth: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    eps: float
    rope_theta: float
    bias: bool
    head_norms: bool
    rope_scaling: dict[str, Any] = field(default_factory=dict)

    def to_config(self, hidden: int, vocabulary: int, target: HeadTarget) -> dict[str, Any]:
        """The keys of a config; of a Llama without ``layer_types``, in which vLLM looks for the layer's place
        in the target."""
        kind_fields = (
            {"layer_types": ["full_attention"] * self.depth} if self.head_norms else {"mlp_bias": False}
        )
        return {
            "model_type": "qwen3" if self.head_norms else "llama",
            "vocab_size": vocabulary,
            "hidden_size": hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.depth,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": target.context or CONTEXT,
            "rms_norm_eps": self.eps,
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_type": "default", **self.rope_scaling, "rope_theta": self.rope_theta},
            "attention_bias": self.bias,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
            **kind_fields,
            **({"rope_scaling": self.rope_scaling} if self.rope_scaling else {}),
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any], where: str) -> DecoderLayers:
        """From the keys of a config.

        Args:
            where: for errors, such as the path of the file.

        Raises:
            CheckpointError: one is missing.
            ModelError: a layer of another kind.
        """
        numbers = [
            entry(config, key, int, where)
            for key in ("num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size")
        ]
        depth, heads, hidden, intermediate = numbers
        if config.get("hidden_act", "silu") != "silu":
            raise ModelError(f"{where}: hidden_act is {config['hidden_act']!r}: heads of silu alone are read")
        if config.get("mlp_bias"):
            raise ModelError(f"{where}: mlp_bias: heads without biases of the MLP alone are read")
        if any(kind != "full_attention" for kind in config.get("layer_types") or ()):
            raise ModelError(f"{where}: layer_types: heads of full attention alone are read")
        theta, scaling = _rope(config, where)
        return cls(
            depth=depth,
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            intermediate=intermediate,
            eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            bias=bool(config.get("attention_bias", False)),
            head_norms=config.get("model_type") == "qwen3",
        )


def with_output_bias(tensors: Mapping[str, Tensor], layers: DecoderLayers) -> dict[str, Tensor]:
    """Tensors with a zero bias behind attention where the biases before attention are stored (Llama,
    Qwen3)."""
    if not layers.bias:
        return dict(tensors)
    weights = {name: x for name, x in tensors.items() if name.endswith("o_proj.weight")}
    return {**tensors, **{f"{name[:-6]}bias": x.new_zeros(len(x)) for name, x in weights.items()}}


def without_output_bias(tensors: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """Tensors without it.

    Raises:
        ModelError: it is not zero.
    """
    biases = [name for name in tensors if name.endswith("o_proj.bias")]
    if any(tensors[name].any() for name in biases):
        raise ModelError(f"{where}: {biases[0]}: heads without a bias behind attention alone are read")
    return {name: x for name, x in tensors.items() if name not in biases}


def check_depth(tensors: Iterable[str], layers: DecoderLayers, where: str) -> None:
    """Raises CheckpointError where the tensors have another number of layers than the config."""
    numbers = {int(name.split(".")[1]) for name in tensors if name.startswith("layers.")}
    if numbers != set(range(layers.depth)):
        stated = f"{where}: num_hidden_layers is {layers.depth}"
        raise CheckpointError(f"{stated}, the tensors have {max(numbers, default=-1) + 1}")


def _rope(config: Mapping[str, Any], where: str) -> tuple[float, dict[str, Any]]:
    """The base of the rotary frequencies and their scaling, by the new key or the old ones."""
    new = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(new, dict):
        raise CheckpointError(f"{where}: rope_parameters is {new!r}")
    try:
        scaling = rope_scaling(new, config.get("max_position_embeddings") or 0)
    except ValueError as error:
        raise ModelError(f"{where}: {error}") from None
    return float(new.get("rope_theta") or config.get("rope_theta") or 10000.0), scaling
