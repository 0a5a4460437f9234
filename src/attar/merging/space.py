"""What a search may change in a merge's configuration: the numbers that it writes, one coordinate each.

Free are the parameters whose method gives them a ``span`` (weight, density, t, lambda, gamma ...), wherever
they stand: a scalar is one coordinate, a gradient one for each of its points, a list of filters one for each
entry. What the configuration leaves to a default is not searched; who wants ``density`` searched writes
``density: 0.5``. So the configuration says both where a search begins and how many coordinates it has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from attar.errors import UsageError
from attar.merging.config.schema import SEARCHED, Filtered, MergeConfig, Parameters, Scalar, Setting
from attar.merging.methods.method import Method, Parameter
from attar.merging.planning.parameters import method_of

Change = Callable[["Coordinate"], float]


@dataclass(frozen=True)
class Coordinate:
    """One free number.

    Attributes:
        label: where it stands, for a person: ``org/one weight``, ``t, mlp, point 2``.
        start: what the configuration says.
        low: least value that is tried.
        high: largest value that is tried; above ``low``.
    """

    label: str
    start: float
    low: float
    high: float


@dataclass(frozen=True)
class Space:
    """A configuration and its free numbers.

    Attributes:
        config: where a search begins.
        coordinates: in the order of the configuration: the merge's own, then by module, slice and source.
    """

    config: MergeConfig
    coordinates: tuple[Coordinate, ...]

    @classmethod
    def of(cls, config: MergeConfig) -> Space:
        """The space of a configuration.

        Raises:
            UsageError: it writes no number that can be searched, or its method searches by itself.
        """
        if config.method in SEARCHED:
            raise UsageError(
                f"{config.where}: {config.method} has no coefficients to search",
                hint="leave out --search, or use linear",
            )
        found: list[Coordinate] = []

        def note(coordinate: Coordinate) -> float:
            found.append(coordinate)
            return coordinate.start

        changed(config, note)
        if not found:
            method = method_of(config.method)
            free = [p.name for p in (*method.each, *method.shared) if p.span is not None]
            raise UsageError(
                f"{config.where}: the configuration writes no number that a search could change",
                hint=f"write a value for {', '.join(free)}" if free else f"{config.method} has none",
            )
        return cls(config, tuple(found))

    @property
    def start(self) -> tuple[float, ...]:
        """The configuration's own values."""
        return tuple(coordinate.start for coordinate in self.coordinates)

    def with_parameters(self, values: Sequence[float]) -> MergeConfig:
        """The configuration with other numbers in the coordinates' places.

        Args:
            values: one a coordinate. Those that equal the start leave what is written there as it is.
        """
        assert len(values) == len(self.coordinates), "one value for each coordinate"
        rest = iter(values)
        return changed(self.config, lambda coordinate: next(rest))


def changed(config: MergeConfig, change: Change) -> MergeConfig:
    """A copy of a configuration with every free number replaced by what ``change`` says, asked in order."""
    walk = _Walk(method_of(config.method), change)
    top = walk.settings(config.parameters, "")
    modules = []
    for module in config.modules:
        of_module = walk.settings(module.parameters, module.name or "")
        slices = []
        for number, each in enumerate(module.slices):
            several = f"slice {number + 1}" if len(module.slices) > 1 else ""
            of_slice = walk.settings(each.parameters, _join(module.name or "", several))
            sources = []
            for source in each.sources:
                place = _join(module.name or "", several, str(source.model))
                sources.append(replace(source, parameters=walk.settings(source.parameters, place)))
            slices.append(replace(each, parameters=of_slice, sources=tuple(sources)))
        modules.append(replace(module, parameters=of_module, slices=tuple(slices)))
    return replace(config, parameters=top, modules=tuple(modules))


@dataclass(frozen=True)
class _Walk:
    method: Method
    change: Change

    def settings(self, parameters: Parameters, place: str) -> Parameters:
        """The settings of one level."""
        spans = {p.name: p for p in (*self.method.shared, *self.method.each) if p.span is not None}
        return {
            name: self.setting(setting, spans[name], _join(place, name, sep=" "))
            if name in spans
            else setting
            for name, setting in parameters.items()
        }

    def setting(self, setting: Setting, parameter: Parameter, label: str) -> Setting:
        value = setting.value
        if not isinstance(value, tuple):
            return replace(setting, value=self.number(value, parameter, label))
        if isinstance(value[0], Filtered):
            entries = [entry for entry in value if isinstance(entry, Filtered)]
            return replace(setting, value=tuple(self.entry(entry, parameter, label) for entry in entries))
        points = [point for point in value if not isinstance(point, Filtered)]
        return replace(setting, value=self.points(points, parameter, label))

    def entry(self, entry: Filtered, parameter: Parameter, label: str) -> Filtered:
        place = _join(label, "others" if entry.filter in (None, "*") else str(entry.filter))
        if isinstance(entry.value, tuple):
            return replace(entry, value=self.points(entry.value, parameter, place))
        return replace(entry, value=self.number(entry.value, parameter, place))

    def points(self, points: Sequence[Scalar], parameter: Parameter, label: str) -> tuple[Scalar, ...]:
        return tuple(
            self.number(point, parameter, _join(label, f"point {number + 1}"))
            for number, point in enumerate(points)
        )

    def number(self, value: Scalar, parameter: Parameter, label: str) -> Scalar:
        """A leaf: asked for where it is a number; one outside the span widens it."""
        if isinstance(value, bool | str) or parameter.span is None:
            return value
        low, high = parameter.span
        found = self.change(Coordinate(label, float(value), min(low, value), max(high, value)))
        return value if found == value else found


def _join(*parts: str, sep: str = ", ") -> str:
    return sep.join(part for part in parts if part)
