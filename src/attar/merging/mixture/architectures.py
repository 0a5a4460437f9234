"""The architectures that a mixture of dense models may get, which models fit them, and their tensors' names.

Tensors have the names of the published checkpoints, one matrix an expert, as transformers, vLLM and
llama.cpp read them (mergekit since June 2026 stacks the experts of Mixtral and Qwen3, which transformers 5
reads as well).

Which one is chosen follows mergekit-moe: Mixtral if it fits, else the first that does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attar.errors import ModelError, RecipeError
from attar.merging.mixture.config import RANDOM_MODES, MixtureConfig

PARTS = ("gate_proj", "up_proj", "down_proj")
_ATTENTION = tuple(f"self_attn.{part}_proj.weight" for part in "qkvo")
_NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")
_OUTSIDE = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_BIASES = tuple(f"self_attn.{part}_proj.bias" for part in "qkv")
_DROPPED = ("architectures", "model_type", "layer_types", "torch_dtype", "transformers_version")


@dataclass(frozen=True)
class MixtureArchitecture:
    """An output architecture.

    Attributes:
        name: mergekit's, by which ``architecture:`` chooses it.
        model_type, class_name: of its config.
        dense: model types of the models that it is made of.
        shared: numbers of shared experts that it may have.
        shared_gate: the shared expert has its own router row, and so needs prompts.
        block: of a layer's mixture, inside the layer.
        parts: names of an expert's gate, up and down projections.
        biases: q, k and v have biases; zeros where the dense model has none.
        head_norms: q and k are normalised a head.
    """

    name: str
    model_type: str
    class_name: str
    dense: tuple[str, ...]
    shared: tuple[int, ...] = (0,)
    shared_gate: bool = False
    block: str = "mlp"
    shared_block: str = ""
    parts: tuple[str, ...] = PARTS
    biases: bool = False
    head_norms: bool = False

    def refusal(self, config: MixtureConfig, types: Sequence[str]) -> str | None:
        """Why these models cannot become this architecture; None: they can."""
        different = [name for name in dict.fromkeys(types) if name not in self.dense]
        if different:
            return f"it is made of {' or '.join(self.dense)} models, not of {', '.join(different)}"
        if len(set(types)) > 1:
            return f"its models must be of one type, not {', '.join(dict.fromkeys(types))}"
        if len(config.shared) not in self.shared:
            wanted = " or ".join(map(str, self.shared))
            return f"it has {wanted} shared experts, not {len(config.shared)}"
        for source in config.shared:
            if self.shared_gate and not source.positive and config.gate_mode not in RANDOM_MODES:
                return "its shared expert has a router row and needs positive_prompts"
            if source.positive and not self.shared_gate:
                return "its shared expert has no router row, so prompts would do nothing"
        return None

    def kept(self) -> tuple[str, ...]:
        """Names inside a layer of the dense model's tensors that stay as they are."""
        norms = ("self_attn.q_norm.weight", "self_attn.k_norm.weight") if self.head_norms else ()
        return (*_ATTENTION, *_NORMS, *(_BIASES if self.biases else ()), *norms)

    def router(self) -> str:
        """Name of the router (E, D) inside a layer."""
        return f"{self.block}.gate.weight"

    def expert(self, index: int, part: str) -> str:
        """Name of an expert's matrix inside a layer; ``part`` is the dense model's name of it."""
        return f"{self.block}.experts.{index}.{self.parts[PARTS.index(part)]}.weight"

    def config(self, dense: Mapping[str, Any], mixture: MixtureConfig) -> dict[str, Any]:
        """``config.json`` of the result.

        Args:
            dense: the base model's config with every default written out.
        """
        kept = {key: value for key, value in dense.items() if key not in _DROPPED and key[0] != "_"}
        experts, active, shared = len(mixture.experts), mixture.active, len(mixture.shared)
        if self.model_type == "deepseek":
            return kept | _deepseek(dense, experts, active, shared)
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        kind = CONFIG_MAPPING[self.model_type]
        known = {*kind().to_dict(), "head_dim"}  # read by all, declared by few
        fields = {key: value for key, value in kept.items() if key in known}
        fields |= {"num_experts_per_tok": active, "sliding_window": None}
        width = dense["intermediate_size"]
        if self.model_type == "mixtral":
            fields |= {"num_local_experts": experts}
        else:
            fields |= {"num_experts": experts, "moe_intermediate_size": width, "norm_topk_prob": True}
            fields |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False}
        if self.shared_block:
            fields["shared_expert_intermediate_size"] = width
        result: dict[str, Any] = kind(**fields).to_diff_dict()
        named = {"architectures": [self.class_name], "model_type": self.model_type}
        return {**result, **named, "sliding_window": None}


