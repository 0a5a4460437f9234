"""Keys of a YAML mapping, taken out one by one with their kinds checked; an unknown one names the nearest."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from attar.errors import RecipeError, did_you_mean
from attar.merging.config.schema import Filtered, Scalar, Setting
from attar.yaml import Located, YamlEntry


class Fields:
    """The keys of one mapping.

    Args:
        located: what should be a mapping.
        what: the mapping in words, for errors: ``a slice``.
        known: keys that are allowed.
        instead: for keys that are not, and that people write all the same: what to do.

    Raises:
        RecipeError: it is no mapping, or has another key.
    """

    def __init__(
        self, located: Located, what: str, known: Sequence[str], instead: Mapping[str, str] | None = None
    ) -> None:
        self.where, self.what = located.where, what
        if not isinstance(located.value, dict):
            keys = ", ".join(known)
            raise RecipeError(f"{located.where}: {what} must be a mapping with the keys {keys}")
        self.entries: dict[str, YamlEntry] = located.value
        for name, entry in self.entries.items():
            if name in known:
                continue
            hint = (instead or {}).get(name)
            tail = "" if hint else did_you_mean(name, known)
            raise RecipeError(f"{entry.where}: unknown key {name!r} in {what}{tail}", hint=hint)

    def get(self, name: str) -> Located | None:
        """A key's value; None where the key is missing or has none."""
        entry = self.entries.get(name)
        return None if entry is None or entry.value.value is None else entry.value

    def place(self, name: str) -> str:
        """``file:line`` of a key, or of the mapping where the key is missing."""
        return self.entries[name].where if name in self.entries else self.where

    def need(self, name: str) -> Located:
        """A key's value.

        Raises:
            RecipeError: it is missing.
        """
        located = self.get(name)
        if located is None:
            raise RecipeError(f"{self.place(name)}: {self.what} needs the key {name!r}")
        return located

    def text(self, name: str) -> str | None:
        """A text, or None where the key is missing."""
        located = self.get(name)
        if located is None:
            return None
        if not isinstance(located.value, str) or not located.value.strip():
            raise RecipeError(f"{located.where}: {name} is {located.plain()!r}, but must be a text")
        return located.value

    def listed(self, name: str) -> list[Located]:
        """A list with at least one item."""
        located = self.need(name)
        if not isinstance(located.value, list) or not located.value:
            raise RecipeError(f"{self.place(name)}: {name} must be a list with at least one item")
        return located.value

    def number(self, name: str, least: int) -> int | None:
        """A whole number, or None where the key is missing."""
        located = self.get(name)
        if located is None:
            return None
        if isinstance(located.value, bool) or not isinstance(located.value, int) or located.value < least:
            raise RecipeError(
                f"{located.where}: {name} is {located.plain()!r}, but must be a whole number, {least} or more"
            )
        return located.value

    def flag(self, name: str, default: bool) -> bool:
        """true or false."""
        located = self.get(name)
        if located is None:
            return default
        if not isinstance(located.value, bool):
            raise RecipeError(f"{located.where}: {name} is {located.plain()!r}, but must be true or false")
        return located.value


def parse_setting(name: str, located: Located) -> Setting:
    """A parameter's value: a scalar, a gradient, or a list of ``{filter, value}``.

    Raises:
        RecipeError: it has none of these forms.
    """
    value = located.value
    if isinstance(value, dict):
        raise RecipeError(
            f"{located.where}: {name} is a mapping",
            hint=f"a filter stands in a list: {name}: [{{filter, value}}]",
        )
    if not isinstance(value, list):
        return Setting(_scalar(name, located), located.where)
    if not value:
        raise RecipeError(f"{located.where}: {name} is an empty list")
    filtered = [isinstance(item.value, dict) for item in value]
    if any(filtered) and not all(filtered):
        item = value[filtered.index(not filtered[0])]
        raise RecipeError(
            f"{item.where}: {name} mixes numbers with filters", hint="write the number as - value: NUMBER"
        )
    if all(filtered):
        return Setting(tuple(_filtered(name, item) for item in value), located.where)
    return Setting(tuple(_scalar(name, item) for item in value), located.where)


def _filtered(name: str, located: Located) -> Filtered:
    fields = Fields(located, f"a filter of {name}", ("filter", "value"))
    value = fields.need("value")
    if isinstance(value.value, list):
        if not value.value:
            raise RecipeError(f"{value.where}: {name} is an empty list")
        points = tuple(_scalar(name, item) for item in value.value)
        return Filtered(fields.text("filter"), points, located.where)
    return Filtered(fields.text("filter"), _scalar(name, value), located.where)


def _scalar(name: str, located: Located) -> Scalar:
    value = located.value
    if value is None:
        raise RecipeError(f"{located.where}: {name} has no value")
    if isinstance(value, dict | list):
        raise RecipeError(f"{located.where}: {name} holds {located.plain()!r} where one value belongs")
    if isinstance(value, float) and not math.isfinite(value):
        raise RecipeError(f"{located.where}: {name} is {value!r}, but must be a finite number")
    scalar: Scalar = value
    return scalar
