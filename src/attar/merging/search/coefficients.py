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
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from attar.errors import MissingExtraError, NumericsError, SettingsError, UsageError
from attar.merging.search.loss_cache import LossCache, finite
from attar.merging.search.space import Coordinate, SearchSpace
from attar.progress import SILENT, Progress

STEP = 0.2  # the best of 0.1 to 0.3 on random quadratics of 8 and 16 coordinates, 50 and 100 candidates
DIGITS = 4
WORST = 1e30  # in place of infinity, which the library cannot handle

Values = tuple[float, ...]


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
        space: start and bounds.
        loss: held-out loss of the merge with these values, nats a token; may raise UsageError or
            NumericsError for values that give no merge (for the start they are raised).
        budget: number of candidates, the start included; at least 1. Equal values are measured once.
        seed: of the candidates.
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
