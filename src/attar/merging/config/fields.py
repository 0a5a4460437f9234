"""Values of a merge's YAML, checked by kind: the keys of a mapping, parameters, model references.

A model is written ``path[@revision][+adapter[@revision]]``, or as a mapping:

    org/name                             a hub id, a folder, attar:tiny, or the name of an earlier document
    org/name@main                        at a revision
    org/name+org/adapter                 with a LoRA adapter added first
    {model: org/name, lora: org/adapter}
    {model: {path: org/name, revision: main}}
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from attar.errors import RecipeError, did_you_mean
from attar.merging.config.schema import FilteredValue, ModelReference, ParameterSetting, Scalar
from attar.yaml import Located, YamlEntry, scalar

_FORM = "a model is written path[@revision][+adapter[@revision]]"
_MODEL_HINTS = {
    "override_architecture": "layers are recognised by the tensors' names; no list of architectures is needed"
}


class MappingReader:
    """The keys of one mapping, each read with its kind checked.

    Args:
        what: its name in errors, such as ``a slice``.
        hints: for keys that are not allowed but often written: what to do instead.
        anchors: another key is left out where an anchor that is used stands in its value.

    Raises:
        RecipeError: it is no mapping, or has another key; names the nearest known one.
    """

    def __init__(
        self,
        located: Located,
        what: str,
        known: Sequence[str],
        hints: Mapping[str, str] | None = None,
        *,
        anchors: bool = False,
    ) -> None:
        self.where, self.what = located.where, what
        if not isinstance(located.value, dict):
            keys = ", ".join(known)
            raise RecipeError(f"{located.where}: {what} must be a mapping with the keys {keys}")
        entries: dict[str, YamlEntry] = located.value
        self.entries = {name: entry for name, entry in entries.items() if name in known}
        for name, entry in entries.items():
            if name in known and entry.again:
                raise RecipeError(f"{entry.where}: key {name!r} is given twice (first at {entry.again})")
            if name not in known and not (anchors and entry.anchored):
                hint = (hints or {}).get(name)
                tail = "" if hint else did_you_mean(name, known)
                raise RecipeError(f"{entry.where}: unknown key {name!r} in {what}{tail}", hint=hint)

    def get(self, name: str) -> Located | None:
        """A key's value; None where the key is missing or empty."""
        entry = self.entries.get(name)
        return None if entry is None or entry.value.value is None else entry.value

    def where_of(self, name: str) -> str:
        """``file:line`` of a key, or of the mapping where the key is missing."""
        return self.entries[name].where if name in self.entries else self.where

    def need(self, name: str) -> Located:
        """A required key's value.

        Raises:
            RecipeError: it is missing.
        """
        located = self.get(name)
        if located is None:
            raise RecipeError(f"{self.where_of(name)}: {self.what} needs the key {name!r}")
        return located

    def text(self, name: str) -> str | None:
        """A text, or None where the key is missing."""
        located = self.get(name)
        if located is None:
            return None
        if not isinstance(located.value, str) or not located.value.strip():
            raise _wrong(name, located, "a text")
        return located.value

    def items(self, name: str) -> list[Located]:
        """A list with at least one item."""
        located = self.need(name)
        if not isinstance(located.value, list) or not located.value:
            raise RecipeError(f"{self.where_of(name)}: {name} must be a list with at least one item")
        return located.value

    def integer(self, name: str, minimum: int) -> int | None:
        """A whole number, or None where the key is missing."""
        located = self.get(name)
        if located is None:
            return None
        if isinstance(located.value, bool) or not isinstance(located.value, int) or located.value < minimum:
            raise _wrong(name, located, f"a whole number, {minimum} or more")
        return located.value

    def flag(self, name: str, default: bool) -> bool:
        """true or false."""
        located = self.get(name)
        if located is None:
            return default
        if not isinstance(located.value, bool):
            raise _wrong(name, located, "true or false")
        return located.value


def _wrong(name: str, located: Located, allowed: str) -> RecipeError:
    return RecipeError(f"{located.where}: {name} is {located.plain()!r}, but must be {allowed}")


