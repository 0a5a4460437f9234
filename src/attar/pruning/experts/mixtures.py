"""Where the experts of a mixture are: in the model that runs, and in the checkpoint's tensors.

model.layers.3.mlp.experts                    a module that is called with (T, H), chosen experts (T, k) and
                                              their gates (T, k)
model.layers.3.mlp.experts.0.up_proj.weight   an expert's tensor; or, stacked, experts.gate_up_proj (E, ...)
model.layers.3.mlp.gate.weight                the router's: all others of the block with a row an expert

Granite MoE stacks its experts as block_sparse_moe.input_linear.weight (E, 2 I, H) and output_linear.weight.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from attar.errors import ModelError

COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
ACTIVE_KEYS = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.+)")
_STACKED = re.compile(r"(.*\.experts)\.(\D[^.]*)")
_GRANITE = re.compile(r"(.*\.block_sparse_moe)\.((?:input|output)_linear\.weight)")
_LAYER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True)
class MixtureSizes:
    """What a config says of its mixtures.

    Attributes:
        experts, active: of each layer, of each token.
        count_key, active_key: where the config says so.
        nested: the config of the text model inside the config, or an empty name.
    """

    experts: int
    active: int
    count_key: str
    active_key: str
    nested: str

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> MixtureSizes:
        """Read a config.

        Raises:
            ModelError: it is no mixture, or its router chooses among groups of experts.
        """
        nested = "text_config" if isinstance(config.get("text_config"), dict) else ""
        text = config[nested] if nested else config
        count = next((key for key in COUNT_KEYS if isinstance(text.get(key), int)), None)
        active = next((key for key in ACTIVE_KEYS if isinstance(text.get(key), int)), None)
        family = text.get("model_type")
        if count is None or active is None or text[count] < 2:
            raise ModelError(f"{family}: is no mixture of experts", hint="attar prune --method neurons")
        if (text.get("n_group") or 1) > 1:
            raise ModelError(f"{family}: its router chooses among {text['n_group']} groups of experts")
        return cls(int(text[count]), int(text[active]), count, active, nested)

    def changed(self, config: Mapping[str, Any], experts: int, active: int) -> dict[str, Any]:
        """The config with other numbers; the given one is not changed."""
        numbers = {self.count_key: experts, self.active_key: active}
        if self.nested:
            return {**config, self.nested: {**config[self.nested], **numbers}}
        return {**config, **numbers}


def expert_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that hold a layer's experts, by name, in order.

    Raises:
        ModelError: there are none, or they are not called with chosen experts and gates.
    """
    modules = {name: module for name, module in model.named_modules() if name.endswith(".experts")}
    family = type(model).__name__
    if not modules:
        raise ModelError(f"{family}: no module with experts found")
    for name, module in modules.items():
        arguments = [p for p in inspect.signature(module.forward).parameters if p not in ("args", "kwargs")]
        if isinstance(module, nn.ModuleList) or len(arguments) != 3:
            raise ModelError(f"{family}: {name} is not called with hidden states, chosen experts and gates")
    return modules


def router_parameters(model: nn.Module, experts: str, count: int) -> dict[str, Any]:
    """Parameters and buffers of a layer's router, by name: the block's tensors with one row an expert.

    Args:
        experts: name of the module with the experts.
        count: of the experts.
    """
    block = model.get_submodule(experts.rpartition(".")[0])
    every = [*block.named_parameters(), *block.named_buffers()]
    return {
        name: tensor
        for name, tensor in every
        if not name.startswith("experts.") and "shared" not in name and _is_row(tuple(tensor.shape), count)
    }


@dataclass(frozen=True)
class ExpertTensor:
    """A checkpoint's tensor that has experts.

    Attributes:
        layer: number of the mixture among the model's mixtures.
        expert: whose it is; None: it has a row for every expert.
        local_name: name behind the expert's number.
    """

    layer: int
    expert: int | None
    prefix: str
    local_name: str


def expert_tensors(
    tensors: Mapping[str, Any], count: int, mixtures: int | None = None
) -> dict[str, ExpertTensor]:
    """The tensors of experts and routers, by name.

    Args:
        tensors: of the checkpoint, with their shapes.
        mixtures: layers with experts, where that is known.

    Raises:
        ModelError: the names are not understood.
    """
    parts = {name: _expert_of(name) for name in tensors}
    prefixes = sorted({part[0] for part in parts.values() if part}, key=_layer_of)
    if mixtures is not None and len(prefixes) != mixtures:
        raise ModelError(
            f"experts in {len(prefixes)} layers of the checkpoint, and in {mixtures} of the model"
        )
    order = {prefix: number for number, prefix in enumerate(prefixes)}
    blocks = {prefix.rpartition(".")[0]: number for prefix, number in order.items()}
    of_experts: dict[str, ExpertTensor] = {}
    for name, part in parts.items():
        if part:
            prefix, expert, local_name = part
            of_experts[name] = ExpertTensor(order[prefix], expert, prefix, local_name)
        else:
            block = next((block for block in blocks if name.startswith(f"{block}.")), None)
            local_name = name.removeprefix(f"{block}.")
            if (
                block is not None
                and "shared" not in local_name
                and _is_row(tuple(tensors[name].shape), count)
            ):
                of_experts[name] = ExpertTensor(blocks[block], None, block, local_name)
    return of_experts


def _expert_of(name: str) -> tuple[str, int | None, str] | None:
    """Prefix of the layer's experts, an expert's number (None: all are stacked) and the rest of the name of
    an expert's tensor; None: of another one."""
    if match := _EXPERT.fullmatch(name):
        return match[1], int(match[2]), match[3]
    if match := _STACKED.fullmatch(name):
        return match[1], None, match[2]
    if match := _GRANITE.fullmatch(name):
        return f"{match[1]}.experts", None, match[2]
    return None


def _is_row(shape: tuple[int, ...], count: int) -> bool:
    return 1 <= len(shape) <= 2 and shape[0] == count


def _layer_of(prefix: str) -> tuple[int, str]:
    match = _LAYER.search(f"{prefix}.")
    return (int(match[1]) if match else -1, prefix)
