"""One settings dataclass for recipes, command-line options, Python keywords and documentation.

A settings class is a frozen dataclass; nested ones count as their fields (attar/options.py), and
:func:`attar.options.setting` makes a field. Ranges are checked in ``__post_init__`` by raising
:class:`attar.errors.SettingsError`. Field types: ``int``,
``float``, ``str``, ``bool``, ``tuple[T, ...]`` of these, and ``T | None``.

An origin makes the errors: a recipe's name file and line, the command line's ``--group-size``, Python's
``group_size``.
"""

from __future__ import annotations

import dataclasses
import numbers
import types
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, Union, get_args, get_origin

from attar.errors import RecipeError, SettingsError, UsageError, did_you_mean, nearest
from attar.old_names import old_name
from attar.options import OptionField, default_of, differing, flatten, listed, misplaced, nest, option_fields
from attar.yaml import scalar

T = TypeVar("T")


def variants_heading(by: str, variants: Sequence[str]) -> str:
    """Heading of the options that only some choices of another option (``method``, say) take."""
    return f"With --{by.replace('_', '-')} {listed(variants)}"


_UNNAMED = ("scheme", "method", "format")  # titles show their values without the name
_ALWAYS = (*_UNNAMED, "ratio")  # in every title; also steps, for a stage without a method


@dataclass(frozen=True)
class SettingField:
    """One field of a settings class.

    Args:
        default: its default, or ``dataclasses.MISSING``.
        choices: the allowed values, or empty.
        title: heading of its group in help, or empty.
        by: the option that chooses among variants; empty: none.
        by_variant: as each variant defines it, by the choices of ``by`` that take it; empty: all.
        aliases: other spellings of choices, in capitals.
        hint: the hint for a value that is none of the choices; empty: the nearest one.
    """

    name: str
    kind: Any
    default: Any
    help: str
    choices: tuple[Any, ...]
    title: str = ""
    by: str = ""
    by_variant: Mapping[str, SettingField] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    hint: Callable[[str], str] = field(default=lambda value: "")

    @property
    def variants(self) -> tuple[str, ...]:
        """The choices of ``by`` that take it; empty: all."""
        return tuple(self.by_variant)

    @property
    def default_text(self) -> str:
        """The default, and those of variants that have another one: ``4; dflash and dspark: 7``."""
        others: dict[str, list[str]] = {}
        for variant, defined in self.by_variant.items():
            if defined.default != self.default:
                others.setdefault(short(defined.default), []).append(variant)
        parts = [f"{listed(names)}: {default}" for default, names in others.items()]
        return "; ".join([short(self.default), *parts])

    @property
    def many(self) -> bool:
        """Whether the setting is a list."""
        return any(get_origin(kind) is tuple for kind in _members(self.kind))

    @property
    def kinds(self) -> tuple[Any, ...]:
        """The types that it may have: the members of a union, or the one type."""
        return _members(self.kind)

    @property
    def flag(self) -> bool:
        """Whether the setting is yes or no."""
        return self.kind is bool


def settings_of(cls: type) -> tuple[SettingField, ...]:
    """The options of a settings class, in order."""
    return tuple(_setting_field(option) for option in option_fields(cls))


def _setting_field(option: OptionField) -> SettingField:
    return SettingField(
        name=option.field.name,
        kind=option.kind,
        default=default_of(option.field),
        help=str(option.field.metadata.get("help", "")),
        choices=option.choices,
        title=variants_heading(option.by, option.variants) if option.by else option.title,
        by=option.by,
        by_variant={variant: _setting_field(defined) for variant, defined in option.by_variant.items()},
        aliases=option.field.metadata.get("aliases", {}),
        hint=option.field.metadata.get("hint", lambda value: ""),
    )


def parse(cls: type[T], given: Mapping[str, object], origin: SettingsOrigin) -> T:
    """Make settings of a class from names and values; absent ones keep their default.

    Raises:
        UsageError: an unknown name, a wrong type, or a value that is not allowed; made by the origin.
    """
    fields = {setting.name: setting for setting in settings_of(cls)}
    for name in given:
        if name not in fields:
            raise origin.unknown(name, list(fields))
    values = {name: _value(fields[name], value, origin) for name, value in given.items()}
    for setting in fields.values():
        if setting.name not in values and setting.default is dataclasses.MISSING:
            raise origin.wrong(setting.name, None, f"given: {describe(setting.kind)}")
    for name, allowed in misplaced(cls, values).items():
        if not (origin.resolved and values[name] == fields[name].default):
            raise origin.wrong(name, values[name], allowed)
        del values[name]
    try:
        return nest(cls, values)
    except SettingsError as error:
        raise origin.wrong(error.field, error.value, error.allowed, error.hint) from None


