"""Every error a user can cause, in one tree.

    AttarError                 exit code 1
    ├── UsageError             exit code 2: the command, an option or a recipe is wrong
    │   ├── SettingsError      a setting has a value that is not allowed
    │   │   └── GrammarError   a grammar takes more than is allowed to hold a text to it
    │   └── RecipeError        a recipe file: names file, line and key
    ├── CheckpointError        a model folder is missing, incomplete or damaged
    ├── ModelError             the architecture does not allow the request
    ├── MemoryNeededError      a model is larger than the memory that is free
    ├── DataError              the text is missing, empty or of the wrong shape
    ├── NumericsError          NaN, infinity or a singular matrix
    ├── LicenceError           a licence forbids the work, and nobody accepted it
    ├── EndpointError          a teacher's endpoint refuses, fails, or would cost too much
    ├── OutputError            the result cannot be written
    ├── SweepError             some runs of a sweep failed, the others are done
    └── MissingExtraError      an optional package is not installed

A message is one line that names file, field and problem; ``hint`` names the remedy. Any other exception is a
bug of attar.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class AttarError(Exception):
    """Base of every error that a user can cause.

    Args:
        message: one line: file or field, and the problem.
        hint: one line: the remedy.

    Attributes:
        kind: a short name of the reason, for programs; None where the class is specific enough.
    """

    exit_code = 1
    kind: str | None = None

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class UsageError(AttarError):
    """The command was used wrongly."""

    exit_code = 2


class SettingsError(UsageError):
    """A setting has a value that is not allowed; ``allowed`` describes the allowed ones."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field} is {value!r}, but must be {allowed}")
        self.field = field
        self.value = value
        self.allowed = allowed


class GrammarError(SettingsError):
    """A grammar needs more time or memory than is allowed, or accepts no text."""

    kind = "grammar_too_complex"


class RecipeError(UsageError):
    """A recipe file is wrong; the message starts with ``file:line:``."""


class CheckpointError(AttarError):
    """A model folder is missing, incomplete or damaged."""


class ModelError(AttarError):
    """The architecture does not allow the request, or lacks a part that is needed."""


class MemoryNeededError(AttarError):
    """A model is larger than the memory that is free; names both amounts."""


class DataError(AttarError):
    """The text is missing, empty or of the wrong shape."""


class NumericsError(AttarError):
    """NaN, infinity or a singular matrix where numbers were expected."""


class LicenceError(AttarError):
    """A licence forbids the work; names its clause and date, and how to go on with a right of one's own."""

    kind = "licence"


class EndpointError(AttarError):
    """A teacher's endpoint refuses, fails again and again, or would cost more than the budget."""


class OutputError(AttarError):
    """The result cannot be written: it exists, the disk is full, or the folder is read-only."""


class SweepError(AttarError):
    """Some runs of a sweep failed; the others are done."""


class MissingExtraError(AttarError):
    """An optional package (import name) is not installed; ``extra`` brings it, or pip by its name."""

    def __init__(self, package: str, extra: str | None) -> None:
        from attar.extras import install_command

        hint = f"pip install {package}" if extra is None else install_command(extra)
        super().__init__(f"the package {package!r} is not installed", hint=hint)


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word closest to a misspelt one, or None when none is close."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return close[0] if close else None


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """``; did you mean 'x'?``, or the list of known names when none is close."""
    close = nearest(name, known)
    return f"; did you mean {close!r}?" if close else f"; known: {', '.join(known) or 'none'}"
