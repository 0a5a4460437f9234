"""Finding a block's mixture of experts: the experts, the router, the expert that all tokens share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from attar.errors import ModelError
from attar.models.anatomy.parts import Mixture
from attar.models.anatomy.roles import HINT, in_attention, is_linear, measure, role_of
from attar.models.anatomy.sublayers import Sublayer, read_mlp
from attar.models.loading.experts import stack_of

ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_k", "top_k_experts")


@dataclass(frozen=True)
class ExpertLayout:
    """Where a block's experts are, below the block.

    Attributes:
        single: paths of the experts; empty while they are stacked.
    """

    holder: str
    count: int
    single: tuple[str, ...]


def find_experts(block: nn.Module) -> ExpertLayout | None:
    """The module of a block that holds experts: stacked, or as numbered children with linear layers.

    Raises:
        ModelError: they are stacked in a way that is not understood, or there is more than one such module.
    """
    holders = []
    for path, module in block.named_modules():
        if in_attention(f"{path}."):
            continue
        stack = stack_of(module)
        if stack is not None:
            holders.append(ExpertLayout(path, stack.count, ()))
        names = [name for name, _ in module.named_children()]
        if len(names) > 1 and all(name.isdigit() for name in names) and "expert" in path:
            single = tuple(f"{path}.{name}" for name in names)
            if all(any(is_linear(part) for part in block.get_submodule(name).modules()) for name in single):
                holders.append(ExpertLayout(path, len(names), single))
    if len(holders) > 1:
        raise ModelError(f"experts in {holders[0].holder} and in {holders[1].holder} of one block", hint=HINT)
    return holders[0] if holders else None


def read_mixture(
    config: Any, name: str, block: nn.Module, layout: ExpertLayout, sublayer: Sublayer
) -> Mixture:
    """Router, experts, and the shared expert with its gate."""
    parent = layout.holder.rpartition(".")[0]
    routers = [
        path
        for path, module in block.named_modules()
        if path.startswith(f"{parent}." if parent else "")
        and not path.startswith(f"{layout.holder}.")
        and isinstance(getattr(module, "weight", None), nn.Parameter)
        and module.weight.dim() == 2
        and len(module.weight) == layout.count
        and role_of(path) is None
        and not in_attention(path)
    ]
    if len(routers) != 1:
        problem = f"could be {' or '.join(routers)}" if routers else "was not found"
        raise sublayer.error(f"the router of {layout.count} experts {problem} in {name}.{parent}".rstrip("."))
    router = f"{name}.{routers[0]}"
    others = {path: module for path, module in sublayer.linears.items() if path != router}
    gates = [path for path, module in others.items() if measure(path, module).out_features == 1]
    shared = Sublayer(
        sublayer.family,
        f"the shared expert of {name}",
        {path: module for path, module in others.items() if path not in gates},
    )
    experts = []
    for path in layout.single:
        inside = {
            f"{name}.{path}.{leaf}": m
            for leaf, m in block.get_submodule(path).named_modules()
            if is_linear(m)
        }
        experts.append(
            read_mlp(config, Sublayer(sublayer.family, f"the expert {name}.{path}", inside), sized=False)
        )
    if len({(expert.neurons, expert.gate is None) for expert in experts}) > 1:
        raise sublayer.error(f"the experts of {name} differ in size")
    active = [getattr(block.get_submodule(path), "top_k", None) for path in (routers[0], parent)]
    active += [getattr(config, key, None) for key in ACTIVE]
    return Mixture(
        name=".".join(filter(None, [name, parent])),
        holder=f"{name}.{layout.holder}",
        router=router,
        count=layout.count,
        active=next((number for number in active if isinstance(number, int)), 0),
        experts=tuple(experts),
        shared=read_mlp(config, shared, sized=False) if shared.linears else None,
        shared_gate=gates[0] if gates else None,
    )