def plain(settings: Any, *, defaults: bool = True) -> dict[str, Any]:
    """Settings as a dict of JSON values (tuples become lists); without ``defaults`` those that differ."""
    values = flatten(settings) if defaults else differing(settings)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def title(settings: Any) -> str:
    """One line: the stage's method, ratio or steps, and every setting that is not its default.

    Without ``data`` and ``seed``, which belong to the recipe, and ``config``, which is long.
    """
    words = []
    always = _ALWAYS if hasattr(settings, "method") else (*_ALWAYS, "steps")
    values = flatten(settings)
    for setting in settings_of(type(settings)):
        default = setting.by_variant.get(values.get(setting.by, ""), setting).default
        value = values.get(setting.name, default)
        shown = setting.name in values and (value != default or setting.name in always)
        if shown and setting.name not in ("data", "seed", "config"):
            name = "" if setting.name in _UNNAMED else setting.name.replace("_", " ") + " "
            words.append(name + short(value))
    return ", ".join(words)


def document(cls: type, without: Container[str] = ()) -> str:
    """The settings class as Markdown tables: setting, type, default, meaning; the options of each method in
    a table of its own.

    Args:
        without: names of settings that are documented elsewhere.
    """
    settings = [setting for setting in settings_of(cls) if setting.name not in without]
    choices = dict.fromkeys((setting.by, name) for setting in settings for name in setting.variants)
    groups: dict[tuple[str, str], list[str]] = {}
    for by, name in choices:
        rows = [
            setting.by_variant[name]
            for setting in settings
            if setting.by == by and name in setting.by_variant
        ]
        groups.setdefault((by, _table(rows)), []).append(name)
    tables = [_table([setting for setting in settings if not setting.variants])]
    for (by, table), names in groups.items():
        tables.append(f"With `{by}` {listed([f'`{name}`' for name in names])}:\n\n{table}")
    return "\n".join(tables)


def _table(settings: Sequence[SettingField]) -> str:
    rows = ["| setting | type | default | meaning |", "|---|---|---|---|"]
    for setting in settings:
        kind = " \\| ".join(f"`{choice}`" for choice in setting.choices) or describe(setting.kind)
        default = "required" if setting.default is dataclasses.MISSING else f"`{short(setting.default)}`"
        rows.append(f"| `{setting.name}` | {kind} | {default} | {setting.help} |")
    return "\n".join(rows) + "\n"


def describe(kind: Any) -> str:
    """A type in words."""
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    if kind in words:
        return words[kind]
    if get_origin(kind) is tuple:
        return f"a list ({describe(get_args(kind)[0])} each)"
    return " or ".join(describe(member) for member in _members(kind))


def _members(kind: Any) -> tuple[Any, ...]:
    """The members of a union; a plain type is a union of one."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def short(value: Any) -> str:
    """A value as text."""
    if value is None or value in ("", ()):
        return "none"
    if isinstance(value, tuple):
        return ", ".join(str(item) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


class _WrongTypeError(Exception):
    pass


def _value(setting: SettingField, value: object, origin: SettingsOrigin) -> Any:
    """The value in the field's type, checked against its choices."""
    try:
        result = _convert(setting.kind, _choice(setting, value), origin.text)
    except _WrongTypeError:
        raise origin.wrong(setting.name, value, describe(setting.kind)) from None
    if setting.choices and result is not None:
        for item in result if setting.many else (result,):
            if item not in setting.choices:
                names = [str(choice) for choice in setting.choices]
                close = nearest(str(item), names)
                hint = setting.hint(str(item)) or (close and f"did you mean {close!r}?")
                raise origin.wrong(setting.name, item, listed(names, "or"), hint)
    return result


def _choice(setting: SettingField, value: object) -> object:
    """The value; another spelling of a choice as the choice, and true and false as text where these are
    choices, as YAML and Python write them without quotes."""
    text = str(value).lower()
    if isinstance(value, str) and value.upper() in setting.aliases and value not in setting.choices:
        return setting.aliases[value.upper()]
    return text if isinstance(value, bool) and text in setting.choices else value


def _convert(kind: Any, value: object, text: bool) -> Any:
    """``value`` as ``kind``, without guessing: no text for numbers, no 1 for true."""
    members = _members(kind)
    if len(members) > 1:
        for member in sorted(members, key=lambda member: member is str):  # text last: it accepts everything
            try:
                return _convert(member, value, text)
            except _WrongTypeError:
                continue
        raise _WrongTypeError
    if get_origin(kind) is tuple:
        if not isinstance(value, list | tuple):
            raise _WrongTypeError
        return tuple(_convert(get_args(kind)[0], item, text) for item in value)
    if text and kind is not str and isinstance(value, str):
        value = None if value == "none" else scalar(value)
    return _scalar(kind, value)


