"""Coefficients of a merge found against held-out text, by CMA-ES.

    ask for candidates x ~ N(m, s^2 C);  measure the loss of each one's merge;  move m, s, C towards the best

Hansen, "The CMA Evolution Strategy: A Tutorial" (arXiv 1604.00772); the library ``cmaes``. Each coordinate is
scaled so that its span is 0 to 1; the search begins at the configuration's own values with a step of
:data:`STEP` of the span. Those values are the first candidate, so that the result is never worse than they
are on the text that was searched with. How good it is elsewhere is for other text to say: with few tokens
and many coordinates a search fits the text.

CMA-ES sees the order of the losses only, not their size. A candidate that the method refuses, or whose merge
is not finite, counts as the worst. Values are rounded to four significant digits before they are tried, so
that what the card and ``found.yml`` say is exactly what was measured.

Same seed, same losses: same search. Losses that are known are not measured again
(:mod:`attar.merging.search.loss_cache`), so that a killed search goes on where it was.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from attar.errors import MissingExtraError, NumericsError, SettingsError, UsageError
from attar.merging.search.loss_cache import Journal, finite
from attar.merging.space import Coordinate, Space
from attar.progress import SILENT, Progress

STEP = (
    0.2  # the best of 0.1 to 0.3 on random quadratic bowls of 8 and 16 coordinates with 50 and 100 candidates
)
DIGITS = 4
WORST = 1e30  # stands for infinity, which the library's arithmetic cannot take

Values = tuple[float, ...]


@dataclass(frozen=True)
class Candidate:
    """One merge that was tried.

    Attributes:
        values: one a coordinate.
        loss: nats a token; infinite where there is no such merge.
    """

    values: Values
    loss: float


@dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
        best: the candidate with the lowest loss, the earliest of equal ones.
        history: all candidates, in the order in which they were asked for; the first is the start.
    """

    best: Candidate
    history: tuple[Candidate, ...]

    def report(self, space: Space) -> dict[str, Any]:
        """For the card: losses before and after, every coordinate, and the loss of every candidate."""
        rows = zip(space.coordinates, self.best.values, strict=True)
        return {
            "loss_before": finite(self.history[0].loss),
            "loss_after": finite(self.best.loss),
            "tried": len(self.history),
            "coordinates": [
                {"parameter": each.label, "start": each.start, "found": value} for each, value in rows
            ],
            "losses": [finite(candidate.loss) for candidate in self.history],
        }


def search(
    space: Space,
    loss: Callable[[Values], float],
    *,
    budget: int,
    seed: int = 0,
    journal: Journal | None = None,
    progress: Progress = SILENT,
) -> Found:
    """Search for the coefficients with the lowest loss.

    Args:
        space: start and bounds.
        loss: held-out loss of the merge with these values, nats a token; may raise UsageError or
            NumericsError for values that make no merge (of the start they are passed on).
        budget: candidates to try, the start included; at least 1. Equal values are measured once.
        seed: of the candidates.
        journal: losses that are known; new ones are added to it.
        progress: gets the best loss so far.

    Raises:
        SettingsError: the budget is below 1.
        MissingExtraError: the library is not installed.
        NumericsError: the start's own loss is not finite.
    """
    if budget < 1:
        raise SettingsError("search", budget, "at least 1")
    optimizer, book = _optimizer(space, seed), journal or Journal()
    history = [Candidate(space.start, book.recall(space.start, lambda: loss(space.start)))]
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
                history.append(_measured(_values(space, point), loss, book))
                task.advance(loss=history[-1].loss, best=min(each.loss for each in history))
            if len(points) == optimizer.population_size:
                told = zip(points, history[-len(points) :], strict=True)
                optimizer.tell([(point, min(candidate.loss, WORST)) for point, candidate in told])
    return Found(min(history, key=lambda candidate: candidate.loss), tuple(history))


def _measured(values: Values, loss: Callable[[Values], float], book: Journal) -> Candidate:
    """A candidate with its loss; infinite where its values make no merge."""

    def attempt() -> float:
        try:
            return loss(values)
        except (UsageError, NumericsError):
            return math.inf

    return Candidate(values, book.recall(values, attempt))


def _optimizer(space: Space, seed: int) -> Any:
    """CMA-ES over the unit cube, at the start's place in it."""
    try:
        library = importlib.import_module("cmaes")
    except ImportError as error:
        raise MissingExtraError("cmaes", "search") from error
    start = [(each.start - each.low) / (each.high - each.low) for each in space.coordinates]
    bounds = np.array([[0.0, 1.0]] * len(start))
    return library.CMA(mean=np.array(start), sigma=STEP, bounds=bounds, seed=seed % 2**32)


def _values(space: Space, point: Any) -> Values:
    """A point of the unit cube as values of the coordinates, rounded."""
    return tuple(_value(each, float(x)) for each, x in zip(space.coordinates, point, strict=True))


def _value(coordinate: Coordinate, x: float) -> float:
    value = float(f"{coordinate.low + x * (coordinate.high - coordinate.low):.{DIGITS}g}")
    return min(max(value, coordinate.low), coordinate.high)
