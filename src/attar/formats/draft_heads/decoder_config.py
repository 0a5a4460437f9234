"""The transformer layers of a draft head as published configs state them: the keys of a Llama or a Qwen3.

The base of the rotary frequencies is written twice, as transformers 4 and 5 have it: vLLM and llama.cpp read
the new key, SGLang and DeepSpec the old one. Layers that attar's heads do not have are refused: other
activations, scaled rotary frequencies, sliding windows, biases of the MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attar.errors import ModelError
from attar.formats.draft_heads.content import HeadTarget, entry

CONTEXT = 32768  # of a head whose target's longest sequence is not known


@dataclass(frozen=True)
class DecoderLayers:
    """Layers of a head.

    Attributes:
        depth: how many.
        intermediate: neurons of the MLP.
        theta: base of the rotary frequencies.
        bias: of attention's projections.
    """

    depth: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    eps: float
    theta: float
    bias: bool = False

    def to_config(self, hidden: int, vocabulary: int, target: HeadTarget, model_type: str) -> dict[str, Any]:
        """The keys of a config; of a Llama without ``layer_types``, in which vLLM looks for the layer's place
        in the target."""
        own = {"layer_types": ["full_attention"] * self.depth} if model_type == "qwen3" else {"mlp_bias": False}
        return {
            "model_type": model_type,
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
            "rope_theta": self.theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.theta},
            "attention_bias": self.bias,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
            **own,
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
        return cls(
            depth=depth,
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            intermediate=intermediate,
            eps=config.get("rms_norm_eps", 1e-6),
            theta=_theta(config, where),
            bias=bool(config.get("attention_bias", False)),
        )


def _theta(config: Mapping[str, Any], where: str) -> float:
    """The base of the rotary frequencies, by the new key or the old one."""
    new = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = new.get("rope_type") or new.get("type") or "default"
    if kind != "default" or new.get("factor", 1.0) != 1.0:
        raise ModelError(f"{where}: rotary frequencies of type {kind}: heads of plain ones alone are read")
    return float(new.get("rope_theta") or config.get("rope_theta") or 10000.0)
