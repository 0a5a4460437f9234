"""Two models of one architecture: how an adapter can hold the difference of each pair of stored tensors.

linear     the weight of a Linear (also stored transposed, as GPT-2's): an update of low rank
bias       the bias of such a Linear
whole      the parameter of another module without children: embedding, head, norm
other      anything else, such as the experts of a mixture in one tensor: no adapter of peft's holds it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from attar.checkpoint.parts import part_of
from attar.errors import ModelError
from attar.merging.planning.model import ModelView
from attar.models.loading.empty import empty_model
from attar.models.loading.stored import stored_names


@dataclass(frozen=True)
class TensorPair:
    """A tensor that both models have.

    Attributes:
        module: its module, as transformers names it; empty for ``other``.
        leaf: its name in that module.
        kind: ``linear``, ``bias``, ``whole`` or ``other``.
    """

    base: str
    tuned: str
    module: str
    leaf: str
    kind: str

    @property
    def can_be_saved(self) -> bool:
        """Whether an adapter can hold the tensor itself."""
        return self.kind in ("bias", "whole")


@dataclass(frozen=True)
class ModelPair:
    """Two models of the same tensors and shapes.

    Attributes:
        tensors: in the order of the model's modules, then by name.
        transposed: Linear weights are stored (inputs, outputs).
        tied: modules that share one tensor (embedding and head), the stored one first; or empty.
    """

    tuned: ModelView
    base: ModelView
    tensors: tuple[TensorPair, ...]
    transposed: bool
    tied: tuple[str, ...]
    modules: tuple[str, ...]


def pair_models(tuned: ModelView, base: ModelView) -> ModelPair:
    """Match the tensors of two opened models. Reads headers, no weights.

    Raises:
        ModelError: transformers does not know the architecture, or a tensor is in one model alone or of
            another shape; names it.
    """
    meta_model = empty_model(base.config)
    base_names = stored_names(meta_model, base, strict=False)
    tuned_names = stored_names(meta_model, tuned, strict=False)
    pairs = []
    for parameter, stored in base_names.items():
        if parameter not in tuned_names:
            raise _unpaired(stored, base, tuned)
        module, _, leaf = parameter.rpartition(".")
        kind = _kind(meta_model.get_submodule(module), parameter, leaf)
        pairs.append(TensorPair(stored, tuned_names[parameter], module, leaf, kind))
    pairs += _other_pairs(pairs, tuned, base)
    for pair in pairs:
        shapes = [tuple(view.tensors[name].shape) for view, name in ((tuned, pair.tuned), (base, pair.base))]
        if shapes[0] != shapes[1]:
            raise ModelError(
                f"{pair.base!r} has shape {shapes[0]} in {tuned.name} and {shapes[1]} in {base.name}",
                hint="an adapter needs both models in the same shapes",
            )
    transposed = any(isinstance(module, Conv1D) for module in meta_model.modules())
    modules = tuple(name for name, _ in meta_model.named_modules())
    return ModelPair(tuned, base, tuple(pairs), transposed, _tied(meta_model, base_names), modules)


def _kind(module: nn.Module, parameter: str, leaf: str) -> str:
    if next(module.children(), None) is not None or len(module.get_parameter(leaf).shape) > 2:
        return "other"
    if isinstance(module, nn.Linear | Conv1D) and part_of(parameter) not in ("embedding", "head"):
        return "linear" if leaf == "weight" else "bias"
    return "whole"


def _other_pairs(pairs: Sequence[TensorPair], tuned: ModelView, base: ModelView) -> list[TensorPair]:
    """Stored tensors that are no parameter of transformers' model, without a tied head that only one model
    stores."""
    base_names, tuned_names = {pair.base for pair in pairs}, {pair.tuned for pair in pairs}
    base_rest = sorted(name for name in base.tensors if name not in base_names)
    tuned_rest = sorted(name for name in tuned.tensors if name not in tuned_names)
    both = [name for name in base_rest if name in tuned.tensors and name not in tuned_names]
    for view, other, names in ((base, tuned, base_rest), (tuned, base, tuned_rest)):
        for name in names:
            tied = view.config.get("tie_word_embeddings") and part_of(name) == "head"
            if name not in both and not tied:
                raise _unpaired(name, view, other)
    return [TensorPair(name, name, "", "", "other") for name in both]


def _unpaired(name: str, view: ModelView, other: ModelView) -> ModelError:
    return ModelError(
        f"{view.name} has a tensor {name!r}, and {other.name} does not",
        hint="an adapter needs both models of one architecture",
    )


def _tied(meta_model: Any, stored: dict[str, str]) -> tuple[str, ...]:
    """Names of embedding and head where they are one parameter."""
    first, last = meta_model.get_input_embeddings(), meta_model.get_output_embeddings()
    if first is None or last is None or first.weight is not last.weight:
        return ()
    names = {id(module): name for name, module in meta_model.named_modules()}
    tied = (names[id(first)], names[id(last)])
    return tied if f"{tied[0]}.weight" in stored else tied[::-1]


def saved_modules(models: ModelPair, pairs: Sequence[TensorPair]) -> dict[str, dict[str, str]]:
    """The modules of ``pairs`` to save whole, each with the tuned model's tensor for each of its parameters.

    A module whose name ends another module's name is left out: peft would replace that one too.
    """
    saved: dict[str, dict[str, str]] = {}
    for pair in pairs:
        if not any(name != pair.module and name.endswith(pair.module) for name in models.modules):
            saved[pair.module] = _parameters(models, pair.module)
    if models.tied and models.tied[0] in saved:
        stored, other = models.tied
        saved[other] = {**_parameters(models, other), "weight": saved[stored]["weight"]}
    return saved


def _parameters(models: ModelPair, module: str) -> dict[str, str]:
    """The tuned model's tensors of a module by their names in it."""
    return {pair.leaf: pair.tuned for pair in models.tensors if pair.module == module}
