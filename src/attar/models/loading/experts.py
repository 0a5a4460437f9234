"""Experts as ordinary Linears.

transformers holds the experts of a mixture as 3-D parameters, which no walk over Linears sees:
``experts.gate_up_proj`` (E, 2I, H) and ``experts.down_proj`` (E, H, I), or transposed, with biases, or gate
and up interleaved. :func:`unstack` puts a small module with Linears in the place of each, so that hooks,
solvers, plans, overrides by name and written files need no translation.

What one can rely on after :func:`unstack`:

- Expert e is the child ``e`` of the same path, its Linears are named as checkpoints of the family store
  them one by one (``experts.3.gate_proj``, Mixtral ``experts.3.w1``), else as :data:`LEAVES`.
- The forward pass is the family's own (its activation, clamps, biases; scores before or after), and equal to
  it but for the rounding of float32 sums. Gate and up of an expert get the very same tensor.
- Every expert is called in every pass, with (0, H) where no token came, and on the meta device with (1, H).
- On a model with weights the Linears are views of the stacked parameters: no second copy.

Stacked parameters are found by their shapes. A family that holds its experts in another way is refused by
name.

Letters: E experts, H hidden size, I neurons of an expert, T tokens, k experts of a token.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import MergeModulelist, WeightConverter

from attar.errors import ModelError

LEAVES = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Stack:
    """How a module holds its experts.

    Attributes:
        up: name of the parameter of gate and up (or of up alone), (E, 2I, H), or (E, H, 2I) if transposed.
        down: name of the parameter (E, H, I), or (E, I, H).
        gated: whether ``up`` holds gate and up.
        interleaved: rows of gate and up alternate, gate first; else gate lies before up.
        scored: inputs come sorted by expert, E copies of the tokens, times their scores (Llama 4).
    """

    up: str
    down: str
    count: int
    hidden: int
    neurons: int
    gated: bool
    transposed: bool
    interleaved: bool
    scored: bool


def stack_of(module: nn.Module) -> Stack | None:
    """How a module stacks experts; None where it has no two 3-D parameters with as many experts.

    Raises:
        ModelError: it stacks something that is not understood.
    """
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters(recurse=False) if p.dim() == 3}
    if len(shapes) < 2:
        return None
    ups = [name for name in shapes if "up" in name]
    downs = [name for name in shapes if "down" in name]
    kind = type(module).__name__
    if len(shapes) != 2 or len(ups) != 1 or len(downs) != 1 or getattr(module, "has_post_expert_norm", False):
        listed = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise ModelError(f"{kind} stacks experts in a way that attar does not know: {listed}")
    up, down = ups[0], downs[0]
    count, gated = shapes[up][0], bool(getattr(module, "has_gate", "gate" in up))
    times = 2 if gated else 1
    for transposed in (False, True):
        rows, columns = reversed(shapes[up][1:]) if transposed else shapes[up][1:]
        hidden, neurons = reversed(shapes[down][1:]) if transposed else shapes[down][1:]
        if (rows, columns, shapes[down][0]) == (times * neurons, hidden, count):
            break
    else:
        raise ModelError(
            f"{kind}: {up} {list(shapes[up])} and {down} {list(shapes[down])} are not those of one mixture"
        )
    arguments = list(inspect.signature(type(module).forward).parameters)
    if len(arguments) not in (2, 4):
        raise ModelError(f"{kind} is not called with hidden states, chosen experts and their weights")
    interleaved = not getattr(module, "is_concatenated", True)
    scored = len(arguments) == 2
    return Stack(up, down, count, hidden, neurons, gated, transposed, interleaved, scored)


@dataclass(frozen=True)
class ExpertModule:
    """A module that stacks experts.

    Attributes:
        name: its path.
        leaves: names of an expert's gate (where it has one), up and down.
        unstacked: checkpoints of the family store single experts; transformers stacks them as it loads.
    """

    name: str
    stack: Stack
    leaves: tuple[str, ...]
    unstacked: bool


class Expert(nn.Module):  # type: ignore[misc]
    """One expert: ``down(act(gate(x), up(x)))``, x (T, H).

    Attributes:
        names: of its gate (None: it has none), up and down.
    """

    def __init__(
        self, linears: dict[str, nn.Linear], activation: Callable[[Tensor], Tensor], interleaved: bool
    ) -> None:
        super().__init__()
        for name, linear in linears.items():
            self.add_module(name, linear)
        gate, up, down = [None, *linears][-3:]
        assert up is not None and down is not None
        self.names = (gate, up, down)
        self.activation, self.interleaved = activation, interleaved

    def inner(self, x: Tensor) -> Tensor:
        """What down gets, (T, I)."""
        gate, up, _ = self.names
        ups: Tensor = self.get_submodule(up)(x)
        if gate is None:
            return self.activation(ups)
        both = (self.get_submodule(gate)(x), ups)
        return self.activation(torch.stack(both, -1).flatten(-2) if self.interleaved else torch.cat(both, -1))

    def forward(self, x: Tensor) -> Tensor:
        """(T, H) to (T, H)."""
        result: Tensor = self.get_submodule(self.names[2])(self.inner(x))
        return result


class Experts(nn.Module):  # type: ignore[misc]
    """Experts as modules with Linears, in the place of a module that stacks them."""

    def __init__(self, experts: list[Expert], scored: bool) -> None:
        super().__init__()
        for number, expert in enumerate(experts):
            self.add_module(str(number), expert)
        self.scored = scored

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[Expert]:
        return iter(self._modules.values())  # type: ignore[arg-type]

    def forward(self, hidden: Tensor, index: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        """The experts' weighted sum, (T, H).

        Args:
            hidden: (T, H); where experts get scored inputs (E * T, H), the result too.
            index: int64 (T, k), experts of each token; E: none.
            weights: (T, k).
        """
        result = torch.zeros_like(hidden)
        for number, expert in enumerate(self):
            if hidden.is_meta:
                expert(hidden[:1])
                continue
            tokens, slots = self.tokens(number, hidden, index)
            output = expert(hidden[tokens])
            if weights is not None:
                output = output * weights[tokens, slots, None]
            result.index_add_(0, tokens, output.to(result.dtype))
        return result

    def tokens(self, expert: int, hidden: Tensor, index: Tensor | None) -> tuple[Tensor, Tensor]:
        """Rows of ``hidden`` that go to an expert, int64, and the place of the expert among their k."""
        if index is not None:
            rows, slots = torch.where(index == expert)
            return rows, slots
        size = len(hidden) // len(self)
        rows = expert * size + hidden[expert * size : (expert + 1) * size].any(-1).nonzero().flatten()
        return rows, torch.zeros_like(rows)


def unstack(model: Any) -> Any:
    """Put :class:`Experts` in the place of every module that stacks experts. Changes and returns the model.

    Args:
        model: a transformers model, its weights on meta or real; real ones are shared, not copied.

    Raises:
        ModelError: a family stacks its experts in a way that is not understood.
    """
    for expert_module in expert_modules(model):
        module = model.get_submodule(expert_module.name)
        parent, _, leaf = expert_module.name.rpartition(".")
        setattr(
            model.get_submodule(parent), leaf, _unstacked(module, expert_module.stack, expert_module.leaves)
        )
    return model


def expert_modules(model: Any) -> list[ExpertModule]:
    """The modules of a model that stack experts.

    Raises:
        ModelError: one stacks them in a way that is not understood.
    """
    every = [(str(name), stack_of(module)) for name, module in model.named_modules()]
    stacks = [(name, stack) for name, stack in every if stack is not None]
    spelled = _spellings(model) if stacks else []
    modules = []
    for name, stack in stacks:
        ups, downs = (_spelled(spelled, f"{name}.{leaf}") for leaf in (stack.up, stack.down))
        known = len(ups) + len(downs) == 2 + stack.gated
        leaves = (*ups, *downs) if known else LEAVES if stack.gated else LEAVES[1:]
        modules.append(ExpertModule(name, stack, leaves, known))
    return modules


def _unstacked(module: Any, stack: Stack, leaves: tuple[str, ...]) -> Experts:
    """The module's experts as modules; takes its parameters away."""
    parts: dict[str, tuple[Tensor, Tensor | None]] = {}  # weights (E, N, K) and biases (E, N) by leaf
    for name in (stack.up, stack.down):
        weight, bias = getattr(module, name).detach(), getattr(module, f"{name}_bias", None)
        bias = None if bias is None else bias.detach()
        if stack.transposed:
            weight = weight.transpose(1, 2)
        if name == stack.up and stack.gated:
            for leaf, rows in zip(leaves, gate_and_up_rows(stack), strict=False):
                parts[leaf] = (weight[:, rows], None if bias is None else bias[:, rows])
        else:
            parts[leaves[-1] if name == stack.down else leaves[-2]] = (weight, bias)
    for name in (stack.up, stack.down):
        delattr(module, name)
        if hasattr(module, f"{name}_bias"):
            delattr(module, f"{name}_bias")
    activation = _activation(module, stack)
    experts = []
    for number in range(stack.count):
        linears = {
            leaf: _linear(weight[number], None if bias is None else bias[number])
            for leaf, (weight, bias) in parts.items()
        }
        experts.append(Expert(linears, activation, stack.interleaved))
    unstacked = Experts(experts, stack.scored)
    unstacked.train(module.training)
    return unstacked


