"""Where settings came from, so that an error speaks the language of the person who wrote them.

The same dataclass is filled from a recipe (errors name file and line), from command-line options (errors name
``--group-size``) and from Python keywords (errors name ``group_size``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from attar.errors import RecipeError, SettingsError, UsageError, nearest


class Origin(Protocol):
    """Makes the error for a setting that is unknown or has a wrong value."""

    @property
    def text(self) -> bool:
        """Whether every value arrives as text and is to be read as one (the command line)."""

    @property
    def resolved(self) -> bool:
        """Whether defaults may be written out for options that the chosen method does not take (recipes)."""

    def unknown(self, name: str, known: Sequence[str]) -> UsageError:
        """The error for a setting that does not exist."""

    def wrong(self, name: str, value: object, allowed: str, hint: str | None = None) -> UsageError:
        """The error for a value that is not allowed."""


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """``; did you mean 'x'?``, or the list of what is known when nothing is close."""
    close = nearest(name, known)
    return f"; did you mean {close!r}?" if close else f"; known: {', '.join(known) or 'none'}"


@dataclass(frozen=True)
class PythonOrigin:
    """Keyword arguments of a Python verb.

    Args:
        verb: name of the function.
    """

    verb: str
    text: bool = False
    resolved: bool = False

    def unknown(self, name: str, known: Sequence[str]) -> UsageError:
        """Name the keyword and the verb."""
        return UsageError(f"unknown setting {name!r} of {self.verb}{did_you_mean(name, known)}")

    def wrong(self, name: str, value: object, allowed: str, hint: str | None = None) -> UsageError:
        """Name the keyword."""
        return _settings_error(name, value, allowed, hint)


@dataclass(frozen=True)
class CommandOrigin:
    """Options of the command line.

    Args:
        verb: name of the verb.
    """

    verb: str
    text: bool = True
    resolved: bool = False

    def unknown(self, name: str, known: Sequence[str]) -> UsageError:
        """Name the option and the verb."""
        options = [option(each) for each in known]
        return UsageError(
            f"no option {option(name)!r} in attar {self.verb}{did_you_mean(option(name), options)}"
        )

    def wrong(self, name: str, value: object, allowed: str, hint: str | None = None) -> UsageError:
        """Name the option, and point to the verb's help."""
        return _settings_error(option(name), value, allowed, hint or f"attar {self.verb} --help")


@dataclass(frozen=True)
class RecipeOrigin:
    """Keys of a mapping in a recipe.

    Args:
        what: the mapping in words, e.g. ``stage 'prune'``.
        where: ``file:line`` of the mapping.
        places: ``file:line`` of each key.
        extra: keys that are allowed beside the settings; named when a misspelt key is close to one.
    """

    what: str
    where: str
    places: Mapping[str, str]
    extra: Sequence[str] = field(default=())
    text: bool = False
    resolved: bool = True

    def unknown(self, name: str, known: Sequence[str]) -> UsageError:
        """Name file, line, key and the nearest key."""
        tail = did_you_mean(name, [*known, *self.extra])
        return RecipeError(f"{self.places.get(name, self.where)}: unknown key {name!r} in {self.what}{tail}")

    def wrong(self, name: str, value: object, allowed: str, hint: str | None = None) -> UsageError:
        """Name file, line, key, value and what is allowed."""
        place = self.places.get(name, self.where)
        return RecipeError(f"{place}: {name} is {value!r}, but must be {allowed}", hint=hint)


def option(name: str) -> str:
    """The command-line spelling of a setting: ``group_size`` becomes ``--group-size``."""
    return "--" + name.replace("_", "-")


def _settings_error(name: str, value: object, allowed: str, hint: str | None) -> SettingsError:
    error = SettingsError(name, value, allowed)
    error.hint = hint
    return error
