"""The modules and slices of a configuration, resolved to the layers of the opened models.

Without ``modules`` the whole model is one module. With them, a module called ``encoder`` takes the tensors
with the word ``encoder`` in their name; ``text_decoder`` and ``language_model`` the stack of the config's
number of layers; ``default`` what no other module takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from attar.errors import ModelError, RecipeError
from attar.merging.config.schema import LayerSlice, MergeConfig, MergeModule, MergeSource, ModelReference
from attar.merging.methods.method import MergeMethod
from attar.merging.planning.model import MergeModel
from attar.merging.planning.naming import ModelStack

_LANGUAGE_MODEL = ("text_decoder", "language_model")
_DEFAULT = "default"


@dataclass(frozen=True)
class SourceLayers:
    """Some layers of one model: ``count`` layers of ``stack``, from ``first`` on.

    Attributes:
        source: the configuration's source, with its settings.
    """

    source: MergeSource
    model: MergeModel
    stack: ModelStack
    first: int
    count: int


@dataclass(frozen=True)
class SliceLayers:
    """Some layers of the result, and the layers they are merged from.

    Attributes:
        base: the base model's layers, or None.
        base_only: the one source is the base model; its layers are copied, and no method runs.
    """

    slice: LayerSlice
    count: int
    sources: tuple[SourceLayers, ...]
    base: SourceLayers | None
    base_only: bool

    def all(self) -> tuple[SourceLayers, ...]:
        """The sources, and after them the base if there is one."""
        return (*self.sources, self.base) if self.base else self.sources


def stacks_by_module(
    modules: Sequence[MergeModule], lead: MergeModel
) -> tuple[tuple[MergeModule, ModelStack], ...]:
    """Every stack of ``lead`` with its module, in the order of the modules.

    Raises:
        RecipeError: a module matches no stack, a stack no module, or slices are given for several stacks.
    """
    pairs = [(module, stack) for module in modules for stack in _stacks_of(module, modules, lead)]
    for stack in lead.stacks:
        owners = [module for module, owned in pairs if owned is stack]
        if len(owners) > 1:
            raise RecipeError(
                f"{owners[1].where}: both {owners[0].name!r} and {owners[1].name!r} fit {stack.prefix}"
            )
        if not owners:
            raise RecipeError(
                f"{modules[0].where}: no module fits the layers {stack.prefix} of {lead.label}",
                hint="add a module 'default' for the rest",
            )
    return tuple(pairs)


def _stacks_of(module: MergeModule, modules: Sequence[MergeModule], lead: MergeModel) -> list[ModelStack]:
    matches = [stack for stack in lead.stacks if _matches(module, stack, modules, lead)]
    prefixes = ", ".join(stack.prefix for stack in lead.stacks)
    if not matches:
        raise RecipeError(
            f"{module.where}: module {module.name!r} fits no layers of {lead.label}: {prefixes}"
        )
    sliced = any(source.layers is not None for part in module.slices for source in part.sources)
    if sliced and len(matches) > 1:
        raise RecipeError(
            f"{module.where}: {lead.label} has several stacks of layers ({prefixes});"
            " which of them do the slices belong to?",
            hint="write 'modules' with a name from the stack's, such as encoder and decoder",
        )
    return matches


def _matches(
    module: MergeModule, stack: ModelStack, modules: Sequence[MergeModule], lead: MergeModel
) -> bool:
    if module.name is None:
        return True
    if module.name == _DEFAULT:
        return not any(_matches(other, stack, modules, lead) for other in modules if other.name != _DEFAULT)
    by_name = has_words(stack.prefix, module.name)
    return by_name or (module.name in _LANGUAGE_MODEL and stack is lead.stacks[0])


def has_words(name: str, words: str) -> bool:
    """Whether a dotted name contains the dotted ``words``."""
    return f".{words}." in f".{name}."


class SliceResolver:
    """Resolves slices against the opened models.

    Args:
        lead: the first model; the result has its names.

    Attributes:
        notes: base models' layers that the configuration does not name.
    """

    def __init__(
        self,
        config: MergeConfig,
        method: MergeMethod,
        models: Mapping[ModelReference, MergeModel],
        lead: MergeModel,
    ) -> None:
        self._config, self._method, self._models, self._lead = config, method, models, lead
        self.notes: list[str] = []

    def resolve(self, part: LayerSlice, stack: ModelStack) -> SliceLayers:
        """The layers of a slice.

        Raises:
            ModelError: the models have different numbers of layers, or no such stack.
            RecipeError: a range of layers or a number of models does not fit; names file and line.
        """
        sources = [self._layers(source, stack) for source in part.sources]
        for layers in sources:
            if layers.count != sources[0].count:
                raise ModelError(
                    f"{layers.model.label} has {layers.count} layers and {sources[0].model.label} has"
                    f" {sources[0].count}",
                    hint="choose layers of each with 'slices'",
                )
        base = self._base(part, sources, stack)
        if self._method.base == "member":
            sources += [base] if base is not None and base not in sources else []
            base = None
        others = [layers for layers in sources if layers is not base]
        if part.sources[0].layers is not None and not others:  # the base alone
            return SliceLayers(part, sources[0].count, tuple(sources), None, True)
        _check_distinct([*others] if base is None else [base, *others])
        self._check_count(part, len(others))
        return SliceLayers(part, sources[0].count, tuple(others), base, False)

    def _layers(self, source: MergeSource, stack: ModelStack) -> SourceLayers:
        model = self._models[source.model]
        model_stack = model.stack_like(stack, self._lead)
        first, end = source.layers or (0, model_stack.count)
        if end > model_stack.count:
            raise RecipeError(
                f"{source.where}: layer_range is [{first}, {end}], but {model.label} has "
                f"{model_stack.count} layers (0 to {model_stack.count - 1})"
            )
        return SourceLayers(source, model, model_stack, first, end - first)

    def _base(
        self, part: LayerSlice, sources: Sequence[SourceLayers], stack: ModelStack
    ) -> SourceLayers | None:
        """The base model's layers: its range as a source, else the range that all sources have."""
        base = part.base or self._config.base
        if base is None or self._method.base == "unused":
            return None
        for layers in sources:
            if layers.source.model == base:
                return layers
        common = _common_range(part.sources, base)
        if common is not None:
            self.notes.append(
                f"{part.where}: the base model {base} is no source of this slice; its layers {common[0]} to"
                f" {common[1] - 1} are taken"
            )
        return self._layers(MergeSource(base, common, {}, part.where), stack)

    def _check_count(self, part: LayerSlice, count: int) -> None:
        """Refuse a number of models that the method does not take."""
        minimum, maximum = self._method.models
        if minimum <= count and (maximum is None or count <= maximum):
            return
        exact = minimum == maximum
        allowed = f"at least {minimum}" if maximum is None else f"{minimum} to {maximum}"
        allowed = f"exactly {minimum}" if exact else allowed
        models = "model" if (minimum if exact or maximum is None else maximum) == 1 else "models"
        besides = " besides the base" if self._method.base in ("required", "optional") else ""
        raise RecipeError(f"{part.where}: {self._method.name} takes {allowed} {models}{besides}, not {count}")


def _common_range(sources: Sequence[MergeSource], base: ModelReference) -> tuple[int, int] | None:
    """The range of layers that all sources have; None: all layers."""
    for source in sources:
        if source.layers != sources[0].layers:
            raise RecipeError(
                f"{source.where}: the sources have different layers, so the base model {base} must be a"
                " source too",
                hint=f"add - model: {base} with the layer_range that belongs to these",
            )
    return sources[0].layers


def _check_distinct(sources: Sequence[SourceLayers]) -> None:
    """Refuse one folder under two names."""
    labels: dict[tuple[str, str | None], str] = {}
    for layers in sources:
        key = (str(layers.model.view.path), layers.model.reference.lora)
        if key in labels:
            raise RecipeError(
                f"{layers.source.where}: {layers.model.label} and {labels[key]} are one model under two names"
            )
        labels[key] = layers.model.label
