"""The numbers of a merge's configuration that a search may change, one coordinate each.

Free are the parameters whose method gives them a ``span`` (weight, density, t, lambda, gamma ...), at every
level: a scalar is one coordinate, a gradient one for each of its points, a list of filters one for each
entry. Defaults are not searched: to search ``density``, write ``density: 0.5``. So the configuration
determines both the start of a search and its number of coordinates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from attar.errors import UsageError
from attar.merging.config.schema import (
    SEARCHED,
    FilteredValue,
    MergeConfig,
    ParameterSetting,
    ParameterSettings,
    Scalar,
)
from attar.merging.methods.method import Method, Parameter
from attar.merging.planning.parameters import method_of


@dataclass(frozen=True)
class Coordinate:
    """One free number.

    Attributes:
        label: its position in the configuration: ``org/one weight``, ``t, mlp, point 2``.
        start: the configuration's value.
        low: lower bound.
        high: upper bound, above ``low``.
    """

    label: str
    start: float
    low: float
    high: float


@dataclass(frozen=True)
class SearchSpace:
    """A configuration and its free numbers: the merge's own first, then by module, slice and source."""

    config: MergeConfig
    coordinates: tuple[Coordinate, ...]

    @classmethod
    def of(cls, config: MergeConfig) -> SearchSpace:
        """The space of a configuration.

        Raises:
            UsageError: it has no number that can be searched, or its method has a search of its own.
        """
        if config.method in SEARCHED:
            raise UsageError(
                f"{config.where}: {config.method} has no coefficients to search",
                hint="leave out --search, or use linear",
            )
        coordinates: list[Coordinate] = []

        def collect(coordinate: Coordinate) -> float:
            coordinates.append(coordinate)
            return coordinate.start

        replace_numbers(config, collect)
        if not coordinates:
            method = method_of(config.method)
            free = [p.name for p in (*method.per_model, *method.shared) if p.span is not None]
            raise UsageError(
                f"{config.where}: the configuration writes no number that a search could change",
                hint=f"write a value for {', '.join(free)}" if free else f"{config.method} has none",
            )
        return cls(config, tuple(coordinates))

    @property
    def start(self) -> tuple[float, ...]:
        """The configuration's own values."""
        return tuple(coordinate.start for coordinate in self.coordinates)

    def config_with(self, values: Sequence[float]) -> MergeConfig:
        """The configuration with one value for each coordinate; values equal to the start change nothing."""
        assert len(values) == len(self.coordinates), "one value for each coordinate"
        rest = iter(values)
        return replace_numbers(self.config, lambda coordinate: next(rest))


def replace_numbers(config: MergeConfig, number_for: Callable[[Coordinate], float]) -> MergeConfig:
    """A copy of a configuration with every free number replaced by ``number_for``, called in order."""
    replacer = _NumberReplacer(method_of(config.method), number_for)
    parameters = replacer.settings(config.parameters, "")
    modules = []
    for module in config.modules:
        name = module.name or ""
        module_parameters = replacer.settings(module.parameters, name)
        slices = []
        for index, part in enumerate(module.slices):
            number = f"slice {index + 1}" if len(module.slices) > 1 else ""
            slice_parameters = replacer.settings(part.parameters, _join(name, number))
            sources = tuple(
                replace(
                    source,
                    parameters=replacer.settings(source.parameters, _join(name, number, str(source.model))),
                )
                for source in part.sources
            )
            slices.append(replace(part, parameters=slice_parameters, sources=sources))
        modules.append(replace(module, parameters=module_parameters, slices=tuple(slices)))
    return replace(config, parameters=parameters, modules=tuple(modules))


@dataclass(frozen=True)
class _NumberReplacer:
    method: Method
    number_for: Callable[[Coordinate], float]

    def settings(self, parameters: ParameterSettings, label: str) -> ParameterSettings:
        """The settings of one level."""
        free = {p.name: p for p in (*self.method.shared, *self.method.per_model) if p.span is not None}
        return {
            name: self.setting(setting, free[name], _join(label, name, sep=" ")) if name in free else setting
            for name, setting in parameters.items()
        }

    def setting(self, setting: ParameterSetting, parameter: Parameter, label: str) -> ParameterSetting:
        if setting.filters():
            entries = tuple(self.entry(entry, parameter, label) for entry in setting.filters())
            return replace(setting, value=entries)
        value = setting.points() if isinstance(setting.value, tuple) else setting.value
        return replace(setting, value=self.value(value, parameter, label))

    def entry(self, entry: FilteredValue, parameter: Parameter, label: str) -> FilteredValue:
        label = _join(label, "others" if entry.filter in (None, "*") else str(entry.filter))
        return replace(entry, value=self.value(entry.value, parameter, label))

    def value(
        self, value: Scalar | tuple[Scalar, ...], parameter: Parameter, label: str
    ) -> Scalar | tuple[Scalar, ...]:
        """A scalar, or the points of a gradient."""
        if not isinstance(value, tuple):
            return self.number(value, parameter, label)
        points = enumerate(value, start=1)
        return tuple(self.number(point, parameter, _join(label, f"point {n}")) for n, point in points)

    def number(self, value: Scalar, parameter: Parameter, label: str) -> Scalar:
        """A number; one outside the span widens it."""
        if isinstance(value, bool | str) or parameter.span is None:
            return value
        low, high = parameter.span
        number = self.number_for(Coordinate(label, float(value), min(low, value), max(high, value)))
        return value if number == value else number


def _join(*parts: str, sep: str = ", ") -> str:
    return sep.join(part for part in parts if part)
