"""A mixture of experts in a layer of the compiled step.

    y = sum over the k chosen experts of  w_e down_e(act(gate_e(x)) up_e(x))  +  sigmoid(g x) shared(x)

csrc/decode/routing.h has the formulas of the choice and of w, csrc/decode/mixture.h computes y.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attar.errors import ModelError
from attar.kernels import structures
from attar.kernels.packed import PackedWeight

Mixtures = tuple[structures.MixtureStruct, Any, Any] | None
"""A mixture as the library reads it, with the arrays of its experts, which must outlive it."""


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How experts are chosen for a token.

    Attributes:
        active: k.
        scoring: of the router's logits, a key of ``structures.SCORINGS``.
        normalized: the scores of the chosen are divided by their sum.
        scaling: multiplies them.
        groups: of neighbouring experts; 1: all are chosen among.
        active_groups: groups whose experts may be chosen.
        group_scores: largest scores of a group whose sum is the group's.
    """

    active: int
    scoring: str = "softmax"
    normalized: bool = True
    scaling: float = 1.0
    groups: int = 1
    active_groups: int = 1
    group_scores: int = 1


@dataclass(frozen=True, kw_only=True)
class MixtureWeights:
    """A mixture.

    Attributes:
        router: float32 (experts, hidden).
        gate_up: of each expert, rows of the gate if it has one, then rows of up; of one shape and kind, as
            ``down`` are.
        bias: float32 (experts,), of the router's logits.
        correction: float32 (experts,), added to scores for the choice alone (DeepSeek V3).
        shared_gate_up, shared_down: the expert that all tokens share.
        shared_gate: float32 (hidden,), g; None: 1.
    """

    routing: Routing
    router: Tensor
    gate_up: tuple[PackedWeight, ...]
    down: tuple[PackedWeight, ...]
    bias: Tensor | None = None
    correction: Tensor | None = None
    shared_gate_up: PackedWeight | None = None
    shared_down: PackedWeight | None = None
    shared_gate: Tensor | None = None

    @property
    def shared(self) -> list[PackedWeight]:
        """The shared expert's weights."""
        return [packed for packed in (self.shared_gate_up, self.shared_down) if packed is not None]

    @property
    def products(self) -> list[PackedWeight]:
        """All packed weights; experts that a runner has stacked are one."""
        experts = (self.gate_up, self.down)
        listed = [part for parts in experts for part in (parts if isinstance(parts, tuple) else (parts,))]
        return [*listed, *self.shared]

    @property
    def read_bytes(self) -> int:
        """Bytes that one token reads, the router's included."""
        experts = self.routing.active * (self.gate_up[0].nbytes + self.down[0].nbytes)
        router: int = 4 * self.router.numel()
        return router + experts + sum(packed.nbytes for packed in self.shared)


def mixture_struct(weights: MixtureWeights | None) -> Mixtures:
    """A mixture as the library reads it."""
    if weights is None:
        return None
    lists = [
        (structures.LinearStruct * len(parts))(*map(structures.linear_struct, parts))
        for parts in (weights.gate_up, weights.down)
    ]
    routing = weights.routing
    result = structures.MixtureStruct(
        experts=len(weights.router),
        active=routing.active,
        groups=routing.groups,
        active_groups=routing.active_groups,
        group_scores=routing.group_scores,
        scoring=structures.SCORINGS[routing.scoring],
        normalized=routing.normalized,
        scaling=routing.scaling,
        gate_up=ctypes.addressof(lists[0]),
        down=ctypes.addressof(lists[1]),
    )
    for name in ("router", "bias", "correction", "shared_gate"):
        setattr(result, name, structures.address(getattr(weights, name)))
    for name in ("shared_gate_up", "shared_down"):
        if getattr(weights, name) is not None:
            setattr(result, name, structures.linear_struct(getattr(weights, name)))
    return result, lists[0], lists[1]


def check_mixture(weights: MixtureWeights, hidden: int, *, ungated: bool = False) -> None:
    """What the library does not check; ``ungated``: ``gate_up`` are rows of up alone.

    Raises:
        ModelError: the experts differ, or their shapes or the routing make no mixture.
    """
    routing, experts, neurons = weights.routing, len(weights.router), weights.down[0].columns
    sides = 1 if ungated else 2
    for name, parts in (("gate_up", weights.gate_up), ("down", weights.down)):
        kinds = {(p.rows, p.columns, p.kind, p.group, p.zeros, p.form) for p in parts}
        if len(kinds) > 1:
            raise ModelError(f"the experts of a layer differ in {name}: {sorted(kinds, key=str)[:2]}")
        shape = (sides * neurons, hidden) if name == "gate_up" else (hidden, neurons)
        if len(parts) != experts or (parts[0].rows, parts[0].columns) != shape:
            raise ModelError(f"{len(parts)} experts with {name} {parts[0].rows} x {parts[0].columns}")
    per_group = experts // routing.groups
    if not (
        0 < routing.active <= routing.active_groups * per_group
        and routing.active_groups <= routing.groups
        and experts == routing.groups * per_group
        and 0 < routing.group_scores <= per_group
    ):
        raise ModelError(f"{routing.active} of {experts} experts in {routing.groups} groups")
    if (weights.shared_gate_up is None) != (weights.shared_down is None):
        raise ModelError("half of a shared expert")
    if weights.shared_gate_up is not None and weights.shared_down is not None:
        rows, columns = weights.shared_gate_up.rows, weights.shared_gate_up.columns
        if (rows, columns, hidden) != (sides * weights.shared_down.columns, hidden, weights.shared_down.rows):
            raise ModelError(f"a shared expert with gate_up {rows} x {columns}")
    shapes = {"bias": (experts,), "correction": (experts,), "shared_gate": (hidden,)}
    for name, expected in {"router": (experts, hidden), **shapes}.items():
        tensor = getattr(weights, name)
        if tensor is not None and (
            tuple(tensor.shape) != expected or tensor.dtype != torch.float32 or not tensor.is_contiguous()
        ):
            raise ModelError(f"{name} of a mixture is {tensor.dtype} {tuple(tensor.shape)}, not {expected}")