def gate_and_up_rows(stack: Stack) -> tuple[slice, slice]:
    """Rows of gate and of up in the 2I rows of both."""
    if stack.interleaved:
        return slice(0, None, 2), slice(1, None, 2)
    return slice(0, stack.neurons), slice(stack.neurons, None)


def _activation(module: Any, stack: Stack) -> Callable[[Tensor], Tensor]:
    """The family's function between up and down, of gate and up (T, 2I) together as the family has them."""
    apply_gate = getattr(module, "_apply_gate", None)
    if stack.gated and apply_gate is not None:
        return apply_gate  # type: ignore[no-any-return]
    act = module.act_fn
    if not stack.gated:
        return act  # type: ignore[no-any-return]

    def gated(both: Tensor) -> Tensor:
        gate, up = both.chunk(2, -1)
        return act(gate) * up  # type: ignore[no-any-return]

    return gated


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A Linear with these very numbers."""
    linear = nn.Linear(1, 1, bias=False, device="meta")
    linear.out_features, linear.in_features = weight.shape
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


def _spellings(model: Any) -> list[tuple[str, list[str]]]:
    """Endings of stacked parameters, and what their experts' weights are called where a checkpoint of the
    family stores them one by one: ``("mlp.experts.gate_up_proj", ["gate_proj", "up_proj"])``."""
    spelled = []
    for rule in get_model_conversion_mapping(model):
        if isinstance(rule, WeightConverter) and isinstance(rule.operations[0], MergeModulelist):
            sources = [re.sub(r"\\(.)", r"\1", source) for source in rule.source_patterns]
            leaves = [source.rpartition("*.")[2].removesuffix(".weight") for source in sources]
            spelled.append((re.sub(r"\\(.)", r"\1", rule.target_patterns[0]), leaves))
    return spelled


def _spelled(spelled: list[tuple[str, list[str]]], parameter: str) -> list[str]:
    return next((leaves for ending, leaves in spelled if parameter.endswith(ending)), [])
