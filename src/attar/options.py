"""Nested settings classes and the flat options that people use: recipe keys, command-line options, keywords.

A settings class is a frozen dataclass. A field may hold another settings class, whose fields are options of
the same flat list. Where the metadata of such a field has ``variants`` (name to class) and ``by`` (the field
that holds the name), the class follows that choice, and an option that the chosen class lacks is refused.
``title`` in the metadata is the heading of the inner options in help and documentation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar, get_type_hints

from attar.errors import SettingsError

T = TypeVar("T")


def setting(default: Any, help: str, choices: tuple[Any, ...] = (), **metadata: Any) -> Any:
    """The dataclass field of an option.

    Args:
        choices: the allowed values; empty: any.
        metadata: see :class:`attar.settings.SettingField`.
    """
    return dataclasses.field(default=default, metadata={"help": help, "choices": choices, **metadata})


@dataclass(frozen=True)
class OptionField:
    """One option of a settings class.

    Attributes:
        title: heading of the group it belongs to; "": none.
        choices: the allowed values, or empty; of variants what any of them allows.
        by: the option that chooses among variants; "": the option is always there.
        by_variant: as each variant defines it, by the choices of ``by`` whose class has it.
    """

    field: dataclasses.Field[Any]
    kind: Any
    title: str = ""
    choices: tuple[Any, ...] = ()
    by: str = ""
    by_variant: Mapping[str, OptionField] = dataclasses.field(default_factory=dict)

    @property
    def variants(self) -> tuple[str, ...]:
        """The choices of ``by`` whose class has it."""
        return tuple(self.by_variant)


def option_fields(cls: type) -> tuple[OptionField, ...]:
    """All options of a settings class in order, those of every variant included."""
    return tuple(_options(cls, ""))


def _options(cls: type, title: str) -> Iterator[OptionField]:
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        inner = str(field.metadata.get("title", title))
        if "variants" in field.metadata:
            yield from _variant_options(field, inner)
        elif dataclasses.is_dataclass(hints[field.name]):
            yield from _options(hints[field.name], inner)
        elif field.init:
            yield OptionField(field, hints[field.name], title, tuple(field.metadata.get("choices", ())))


def _variant_options(field: dataclasses.Field[Any], title: str) -> Iterator[OptionField]:
    """Each option once, as the first variant that has it defines it; a value that the chosen variant does not
    allow is refused by its class."""
    variants: Mapping[str, type] = field.metadata["variants"]
    owners: dict[str, dict[str, OptionField]] = {}
    for variant, cls in variants.items():
        for option in _options(cls, title):
            owners.setdefault(option.field.name, {})[variant] = option
    for definitions in owners.values():
        first, *_ = options = list(definitions.values())
        choices = dict.fromkeys(chain.from_iterable(option.choices for option in options))
        allowed = tuple(choices) if all(option.choices for option in options) else ()
        yield dataclasses.replace(first, choices=allowed, by=field.metadata["by"], by_variant=definitions)


def flatten(settings: Any) -> dict[str, Any]:
    """Every option and its value, those of nested settings included."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        values |= flatten(value) if dataclasses.is_dataclass(value) else {field.name: value}
    return values


def differing(settings: Any) -> dict[str, Any]:
    """The options that are not their defaults, those of nested settings included: the others may be left out
    of a command line or a recipe."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            values |= differing(value)
        elif field.init and value != default_of(field):
            values[field.name] = value
    return values


def default_of(field: dataclasses.Field[Any]) -> Any:
    """The default of a field, or ``dataclasses.MISSING``."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def nest(cls: type[T], values: Mapping[str, Any]) -> T:
    """Settings from flat options; what is absent keeps its default.

    Raises:
        SettingsError: a value is not allowed, or the chosen variant has no such option.
    """
    arguments: dict[str, Any] = {}
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        variants = field.metadata.get("variants")
        inner = _chosen(cls, field, values) if variants else hints[field.name]
        if variants or dataclasses.is_dataclass(inner):
            names = {option.field.name for option in option_fields(inner)}
            arguments[field.name] = nest(inner, {key: values[key] for key in values if key in names})
        elif field.name in values:
            arguments[field.name] = values[field.name]
    for name, error in misplaced(cls, values).items():
        raise SettingsError(name, values[name], error)
    known = {option.field.name for option in option_fields(cls)}
    unknown = [name for name in values if name not in known]
    if unknown:
        raise TypeError(f"{cls.__name__} has no option {unknown[0]!r}")
    return cls(**arguments)


def misplaced(cls: type, values: Mapping[str, Any]) -> dict[str, str]:
    """What must be done about each given option that the chosen variant lacks, by option."""
    errors = {}
    options = option_fields(cls)
    defaults = {option.field.name: option.field.default for option in options}
    for option in options:
        choice = values.get(option.by, defaults.get(option.by))
        if option.by and option.field.name in values and choice not in option.variants:
            errors[option.field.name] = (
                f"left out with {option.by} {choice}: it belongs to {listed(option.variants)}"
            )
    return errors


def _chosen(cls: type, field: dataclasses.Field[Any], values: Mapping[str, Any]) -> type:
    """The class of a variant field.

    Raises:
        SettingsError: there is no such variant.
    """
    by, variants = field.metadata["by"], field.metadata["variants"]
    default = next(other.default for other in dataclasses.fields(cls) if other.name == by)
    choice = values.get(by, default)
    if choice not in variants:
        raise SettingsError(by, choice, " or ".join(variants))
    chosen: type = variants[choice]
    return chosen


def listed(names: Sequence[str], word: str = "and") -> str:
    """Names as a sentence has them: ``a``, ``a and b``, ``a, b and c``."""
    return f" {word} ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def check_at_least(settings: Any, **least: float) -> None:
    """Check fields of a settings dataclass, None aside, against the smallest value that each may have.

    Of a tuple, every value is checked.

    Raises:
        SettingsError: names the first field whose value is below.
    """
    for name, bound in least.items():
        field = getattr(settings, name)
        for value in field if isinstance(field, tuple) else (field,):
            if value is not None and not value >= bound:  # NaN too
                raise SettingsError(name, value, f"at least {bound}")


def check_choices(settings: Any) -> None:
    """Check the fields of a settings dataclass whose metadata list ``choices``.

    Raises:
        SettingsError: names the first field whose value is none of them.
    """
    for field in dataclasses.fields(settings):
        value, choices = getattr(settings, field.name), field.metadata.get("choices", ())
        if choices and value not in choices:
            raise SettingsError(field.name, value, listed([str(choice) for choice in choices], "or"))
