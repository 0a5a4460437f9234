"""From a checkpoint's tensors to a layer's mixture of experts, as the compiled step reads it.

Experts are stored one by one (``experts.3.up_proj``, Mixtral's ``experts.3.w3``) or, in a model that
transformers made, stacked (``experts.gate_up_proj``; gpt-oss has its inputs first, and rows of gate and up
alternate; its MXFP4 codes become int8 codes, as twice a 4-bit float is a whole number). The router stays
float32, whatever the experts are.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from attar.errors import ModelError
from attar.kernels.experts import MixtureWeights, Routing
from attar.runtime.runner.codes import PackedCodes

SIGMOID = ("glm4_moe", "deepseek_v3", "glm4_moe_lite", "nemotron_h")
SOFTMAX = ("qwen2_moe", "qwen3_moe", "olmoe", "qwen3_next", "qwen3_5_moe_text")
CHOSEN = ("mixtral", "gpt_oss", "granitemoehybrid")  # softmax over all, divided by the sum of the chosen
FAMILIES = (*CHOSEN, *SOFTMAX, "deepseek_v2", "lfm2_moe", *SIGMOID)
PREDICTING_AHEAD = SIGMOID  # a layer behind the last predicts further tokens
WIDE_NORMS = ("olmoe",)  # queries and keys are normed over all heads together
ROUTERS: tuple[tuple[str, str], ...] = (("mlp.", "gate"), ("mlp.", "router"))
ROUTERS += tuple((module, "gate") for module in ("block_sparse_moe.", "feed_forward.", "mixer."))
ExpertProducts = tuple[Any, Any]
LEAVES = ((("gate_proj", "up_proj"), "down_proj"), (("w1", "w3"), "w2"), (("up_proj",), "down_proj"))
SHARED = ("shared_expert.", "shared_experts.")


def is_router(name: str) -> bool:
    """Whether a tensor is a router's matrix, which stays float32."""
    return name.endswith(tuple(f".{module}{gate}.weight" for module, gate in ROUTERS))


class LayerTensors(Protocol):
    """What a layer's tensors are read by (compiled_weights.py); names are without the layer's prefix."""

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a tensor."""
        ...

    def tensor(self, name: str) -> Tensor:
        """A tensor, dense."""
        ...

    def product(
        self,
        module: str,
        names: tuple[str, ...],
        fused_name: str = "",
        *,
        sparse: bool = True,
        rows: Tensor | None = None,
    ) -> Any:
        """Several Linears with the same inputs as one, or one that is stored so; ``sparse``: 2:4 weights may
        be packed as such; ``rows``: their order."""
        ...

    def codes(self, name: str) -> PackedCodes | None:
        """A tensor as codes; None where it is dense."""
        ...

    def expert_codes(self, name: str) -> list[PackedCodes] | None:
        """Each expert of a stack as codes (N, K); None where it is dense."""
        ...

    def packed(self, weight: Tensor | PackedCodes, bias: Tensor | None = None) -> Any:
        """Codes as they are; a dense matrix in the kind that was asked for."""
        ...

    def unrounded(self, weight: Tensor) -> Any:
        """A dense matrix that is not rounded, whatever others are."""
        ...

    def stack(self, experts: tuple[Any, ...]) -> Any:
        """A layer's experts as the runner multiplies them."""
        ...


def mixture_weights(config: Any, layer: LayerTensors) -> MixtureWeights | None:
    """The mixture of a layer; None where its MLP is dense.

    Raises:
        ModelError: tensors are missing, or the routing is not one that the library has.
    """
    stored = next((names for names in ROUTERS if layer.has(f"{''.join(names)}.weight")), None)
    if stored is None:
        return None
    module, gate = stored
    router = layer.tensor(f"{module}{gate}.weight").float().contiguous()
    if config.model_type == "gpt_oss":
        gate_up, down = _alternating(layer, f"{module}experts.")
    else:
        gate_up, down = _experts(layer, f"{module}experts.", len(router))
    shared = next((name for name in SHARED if layer.has(f"{module}{name}down_proj.weight")), None)
    gates = {
        name: layer.tensor(f"{module}{leaf}").float().reshape(-1).contiguous()
        for name, leaf in (
            ("bias", f"{gate}.bias"),
            ("correction", f"{gate}.e_score_correction_bias"),
            ("shared_gate", "shared_expert_gate.weight"),
        )
        if layer.has(f"{module}{leaf}")
    }
    of_shared = {}
    if shared:
        of_shared = {
            "shared_gate_up": first_product(layer, f"{module}{shared}"),
            "shared_down": layer.product(f"{module}{shared}", ("down_proj",)),
        }
    return MixtureWeights(
        routing=routing(config), router=router, gate_up=gate_up, down=down, **gates, **of_shared
    )