def _scalar(kind: Any, value: object) -> Any:
    if kind is type(None) and value is None:
        return None
    if kind in (bool, str) and isinstance(value, kind):
        return value
    if kind in (int, float) and isinstance(value, numbers.Real) and not isinstance(value, bool):
        return _number(kind, value)
    raise _WrongTypeError


def _number(kind: type, value: numbers.Real) -> int | float:
    try:
        number = float(value)
    except OverflowError:
        raise _WrongTypeError from None
    if kind is float:
        return number
    if isinstance(value, numbers.Integral):
        return int(value)
    if number.is_integer():  # 1e3 is a whole number
        return int(number)
    raise _WrongTypeError


class SettingsOrigin(Protocol):
    """Makes the errors for unknown settings and wrong values."""

    @property
    def text(self) -> bool:
        """Whether every value is text that must be parsed (the command line)."""

    @property
    def resolved(self) -> bool:
        """Whether defaults may be written out for options that the chosen method does not take (recipes)."""

    def unknown(self, name: str, known: Sequence[str]) -> UsageError:
        """The error for a setting that does not exist."""

    def wrong(self, name: str, value: object, allowed: str, hint: str | None = None) -> UsageError:
        """The error for a value that is not allowed."""


@dataclass(frozen=True)
class PythonOrigin:
    """Keyword arguments of a Python verb."""

    verb: str
    text: bool = False
    resolved: bool = False

    def unknown(self, name: str, known: Sequence[str]) -> UsageError:
        """Name the keyword and the verb."""
        if old := old_name(self.verb, name):
            return UsageError(old)
        return UsageError(f"unknown setting {name!r} of {self.verb}{did_you_mean(name, known)}")

    def wrong(self, name: str, value: object, allowed: str, hint: str | None = None) -> UsageError:
        """Name the keyword."""
        return _settings_error(name, value, allowed, hint)


@dataclass(frozen=True)
class CommandOrigin:
    """Options of a verb on the command line.

    Attributes:
        origins: the variable or file of an option that has its value from there, by its name.
    """

    verb: str
    text: bool = True
    resolved: bool = False
    origins: Mapping[str, str] = field(default_factory=dict)

    def unknown(self, name: str, known: Sequence[str]) -> UsageError:
        """Name the option and the verb."""
        if old := old_name(self.verb, name, option):
            return UsageError(old, hint=f"attar {self.verb} --help")
        options = [option(setting) for setting in known]
        return UsageError(
            f"no option {option(name)!r} in attar {self.verb}{did_you_mean(option(name), options)}"
        )

    def wrong(self, name: str, value: object, allowed: str, hint: str | None = None) -> UsageError:
        """Name the option, and hint at the verb's help."""
        spelling = self.origins.get(name, option(name))
        return _settings_error(spelling, value, allowed, hint or f"attar {self.verb} --help")


@dataclass(frozen=True)
class RecipeOrigin:
    """Keys of a mapping in a recipe.

    Args:
        what: name of the mapping, such as ``stage 'prune'``.
        where: ``file:line`` of the mapping.
        locations: ``file:line`` of each key.
        extra: other allowed keys, for suggestions.
        verb: whose settings they are; empty: none.
    """

    what: str
    where: str
    locations: Mapping[str, str]
    extra: Sequence[str] = field(default=())
    verb: str = ""
    text: bool = False
    resolved: bool = True

    def unknown(self, name: str, known: Sequence[str]) -> UsageError:
        """Name file, line, key and the nearest key."""
        where = self.locations.get(name, self.where)
        if old := old_name(self.verb, name):
            return RecipeError(f"{where}: in {self.what} {old}")
        tail = did_you_mean(name, [*known, *self.extra])
        return RecipeError(f"{where}: unknown key {name!r} in {self.what}{tail}")

    def wrong(self, name: str, value: object, allowed: str, hint: str | None = None) -> UsageError:
        """Name file, line, key, value and the allowed values."""
        where = self.locations.get(name, self.where)
        return RecipeError(f"{where}: {name} is {value!r}, but must be {allowed}", hint=hint)


def option(name: str) -> str:
    """The command-line spelling of a setting: ``group_size`` becomes ``--group-size``."""
    return "--" + name.replace("_", "-")


def _settings_error(name: str, value: object, allowed: str, hint: str | None) -> SettingsError:
    error = SettingsError(name, value, allowed)
    error.hint = hint
    return error
