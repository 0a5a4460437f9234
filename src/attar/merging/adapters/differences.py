"""Two models side by side: what each pair of stored tensors is to an adapter.

linear     the weight of a Linear (GPT-2's, stored transposed, too): an update of low rank
bias       the bias of such a Linear
whole      the parameter of another module without children: embedding, head, norm
other      anything else, such as the experts of a mixture in one tensor: no adapter of peft's covers it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from attar.checkpoint.parts import part_of
from attar.errors import ModelError
from attar.models.load import empty_model
from attar.models.stored import stored_names


@dataclass(frozen=True)
class Part:
    """A tensor that both models have.

    Attributes:
        base: its name in the base.
        tuned: its name in the tuned model.
        module: the module that it belongs to, as transformers names it; empty for ``other``.
        leaf: its name in that module.
        kind: ``linear``, ``bias``, ``whole`` or ``other``.
        saved: whether it can be saved whole.
    """

    base: str
    tuned: str
    module: str
    leaf: str
    kind: str

    @property
    def saved(self) -> bool:
        """Whether an adapter can hold it whole."""
        return self.kind in ("bias", "whole")


@dataclass(frozen=True)
class Pair:
    """Two models of the same tensors and shapes.

    Attributes:
        tuned: opened view.
        base: opened view.
        parts: every tensor, in the order of the model's modules, then by name.
        transposed: Linear weights are stored (inputs, outputs).
        tied: modules that share one tensor (embedding and head), the stored one first; or empty.
        modules: names of all modules.
    """

    tuned: Any
    base: Any
    parts: tuple[Part, ...]
    transposed: bool
    tied: tuple[str, ...]
    modules: tuple[str, ...]


def pair(tuned: Any, base: Any) -> Pair:
    """Put two opened models side by side. Reads headers, no weights.

    Raises:
        ModelError: transformers does not know the architecture, or a tensor is in one model alone or of
            another shape; names it.
    """
    skeleton = empty_model(base.config)
    names = stored_names(skeleton, base, strict=False)
    partners = stored_names(skeleton, tuned, strict=False)
    parts = []
    for parameter, stored in names.items():
        if parameter not in partners:
            raise _alone(stored, base, tuned)
        module, _, leaf = parameter.rpartition(".")
        kind = _kind(skeleton.get_submodule(module), parameter, leaf)
        parts.append(Part(stored, partners[parameter], module, leaf, kind))
    parts += _others(parts, tuned, base)
    for part in parts:
        shapes = [tuple(view.tensors[name].shape) for view, name in ((tuned, part.tuned), (base, part.base))]
        if shapes[0] != shapes[1]:
            raise ModelError(
                f"{part.base!r} has shape {shapes[0]} in {tuned.name} and {shapes[1]} in {base.name}",
                hint="an adapter needs both models in the same shapes",
            )
    transposed = any(isinstance(module, Conv1D) for module in skeleton.modules())
    modules = tuple(name for name, _ in skeleton.named_modules())
    return Pair(tuned, base, tuple(parts), transposed, _tied(skeleton, names), modules)


def _kind(module: nn.Module, parameter: str, leaf: str) -> str:
    if next(module.children(), None) is not None or len(module.get_parameter(leaf).shape) > 2:
        return "other"
    if isinstance(module, nn.Linear | Conv1D) and part_of(parameter) not in ("embedding", "head"):
        return "linear" if leaf == "weight" else "bias"
    return "whole"


def _others(parts: Sequence[Part], tuned: Any, base: Any) -> list[Part]:
    """Stored tensors that are no parameter of transformers' model; a tied head that only one model stores
    does not count."""
    known = frozenset(part.base for part in parts), frozenset(part.tuned for part in parts)
    spare = [
        sorted(name for name in view.tensors if name not in names)
        for view, names in zip((base, tuned), known, strict=True)
    ]
    both = [name for name in spare[0] if name in tuned.tensors and name not in known[1]]
    for view, other, names in ((base, tuned, spare[0]), (tuned, base, spare[1])):
        for name in names:
            tied = view.config.get("tie_word_embeddings") and part_of(name) == "head"
            if name not in both and not tied:
                raise _alone(name, view, other)
    return [Part(name, name, "", "", "other") for name in both]


def _alone(name: str, view: Any, other: Any) -> ModelError:
    return ModelError(
        f"{view.name} has a tensor {name!r}, and {other.name} does not",
        hint="an adapter needs both models of one architecture",
    )


def _tied(skeleton: Any, names: dict[str, str]) -> tuple[str, ...]:
    """Names of embedding and head where they are one parameter."""
    first, last = skeleton.get_input_embeddings(), skeleton.get_output_embeddings()
    if first is None or last is None or first.weight is not last.weight:
        return ()
    found = {id(module): name for name, module in skeleton.named_modules()}
    both = (found[id(first)], found[id(last)])
    return both if f"{both[0]}.weight" in names else both[::-1]


def saved_modules(found: Pair, parts: Sequence[Part]) -> dict[str, dict[str, str]]:
    """Modules to save whole, each with the tuned model's tensor for each of its parameters.

    A module whose name another module's ends with is left out: peft would take that one too.
    """
    saved: dict[str, dict[str, str]] = {}
    for part in parts:
        if any(name != part.module and name.endswith(part.module) for name in found.modules):
            continue
        saved[part.module] = {each.leaf: each.tuned for each in found.parts if each.module == part.module}
    if found.tied and found.tied[0] in saved:
        own = {each.leaf: each.tuned for each in found.parts if each.module == found.tied[1]}
        saved[found.tied[1]] = {**own, "weight": saved[found.tied[0]]["weight"]}
    return saved
