"""A merge's plan: every tensor of the result, its inputs, and the parameters that apply to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from attar.checkpoint.tensors import TORCH
from attar.errors import ModelError, RecipeError, SettingsError
from attar.merging.config.schema import MergeConfig, ModelReference
from attar.merging.methods.method import MergeMethod
from attar.merging.planning.model import MergeModel, ModelView
from attar.merging.planning.naming import has_token_rows
from attar.merging.planning.output_config import check_donor, config_differences, output_config, shape_text
from attar.merging.planning.parameters import find_value, method_of, unmatched_filters, unused_parameters
from attar.merging.planning.tensor_map import MappedTensor, TensorMap


@dataclass(frozen=True)
class InputTensor:
    """A stored tensor that goes into an output: ``model`` is an index into :attr:`MergePlan.models`."""

    model: int
    name: str


@dataclass(frozen=True)
class OutputTensor:
    """One tensor of the result.

    Attributes:
        dtype: torch's name of the type that is written.
        shape: with a vocabulary, the merged shape.
        inputs: the method's ``tensors``, in the order of the file; of a ``copied`` output the single tensor.
        base: the method's ``base``.
        shared: the method's shared parameters by their name in YAML, complete.
        per_model: the method's parameters per model by their name in YAML, complete, one value an input.
        kind: ``"layer"``, ``"embedding"``, ``"head"`` or ``"other"``.
        layer: the layer's number, or None.
        work_dtype: torch's name of the type that the method computes in.
        aligned: its rows are tokens; with a vocabulary, the inputs and the base are aligned first.
        copied: no method runs: ``inputs[0]`` is written in ``dtype``. So it is for tensors that are not
            floats, and for slices of the base model alone.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    inputs: tuple[InputTensor, ...]
    base: InputTensor | None
    shared: dict[str, Any]
    per_model: dict[str, tuple[Any, ...]]
    kind: str
    layer: int | None
    work_dtype: str
    aligned: bool = False
    copied: bool = False


@dataclass(frozen=True)
class MergePlan:
    """A merge, planned from headers alone.

    Attributes:
        models: the opened models, in the order of :meth:`MergeConfig.models`.
        labels: their names in the configuration.
        outputs: every tensor of the result: embeddings, layers in order, the rest; by name inside each.
        config: the result's ``config.json``.
        donor: index of the model whose config and other files the result gets: the base, else the first.
        base: index of the base model, or None.
        notes: for the user; none requires a change.
    """

    method: MergeMethod
    models: tuple[ModelView, ...]
    labels: tuple[str, ...]
    outputs: tuple[OutputTensor, ...]
    config: dict[str, Any]
    donor: int
    base: int | None = None
    notes: tuple[str, ...] = field(default=())


def make_plan(
    config: MergeConfig,
    open: Callable[[ModelReference], ModelView],
    vocabulary: Any = None,
    *,
    compat: str = "mergekit",
) -> MergePlan:
    """Plan a merge. Reads headers and configs, no weights.

    Args:
        config: one document.
        open: opens a model of the configuration.
        vocabulary: the merged vocabulary, where the configuration asks for a tokenizer; its ``size`` becomes
            the rows of embedding and head.
        compat: ``"mergekit"`` computes in the configuration's dtype, ``"paper"`` in float32.

    Raises:
        ModelError: the models do not fit together; names the tensor, both models and both shapes.
        RecipeError: a slice or parameter of the configuration does not fit the models; names file and line.
        SettingsError: a parameter's value is not allowed.
    """
    method = method_of(config.method)
    models = {
        reference: MergeModel(index, reference, open(reference))
        for index, reference in enumerate(config.models())
    }
    tensor_map = TensorMap(config, method, models)
    rows = None if vocabulary is None else int(vocabulary.size)
    planner = _OutputPlanner(config, method, rows, compat)
    outputs = tuple(planner.output(tensor) for tensor in tensor_map.tensors)
    base = None if config.base is None else models[config.base].index
    donor = models[config.base] if config.base is not None else tensor_map.lead
    check_donor(donor, {output.name: output.shape for output in outputs if not output.aligned}, tensor_map)
    return MergePlan(
        method=method,
        models=tuple(model.view for model in models.values()),
        labels=tuple(model.label for model in models.values()),
        outputs=outputs,
        config=output_config(donor.view.config, _main_dtype(outputs), tensor_map, rows=rows),
        donor=donor.index,
        base=base,
        notes=(*tensor_map.notes, *_notes(config, method, donor, tensor_map)),
    )


