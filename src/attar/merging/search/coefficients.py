"""Coefficients of a merge searched on held-out text by CMA-ES.

    sample candidates x ~ N(m, s^2 C);  measure the loss of each one's merge;  move m, s, C towards the best

Hansen, "The CMA Evolution Strategy: A Tutorial" (arXiv 1604.00772); the library ``cmaes``. Each coordinate is
scaled so that its span is 0 to 1; the search starts at the configuration's own values with a step of
:data:`STEP` of the span. Those values are the first candidate, so that the result is never worse than they
are on the searched text. Other text must tell how good it is elsewhere: with few tokens and many coordinates
a search overfits.

CMA-ES uses the order of the losses only. A candidate that the method refuses, or whose merge is not finite,
counts as the worst. Values are rounded to four significant digits before they are tried, so that the card and
``found.yml`` give exactly the measured ones.

The same seed and losses give the same search, and cached losses are not measured again
(:mod:`attar.merging.search.loss_cache`), so that a killed search resumes.

Free are the parameters whose method gives them a ``span`` (weight, density, t, lambda, gamma ...), at every
level: a scalar is one coordinate, a gradient one for each of its points, a list of filters one for each
entry. Defaults are not searched: to search ``density``, write ``density: 0.5``. So the configuration
determines both the start of a search and its number of coordinates.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from attar.errors import MissingExtraError, NumericsError, SettingsError, UsageError
from attar.merging.config.schema import (
    SEARCHED,
    FilteredValue,
    MergeConfig,
    ParameterSetting,
    ParameterSettings,
    Scalar,
)
from attar.merging.methods.method import MergeMethod, Parameter
from attar.merging.planning.parameters import method_of
from attar.merging.search.loss_cache import LossCache, finite
from attar.progress import SILENT, Progress

STEP = 0.2  # the best of 0.1 to 0.3 on random quadratics of 8 and 16 coordinates, 50 and 100 candidates
DIGITS = 4
WORST = 1e30  # in place of infinity, which the library cannot handle

Values = tuple[float, ...]


@dataclass(frozen=True)
class Coordinate:
    """One free number.

    Attributes:
        label: its position in the configuration: ``org/one weight``, ``t, mlp, point 2``.
        start: the configuration's value.
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
            UsageError: it has no number that can be searched, or its method has its own search.
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
        numbers = iter(values)
        return replace_numbers(self.config, lambda coordinate: next(numbers))


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
    method: MergeMethod
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


@dataclass(frozen=True)
class MergeCandidate:
    """One merge that was tried.

    Attributes:
        values: one a coordinate.
        loss: nats a token; infinite where the values give no merge.
    """

    values: Values
    loss: float


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Attributes:
        best: the candidate with the lowest loss, the earliest of equal ones.
        history: all candidates, in order; the first is the start.
    """

    best: MergeCandidate
    history: tuple[MergeCandidate, ...]

    def report(self, space: SearchSpace) -> dict[str, Any]:
        """For the card: losses before and after, every coordinate, the loss of every candidate."""
        rows = zip(space.coordinates, self.best.values, strict=True)
        return {
            "loss_before": finite(self.history[0].loss),
            "loss_after": finite(self.best.loss),
            "tried": len(self.history),
            "coordinates": [
                {"parameter": coordinate.label, "start": coordinate.start, "found": value}
                for coordinate, value in rows
            ],
            "losses": [finite(candidate.loss) for candidate in self.history],
        }


def search(
    space: SearchSpace,
    loss: Callable[[Values], float],
    *,
    budget: int,
    seed: int = 0,
    cache: LossCache | None = None,
    progress: Progress = SILENT,
) -> SearchResult:
    """Search for the coefficients with the lowest loss.

    Args:
        loss: held-out loss of the merge with these values, nats a token; may raise UsageError or
            NumericsError for values that give no merge (for the start they are raised).
        budget: number of candidates, the start included; at least 1. Equal values are measured once.
        cache: known losses; new ones are added.

    Raises:
        SettingsError: the budget is below 1.
        MissingExtraError: the library is not installed.
        NumericsError: the start's own loss is not finite.
    """
    if budget < 1:
        raise SettingsError("search", budget, "at least 1")
    optimizer, cache = _optimizer(space, seed), cache or LossCache()
    history = [MergeCandidate(space.start, cache.loss(space.start, lambda: loss(space.start)))]
    if not math.isfinite(history[0].loss):
        raise NumericsError(
            "the loss of the merge as it is configured is not finite",
            hint="begin the search at coefficients that make a working model",
        )
    with progress.task("search", total=budget) as task:
        task.advance(loss=history[0].loss, best=history[0].loss)
        while len(history) < budget and not optimizer.should_stop():
            points = [optimizer.ask() for _ in range(min(optimizer.population_size, budget - len(history)))]
            for point in points:
                history.append(_measured(_values(space, point), loss, cache))
                best = min(candidate.loss for candidate in history)
                task.advance(loss=history[-1].loss, best=best)
            if len(points) == optimizer.population_size:
                generation = zip(points, history[-len(points) :], strict=True)
                optimizer.tell([(point, min(candidate.loss, WORST)) for point, candidate in generation])
    return SearchResult(min(history, key=lambda candidate: candidate.loss), tuple(history))


def _measured(values: Values, loss: Callable[[Values], float], cache: LossCache) -> MergeCandidate:
    """A candidate with its loss; infinite where its values give no merge."""

    def measure() -> float:
        try:
            return loss(values)
        except (UsageError, NumericsError):
            return math.inf

    return MergeCandidate(values, cache.loss(values, measure))


def _optimizer(space: SearchSpace, seed: int) -> Any:
    """CMA-ES over the unit cube, from the start on."""
    try:
        library = importlib.import_module("cmaes")
    except ImportError as error:
        raise MissingExtraError("cmaes", "search") from error
    start = np.array([(c.start - c.low) / (c.high - c.low) for c in space.coordinates])
    bounds = np.array([[0.0, 1.0]] * len(start))
    return library.CMA(mean=start, sigma=STEP, bounds=bounds, seed=seed % 2**32)


def _values(space: SearchSpace, point: Any) -> Values:
    """A point of the unit cube as rounded values of the coordinates."""
    return tuple(_value(c, float(x)) for c, x in zip(space.coordinates, point, strict=True))


def _value(coordinate: Coordinate, x: float) -> float:
    value = float(f"{coordinate.low + x * (coordinate.high - coordinate.low):.{DIGITS}g}")
    return min(max(value, coordinate.low), coordinate.high)
