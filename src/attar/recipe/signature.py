"""The signature of a verb with every setting as a keyword: completed in a notebook, checked by mypy.

The verbs take ``**settings`` and parse them; their settings classes know names, types and defaults.
:func:`describe` writes these into ``__signature__`` and ``__doc__`` of a verb, for ``help()`` and notebooks;
``scripts/document_settings.py`` prints the same signatures into ``attar/__init__.pyi``, for type checkers.
"""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin

from attar.recipe.stages import settings_classes
from attar.settings import SettingField, settings_of

Verb = TypeVar("Verb", bound=Callable[..., Any])


def describe(verb: Verb) -> Verb:
    """The verb, its signature and docstring completed by its settings; a verb without them is unchanged."""
    settings = verb_settings(verb.__name__)
    given = inspect.signature(verb)
    explicit = [p for p in given.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    if not settings or len(explicit) == len(given.parameters):
        return verb
    keywords = [keyword(setting) for setting in settings if setting.name not in given.parameters]
    verb.__signature__ = given.replace(parameters=[*explicit, *keywords])  # type: ignore[attr-defined]
    verb.__doc__ = f"{inspect.cleandoc(verb.__doc__ or '')}\n\nSettings:\n{_table(settings)}"
    return verb


def verb_settings(verb: str) -> tuple[SettingField, ...]:
    """Every setting that a verb takes as a keyword, in order."""
    return tuple(setting for cls in settings_classes(verb) for setting in settings_of(cls))


def keyword(setting: SettingField) -> inspect.Parameter:
    """The setting as a keyword-only parameter with its type and default."""
    default = inspect.Parameter.empty if setting.default is dataclasses.MISSING else setting.default
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(setting.name, kind, default=default, annotation=_annotation(setting))


def _annotation(setting: SettingField) -> Any:
    """What may be given: one of the choices, paths and texts where a source of text is named, lists for
    tuples."""
    if setting.name == "data":
        return str | Path | Sequence[str] | Any
    if not setting.choices or setting.many:
        return _accepted(setting.kind)
    kinds: list[Any] = [Literal[tuple(setting.choices)]]
    kinds += [bool] if {"true", "false"} <= set(setting.choices) else []
    return _union([*kinds, *([None] if setting.default is None else [])])


def _accepted(kind: Any) -> Any:
    members = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    return _union([Sequence[get_args(kind)[0]] if get_origin(kind) is tuple else kind for kind in members])  # type: ignore[misc]


def _union(kinds: Sequence[Any]) -> Any:
    return reduce(or_, kinds)


def _table(settings: Sequence[SettingField]) -> str:
    """The settings as lines of a docstring, those of a group under its heading."""
    lines, title = [], ""
    for setting in settings:
        if setting.title != title:
            title = setting.title
            lines.append(f"  {title}:" if title else "")
        default = "required" if setting.default is dataclasses.MISSING else setting.default_text
        choices = f"{' | '.join(map(str, setting.choices))}; " if setting.choices else ""
        text = f"{setting.name}: {setting.help} [{choices}default: {default}]"
        wrapped = textwrap.wrap(text, 100, subsequent_indent="    ", break_on_hyphens=False)
        lines += [f"    {line}" for line in wrapped]
    return "\n".join(lines)