def parse_reference(located: Located) -> ModelReference:
    """A model in any of its forms.

    Raises:
        RecipeError: it is empty, has two ``+``, two ``@`` in one part, or an unknown key.
    """
    if isinstance(located.value, dict):
        fields = MappingReader(located, "a model", ("model", "lora"), _MODEL_HINTS)
        adapter = fields.get("lora")
        path = _path(fields.need("model"))
        return ModelReference(path, _path(adapter) if adapter else None, located.where)
    model, *adapters = _model_text(located).split("+")
    if len(adapters) > 1:
        raise RecipeError(
            f"{located.where}: the model {located.value!r} has more than one '+'",
            hint="add one adapter here and the next one in a separate document",
        )
    lora = _with_revision(adapters[0], located) if adapters else None
    return ModelReference(_with_revision(model, located), lora, located.where)


def model_of(fields: MappingReader) -> ModelReference:
    """The key ``model``, and ``revision`` next to it, which means nothing for a folder on this machine.

    Raises:
        RecipeError: both name a revision, and not the same.
    """
    reference, revision = parse_reference(fields.need("model")), fields.text("revision")
    if revision is None or Path(reference.model).expanduser().exists():
        return reference
    path, _, stated = reference.model.partition("@")
    if stated not in ("", revision):
        raise RecipeError(
            f"{fields.where_of('revision')}: revision is {revision!r}, but the model is at {stated!r}"
        )
    return replace(reference, model=_with_revision(f"{path}@{revision}", fields.need("revision")))


def _path(located: Located) -> str:
    """A text, or ``{path, revision}``, as ``path@revision``."""
    if isinstance(located.value, dict):
        fields = MappingReader(located, "a model's path", ("path", "revision"))
        path, revision = _model_text(fields.need("path")), fields.get("revision")
        return f"{path}@{_model_text(revision)}" if revision else path
    text = _model_text(located)
    if "+" in text:
        raise RecipeError(f"{located.where}: {text!r}: in a mapping the adapter is the key 'lora'")
    return _with_revision(text, located)


def _model_text(located: Located) -> str:
    if isinstance(located.value, str) and located.value:
        return located.value
    raise RecipeError(f"{located.where}: {located.plain()!r} is no model", hint=_FORM)


def _with_revision(text: str, located: Located) -> str:
    """A path with at most one revision."""
    path, at, revision = text.strip().partition("@")
    if not path or "@" in revision or (at and not revision):
        raise RecipeError(f"{located.where}: {located.plain()!r} is no model", hint=_FORM)
    return text.strip()


def parse_setting(name: str, located: Located) -> ParameterSetting:
    """A parameter: a scalar, a gradient, or a list of ``{filter, value}``.

    Raises:
        RecipeError: it has none of these forms.
    """
    value = located.value
    if isinstance(value, dict):
        raise RecipeError(
            f"{located.where}: {name} is a mapping",
            hint=f"write filters as a list: {name}: [{{filter, value}}]",
        )
    if not isinstance(value, list):
        return ParameterSetting(_scalar(name, located), located.where)
    filtered = [isinstance(item.value, dict) for item in value]
    if any(filtered) and not all(filtered):
        item = value[filtered.index(not filtered[0])]
        raise RecipeError(
            f"{item.where}: {name} mixes numbers with filters", hint="write the number as - value: NUMBER"
        )
    if value and all(filtered):
        return ParameterSetting(tuple(_filtered(name, item) for item in value), located.where)
    return ParameterSetting(_gradient(name, located), located.where)


def _filtered(name: str, located: Located) -> FilteredValue:
    fields = MappingReader(located, f"a filter of {name}", ("filter", "value"))
    inner = fields.need("value")
    value = _gradient(name, inner) if isinstance(inner.value, list) else _scalar(name, inner)
    return FilteredValue(fields.text("filter"), value, located.where)


def _gradient(name: str, located: Located) -> tuple[Scalar, ...]:
    if not located.value:
        raise RecipeError(f"{located.where}: {name} is an empty list")
    return tuple(_scalar(name, item) for item in located.value)


def _scalar(name: str, located: Located) -> Scalar:
    value: Scalar = located.value
    if isinstance(value, str) and isinstance(number := scalar(value.strip()), int | float):
        value = number  # "0.5", which mergekit takes for a number too
    if located.value is None:
        raise RecipeError(f"{located.where}: {name} has no value")
    if isinstance(located.value, dict | list):
        raise RecipeError(f"{located.where}: {name} holds {located.plain()!r} where one value belongs")
    if isinstance(value, float) and not math.isfinite(value):
        raise RecipeError(f"{located.where}: {name} is {value!r}, but must be a finite number")
    return value