def _deepseek(dense: Mapping[str, Any], experts: int, active: int, shared: int) -> dict[str, Any]:
    """Keys of the first DeepSeek-MoE, whose code is on the hub and not in transformers."""
    hub = "deepseek-ai/deepseek-moe-16b-base--"
    return {
        "architectures": ["DeepseekForCausalLM"],
        "model_type": "deepseek",
        "n_routed_experts": experts,
        "n_shared_experts": shared or None,
        "num_experts_per_tok": active,
        "first_k_dense_replace": 0,
        "moe_layer_freq": 1,
        "scoring_func": "softmax",
        "norm_topk_prob": True,
        "moe_intermediate_size": dense["intermediate_size"],
        "auto_map": {
            "AutoConfig": f"{hub}configuration_deepseek.DeepseekConfig",
            "AutoModel": f"{hub}modeling_deepseek.DeepseekModel",
            "AutoModelForCausalLM": f"{hub}modeling_deepseek.DeepseekForCausalLM",
        },
    }


_W = ("w1", "w3", "w2")
ARCHITECTURES = (
    MixtureArchitecture(
        "Mixtral",
        "mixtral",
        "MixtralForCausalLM",
        ("llama", "mistral"),
        block="block_sparse_moe",
        parts=_W,
    ),
    MixtureArchitecture(
        "DeepSeek MoE",
        "deepseek",
        "DeepseekForCausalLM",
        ("llama", "mistral"),
        shared=(0, 1),
        shared_block="mlp.shared_experts",
    ),
    MixtureArchitecture(
        "Qwen MoE",
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        ("llama", "mistral", "qwen2"),
        shared=(1,),
        shared_gate=True,
        shared_block="mlp.shared_expert",
        biases=True,
    ),
    MixtureArchitecture("Qwen3 MoE", "qwen3_moe", "Qwen3MoeForCausalLM", ("qwen3",), head_norms=True),
)


def choose_architecture(config: MixtureConfig, types: Sequence[str]) -> MixtureArchitecture:
    """The architecture of a mixture.

    Args:
        types: ``model_type`` of each model.

    Raises:
        RecipeError: the configuration asks for one that there is not.
        ModelError: none fits; names each with its reason.
    """
    wanted = (config.architecture or "").lower()
    named = [kind for kind in ARCHITECTURES if kind.name.lower().startswith(wanted)]
    if not named:
        names = ", ".join(kind.name for kind in ARCHITECTURES)
        raise RecipeError(f"{config.where}: unknown architecture {config.architecture!r}; known: {names}")
    refusals = {kind.name: kind.refusal(config, types) for kind in named}
    for kind in named:
        if refusals[kind.name] is None:
            return kind
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
    raise ModelError(f"{config.where}: no mixture can be made of these models: {reasons}")


def split_name(name: str) -> tuple[int | None, str]:
    """A tensor's layer, None outside the layers, and its name inside."""
    match = _LAYER.fullmatch(name)
    return (int(match[1]), match[2]) if match else (None, name)


def is_outside(name: str) -> bool:
    """Whether it is the embedding, the last norm or the head."""
    return name in _OUTSIDE
