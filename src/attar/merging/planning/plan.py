"""A merge worked out: every tensor of the result, what goes into it, and the settings that hold there."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from attar.checkpoint.tensors import TORCH
from attar.errors import ModelError, RecipeError, SettingsError
from attar.merging.config.schema import MergeConfig, ModelReference
from attar.merging.donor import check_donor, in_words, untied
from attar.merging.member import Member
from attar.merging.methods.method import Method
from attar.merging.planning.naming import has_token_rows
from attar.merging.planning.output_config import output_config
from attar.merging.planning.parameters import find, method_of
from attar.merging.planning.tensor_map import TensorMap
from attar.merging.remarks import remarks
from attar.merging.rows import Row, Tap


class Info(Protocol):
    """What a header says of a tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        """As stored."""

    @property
    def dtype(self) -> str:
        """In safetensors' words, such as ``"BF16"``."""


class View(Protocol):
    """An opened model: a checkpoint, or something that looks like one (decoded, with an adapter added)."""

    @property
    def path(self) -> Path:
        """Its folder."""

    @property
    def name(self) -> str:
        """What a person calls it."""

    @property
    def config(self) -> dict[str, Any]:
        """The content of ``config.json``."""

    @property
    def tensors(self) -> Mapping[str, Any]:
        """Every tensor's :class:`Info` by name."""

    def load(self, name: str) -> Tensor:
        """One tensor."""


@dataclass(frozen=True)
class Input:
    """A stored tensor that goes into an output.

    Attributes:
        model: index into :attr:`Plan.models`.
        name: its name there.
    """

    model: int
    name: str