class _OutputPlanner:
    """Plans the outputs of a merge: shape, types, parameters."""

    def __init__(self, config: MergeConfig, method: MergeMethod, rows: int | None, compat: str) -> None:
        self._config, self._method, self._rows, self._compat = config, method, rows, compat
        self._checked: set[str] = set()

    def output(self, tensor: MappedTensor) -> OutputTensor:
        """The output of a mapped tensor."""
        aligned = tensor.layer is None and all(
            has_token_rows(tensor.name, source.model.shape(source.name), source.model.rows)
            for source in tensor.tensors
        )
        shape = self._shape(tensor, aligned)
        main = tensor.base or tensor.sources[0]
        stored = TORCH.get(main.model.view.tensors[main.name].dtype, "")
        floats = _is_float(stored)
        copied = tensor.part.base_only or not floats
        inputs = (main,) if copied else tensor.sources
        shared, per_model = ({}, {}) if copied else self._parameters(tensor)
        work = "float32" if self._compat == "paper" else self._config.dtype or stored
        return OutputTensor(
            name=tensor.name,
            dtype=(self._config.out_dtype or self._config.dtype or stored) if floats else stored,
            shape=shape,
            inputs=tuple(InputTensor(source.model.index, source.name) for source in inputs),
            base=InputTensor(main.model.index, main.name) if tensor.base and not copied else None,
            shared=shared,
            per_model=per_model,
            kind=tensor.kind,
            layer=tensor.layer,
            work_dtype=("float32" if work.startswith("float8") else work) if floats else stored,
            aligned=aligned,
            copied=copied,
        )

    def _shape(self, tensor: MappedTensor, aligned: bool) -> tuple[int, ...]:
        """The result's shape, which all inputs have; with a vocabulary, rows of tokens may differ."""
        main, *others = tensor.tensors
        shape = main.model.shape(main.name)
        skip = 1 if aligned and self._rows is not None else 0
        for source in others:
            other = source.model.shape(source.name)
            if other[skip:] == shape[skip:] and len(other) == len(shape):
                continue
            hint = "only models of the same shapes can be merged"
            if aligned and other[1:] == shape[1:]:
                hint = "their vocabularies differ; align them with tokenizer: {source: union}"
            raise ModelError(
                f"{tensor.name}: {main.model.label} has {shape_text(shape)}, {source.model.label} has"
                f" {shape_text(other)}",
                hint=hint,
            )
        return (self._rows, *shape[1:]) if skip and self._rows is not None else shape

    def _parameters(self, tensor: MappedTensor) -> tuple[dict[str, Any], dict[str, tuple[Any, ...]]]:
        """The method's parameters for a tensor, checked."""
        levels = (tensor.part.slice.parameters, tensor.module.parameters, self._config.parameters)
        where: dict[str, str] = {}
        shared: dict[str, Any] = {}
        for parameter in self._method.shared:
            value = find_value(parameter, levels, tensor.name, tensor.depth)
            if value is None:
                raise RecipeError(
                    f"{self._config.where}: {self._method.name} needs the parameter {parameter.name!r};"
                    f" nothing sets it for {tensor.name}"
                )
            shared[parameter.name], where[parameter.name] = value.value, value.where
        per_model: dict[str, tuple[Any, ...]] = {}
        for parameter in self._method.per_model:
            values = []
            for source in tensor.sources:
                value = find_value(parameter, (source.source.parameters, *levels), source.name, tensor.depth)
                if value is None:
                    raise RecipeError(
                        f"{source.source.where}: {self._method.name} needs the parameter {parameter.name!r}"
                        f" of every model; nothing sets it for {source.model.label}, {source.name}"
                    )
                values.append(value.value)
                where.setdefault(parameter.name, value.where)
            per_model[parameter.name] = tuple(values)
        self._check(tensor.name, shared, per_model, where)
        return shared, per_model

    def _check(
        self, name: str, shared: dict[str, Any], per_model: dict[str, tuple[Any, ...]], where: dict[str, str]
    ) -> None:
        """The method's own check, once for each set of values."""
        key = repr((shared, per_model))
        if key in self._checked:
            return
        self._checked.add(key)
        try:
            self._method.check(shared, per_model)
        except SettingsError as error:
            line = where.get(error.field) or self._config.where
            raise RecipeError(f"{line}: {error.message} (for {name})", hint=error.hint) from None


def _is_float(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat"))


def _main_dtype(outputs: tuple[OutputTensor, ...]) -> str | None:
    """The type of most of the result's numbers."""
    sizes: dict[str, int] = {}
    for output in outputs:
        if _is_float(output.dtype):
            sizes[output.dtype] = sizes.get(output.dtype, 0) + math.prod(output.shape)
    return max(sizes, key=lambda dtype: sizes[dtype]) if sizes else None


def _notes(
    config: MergeConfig, method: MergeMethod, donor: MergeModel, tensor_map: TensorMap
) -> Iterator[str]:
    """Settings without effect, configs that differ, slices that are copied; one line each."""
    yield from unused_parameters(config, method)
    for source in (source for part in config.slices() for source in part.again):
        yield f"{source.where}: {source.model} is given again later in the slice, and the last one counts"
    for model in tensor_map.models():
        yield from config_differences(donor, model)
    known = {parameter.name for parameter in (*method.shared, *method.per_model)}
    for part in (part for slices in tensor_map.slices.values() for part in slices):
        base = part.base
        unused = ", ".join(name for name in base.source.parameters if name in known) if base else ""
        if base and unused:
            yield f"{base.source.where}: {base.model.label} is the base model: {unused} without effect"
        if part.base_only:
            label = part.sources[0].model.label
            yield f"{part.slice.where}: the base model alone: the layers of {label} are taken as they are"
    names = [tensor.name for tensor in tensor_map.tensors]
    names += [source.name for tensor in tensor_map.tensors for source in tensor.sources]
    yield from unmatched_filters(config, names)
