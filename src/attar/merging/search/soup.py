"""Greedy soup: the mean of the models that, added one after the other, do not raise the held-out loss.

    sort the ingredients by their held-out loss, best first
    soup = {best};  for each other i:  keep i if  loss(mean(soup + i)) <= loss(mean(soup))

Wortsman et al. 2022 (arXiv 2203.05482, Recipe 1), which compares accuracies (>=) where this compares losses.
The authors' code keeps an ingredient only where accuracy strictly rises: ``strict``. It also updates a
running mean; here every mean is computed from the ingredients in their given order, so that a soup's bits do
not depend on the order of the trials.

Of two equal ingredients the second changes nothing: the paper's rule keeps it, the strict one does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from attar.errors import NumericsError
from attar.merging.search.loss_cache import finite


@dataclass(frozen=True)
class SoupTrial:
    """The trial of one ingredient.

    Attributes:
        loss: of the mean with it.
    """

    ingredient: int
    alone: float
    loss: float
    kept: bool


@dataclass(frozen=True)
class GreedySoup:
    """The chosen ingredients, in their given order; the loss of their mean; the trials, in order."""

    kept: tuple[int, ...]
    loss: float
    trials: tuple[SoupTrial, ...]

    def report(self, labels: Sequence[str]) -> list[dict[str, Any]]:
        """Rows for the card: every ingredient, its own loss, the soup's loss with it, whether it is kept."""
        return [
            {
                "model": labels[trial.ingredient],
                "loss": finite(trial.alone),
                "loss_with": finite(trial.loss),
                "kept": trial.kept,
            }
            for trial in self.trials
        ]


def greedy_soup(
    losses: Sequence[float], loss_of_mean: Callable[[tuple[int, ...]], float], *, strict: bool
) -> GreedySoup:
    """Choose the ingredients of a soup.

    Args:
        losses: held-out loss of every ingredient, nats a token; equal ones keep their order.
        loss_of_mean: held-out loss of the mean of some ingredients, given in their order; called once for
            each ingredient but the best.
        strict: keep only ingredients that lower the loss (the authors' code); else also ingredients that
            leave the loss equal (paper).

    Raises:
        NumericsError: no ingredient has a finite loss.
    """
    known = [loss if math.isfinite(loss) else math.inf for loss in losses]
    first, *others = sorted(range(len(known)), key=lambda index: (known[index], index))
    best = known[first]
    if not math.isfinite(best):
        raise NumericsError(
            "no ingredient of the soup has a finite loss on the held-out text",
            hint="check the models and the text",
        )
    kept: tuple[int, ...] = (first,)
    trials = [SoupTrial(first, best, best, True)]
    for index in others:
        candidate = tuple(sorted((*kept, index)))
        loss = loss_of_mean(candidate)
        good = loss < best or (not strict and loss == best)
        if good:
            kept, best = candidate, loss
        trials.append(SoupTrial(index, known[index], loss, good))
    return GreedySoup(kept, best, tuple(trials))