@dataclass(frozen=True)
class Output:
    """One tensor of the result.

    Attributes:
        name: its name.
        dtype: torch's name of the type that is written.
        shape: its shape (with a vocabulary: that of the new one).
        inputs: what the method gets as ``tensors``, in the order of the file; for a ``copied`` one the single
            tensor that is written as it is.
        base: what the method gets as ``base``.
        shared: the method's shared parameters by their name in YAML, complete.
        each: the method's parameters per model by their name in YAML, complete, one value an input.
        kind: ``"layer"``, ``"embedding"``, ``"head"`` or ``"other"``.
        layer: number of the output's layer, or None.
        work_dtype: torch's name of the type that the method computes in.
        aligned: whether its rows are the vocabulary's, so that a vocabulary must align the inputs (and the
            base) first.
        copied: no method is run: ``inputs[0]`` is written, in ``dtype``. So it is with tensors that are not
            floats, and with slices of a single model.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    inputs: tuple[Input, ...]
    base: Input | None
    shared: dict[str, Any]
    each: dict[str, tuple[Any, ...]]
    kind: str
    layer: int | None
    work_dtype: str
    aligned: bool = False
    copied: bool = False


@dataclass(frozen=True)
class Plan:
    """A merge, worked out from headers alone.

    Attributes:
        method: what is run.
        models: the opened models, in the order of :meth:`MergeConfig.models`.
        labels: what the config calls them.
        outputs: every tensor of the result: embeddings, layers in order, the rest; by name inside each.
        config: the result's ``config.json``.
        donor: index of the model whose other files are copied: the base, else the first.
        base: index of the base model, or None.
        notes: what a person should know and need not mend.
    """

    method: Method
    models: tuple[Any, ...]
    labels: tuple[str, ...]
    outputs: tuple[Output, ...]
    config: dict[str, Any]
    donor: int
    base: int | None = None
    notes: tuple[str, ...] = field(default=())


def make_plan(
    config: MergeConfig,
    open: Callable[[ModelReference], Any],
    vocabulary: Any = None,
    *,
    compat: str = "mergekit",
) -> Plan:
    """Work out a merge. Reads headers and configs, no weights.

    Args:
        config: one document.
        open: opens a model of the config, as a view.
        vocabulary: the merged vocabulary, where the config asks for a tokenizer; its ``size``
            becomes the rows of embedding and head.
        compat: ``"mergekit"`` computes in the config's dtype, ``"paper"`` in float32.

    Raises:
        ModelError: the models do not fit together; names the tensor, both models and both shapes.
        RecipeError: a slice or parameter of the config does not fit the models; names file and line.
        SettingsError: a parameter's value is not allowed.
    """
    method = method_of(config.method)
    references = config.models()
    members = {each: Member(index, each, open(each)) for index, each in enumerate(references)}
    found = TensorMap(config, method, members)
    rows = None if vocabulary is None else int(vocabulary.size)
    planner = _Planner(config, method, rows, compat)
    outputs = tuple(planner.output(row) for row in found.rows)
    base = None if config.base is None else members[config.base].index
    donor = list(members.values())[base if base is not None else found.lead.index]
    check_donor(donor, {each.name: each.shape for each in outputs if not each.aligned}, found)
    return Plan(
        method=method,
        models=tuple(member.view for member in members.values()),
        labels=tuple(member.label for member in members.values()),
        outputs=outputs,
        config=output_config(
            donor.view.config, _one_dtype(outputs), found.pieces, rows=rows, untied=untied(found)
        ),
        donor=donor.index,
        base=base,
        notes=(*found.notes, *remarks(config, method, donor, found)),
    )


class _Planner:
    """Makes an output of a row: shape, types, parameters."""

    def __init__(self, config: MergeConfig, method: Method, rows: int | None, compat: str) -> None:
        self._config, self._method, self._rows, self._compat = config, method, rows, compat
        self._checked: dict[str, None] = {}

    def output(self, row: Row) -> Output:
        """The output of a row."""
        taps = (*row.taps, row.base) if row.base else row.taps
        aligned = row.layer is None and all(_has_rows(row, tap) for tap in taps)
        shape = self._shape(row, taps, aligned)
        own = TORCH.get(_info(row.base or row.taps[0]).dtype, "")
        copied = row.passed or not own.startswith(("float", "bfloat"))
        kept = (row.base or row.taps[0],) if copied and not row.passed else row.taps
        shared, each = ({}, {}) if copied else self._parameters(row)
        number = own.startswith(("float", "bfloat"))
        work = "float32" if self._compat == "paper" else self._config.dtype or own
        return Output(
            name=row.name,
            dtype=(self._config.out_dtype or self._config.dtype or own) if number else own,
            shape=shape,
            inputs=tuple(Input(tap.member.index, tap.name) for tap in kept),
            base=Input(row.base.member.index, row.base.name) if row.base and not copied else None,
            shared=shared,
            each=each,
            kind=row.kind,
            layer=row.layer,
            work_dtype=("float32" if work.startswith("float8") else work) if number else own,
            aligned=aligned,
            copied=copied,
        )

    def _shape(self, row: Row, taps: tuple[Tap, ...], aligned: bool) -> tuple[int, ...]:
        """The result's shape; every tap must have it."""
        first = taps[0].member.shape(taps[0].name)
        skip = 1 if aligned and self._rows is not None else 0
        for tap in taps[1:]:
            shape = tap.member.shape(tap.name)
            if shape[skip:] == first[skip:] and len(shape) == len(first):
                continue
            hint = "only models of the same shapes can be merged"
            if aligned and shape[1:] == first[1:]:
                hint = "their vocabularies differ; align them with tokenizer: {source: union}"
            raise ModelError(
                f"{row.name}: {taps[0].member.label} has {in_words(first)}, {tap.member.label} has"
                f" {in_words(shape)}",
                hint=hint,
            )
        return (self._rows, *first[1:]) if skip and self._rows is not None else first

    def _parameters(self, row: Row) -> tuple[dict[str, Any], dict[str, tuple[Any, ...]]]:
        """The method's parameters for a row, checked."""
        levels = (row.slice.parameters, row.module.parameters, self._config.parameters)
        places: dict[str, str] = {}
        shared: dict[str, Any] = {}
        for parameter in self._method.shared:
            value = find(parameter, levels, row.name, row.depth)
            if value is None:
                raise RecipeError(
                    f"{self._config.where}: {self._method.name} needs the parameter {parameter.name!r};"
                    f" nothing sets it for {row.name}"
                )
            shared[parameter.name], places[parameter.name] = value.value, value.where
        each: dict[str, tuple[Any, ...]] = {}
        for parameter in self._method.each:
            values = []
            for tap in row.taps:
                value = find(parameter, (tap.source.parameters, *levels), tap.name, row.depth)
                if value is None:
                    raise RecipeError(
                        f"{tap.source.where}: {self._method.name} needs the parameter {parameter.name!r} of"
                        f" every model; nothing sets it for {tap.member.label}, {tap.name}"
                    )
                values.append(value.value)
                places.setdefault(parameter.name, value.where)
            each[parameter.name] = tuple(values)
        self._check(row, shared, each, places)
        return shared, each

    def _check(
        self, row: Row, shared: dict[str, Any], each: dict[str, tuple[Any, ...]], places: dict[str, str]
    ) -> None:
        """The method's own check, once for each set of values."""
        key = repr((shared, each))
        if key in self._checked:
            return
        self._checked[key] = None
        try:
            self._method.check(shared, each)
        except SettingsError as error:
            where = places.get(error.field) or self._config.where
            raise RecipeError(f"{where}: {error.message} (for {row.name})", hint=error.hint) from None


def _has_rows(row: Row, tap: Tap) -> bool:
    """Whether a tap has one row a token; a tied head is judged by the name that it gets."""
    return has_token_rows(row.name, tap.member.shape(tap.name), tap.member.rows)


def _info(tap: Tap) -> Any:
    return tap.member.view.tensors[tap.name]


def _one_dtype(outputs: tuple[Output, ...]) -> str | None:
    """The type of most of the result's numbers."""
    sizes: dict[str, int] = {}
    for output in outputs:
        if output.dtype.startswith(("float", "bfloat")):
            sizes[output.dtype] = sizes.get(output.dtype, 0) + math.prod(output.shape)
    return max(sizes, key=lambda dtype: sizes[dtype]) if sizes else None