def first_product(layer: LayerTensors, module: str) -> Any:
    """Gate and up of an MLP, or up alone where there is no gate (Nemotron-H)."""
    gated = layer.has(f"{module}gate_proj.weight") or not layer.has(f"{module}up_proj.weight")
    return layer.product(module, ("gate_proj", "up_proj") if gated else ("up_proj",), "gate_up_proj")


def _experts(layer: LayerTensors, module: str, count: int) -> ExpertProducts:
    """Gate and up, and down, of each expert; 2:4 ones are packed dense, so that all are of one form."""
    stacked_name = next((name for name in ("gate_up_proj", "up_proj") if layer.has(f"{module}{name}")), None)
    if stacked_name:
        paths = (f"{module}{name}" for name in (stacked_name, "down_proj"))
        both = (layer.expert_codes(path) or layer.tensor(path) for path in paths)
        gate_up, down = (layer.stack(tuple(layer.packed(weight) for weight in stacked)) for stacked in both)
        return gate_up, down
    first, last = next((leaf for leaf in LEAVES if layer.has(f"{module}0.{leaf[0][0]}.weight")), LEAVES[0])
    return (
        layer.stack(tuple(layer.product(f"{module}{e}.", first, sparse=False) for e in range(count))),
        layer.stack(tuple(layer.product(f"{module}{e}.", (last,), sparse=False) for e in range(count))),
    )


def _alternating(layer: LayerTensors, module: str) -> ExpertProducts:
    """The same of gpt-oss: (E, K, N), or MXFP4 codes, with biases, rows of the gate and of up in turn."""
    parts = []
    for name in ("gate_up_proj", "down_proj"):
        bias = layer.tensor(f"{module}{name}_bias")
        rows = torch.arange(bias.shape[1])
        if name == "gate_up_proj":
            rows = torch.cat([rows[0::2], rows[1::2]])
        experts = layer.expert_codes(f"{module}{name}") or layer.tensor(f"{module}{name}").transpose(1, 2)
        pairs = zip(experts, bias[:, rows], strict=True)
        packed = (layer.packed(_in_order(weight, rows), expert_bias) for weight, expert_bias in pairs)
        parts.append(layer.stack(tuple(packed)))
    return parts[0], parts[1]


def _in_order(weight: Tensor | PackedCodes, rows: Tensor) -> Tensor | PackedCodes:
    """Rows (N,) of a matrix (N, K)."""
    return weight[rows] if isinstance(weight, Tensor) else weight.rows(rows)


def routing(config: Any) -> Routing:
    """How a family chooses experts.

    Raises:
        ModelError: the family's routing is not known here.
    """
    kind, active = config.model_type, config.num_experts_per_tok
    if kind in CHOSEN:  # or softmax over the chosen: the same
        return Routing(active=active)
    if kind in SOFTMAX:
        return Routing(active=active, normalized=getattr(config, "norm_topk_prob", True))
    if kind == "deepseek_v2":
        grouped = config.topk_method == "group_limited_greedy"
        groups = {"groups": config.n_group, "active_groups": config.topk_group} if grouped else {}
        return Routing(active=active, normalized=False, scaling=config.routed_scaling_factor, **groups)
    if kind in (*SIGMOID, "lfm2_moe"):
        grouped = {"groups": config.n_group, "active_groups": config.topk_group} if kind in SIGMOID else {}
        return Routing(
            active=active,
            scoring="sigmoid",
            normalized=bool(config.norm_topk_prob),
            scaling=config.routed_scaling_factor,
            group_scores=2,
            **grouped,
        )
    raise ModelError(f"the compiled runner does not know how {kind} chooses experts")
