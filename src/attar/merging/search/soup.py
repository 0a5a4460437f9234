"""Greedy soup: the mean of those models that, one after the other, do not make it worse on held-out text.

    sort the ingredients by their held-out loss, best first
    soup = {best};  for each other i:  keep i if  loss(mean(soup + i)) <= loss(mean(soup))

Wortsman et al. 2022 (arXiv 2203.05482, Recipe 1), which compares accuracies (>=) where this compares losses.
The authors' code keeps an ingredient only where accuracy strictly rises: ``strict``. It also updates a
running mean; here every mean is taken anew over the ingredients in their given order, so that a soup's bits
do not depend on the order in which they were tried.

Equal ingredients: the second one changes nothing, so the paper's rule keeps it and the strict one does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from attar.errors import NumericsError
from attar.merging.search.loss_cache import finite


@dataclass(frozen=True)
class Trial:
    """One ingredient's turn.

    Attributes:
        ingredient: its number.
        alone: its own loss.
        loss: of the mean with it.
        kept: whether it stayed in.
    """

    ingredient: int
    alone: float
    loss: float
    kept: bool


@dataclass(frozen=True)
class Soup:
    """What was chosen.

    Attributes:
        kept: ingredients, in their given order.
        loss: of their mean.
        trials: in the order in which they were tried.
    """

    kept: tuple[int, ...]
    loss: float
    trials: tuple[Trial, ...]

    def report(self, labels: Sequence[str]) -> list[dict[str, Any]]:
        """Rows for the card: every ingredient, its own loss, the soup's loss with it, the verdict."""
        return [
            {
                "model": labels[trial.ingredient],
                "loss": finite(trial.alone),
                "loss_with": finite(trial.loss),
                "kept": trial.kept,
            }
            for trial in self.trials
        ]


def greedy(losses: Sequence[float], attempt: Callable[[tuple[int, ...]], float], *, strict: bool) -> Soup:
    """Choose the ingredients of a soup.

    Args:
        losses: held-out loss of every ingredient, nats a token; equal ones keep their order.
        attempt: held-out loss of the mean of some ingredients, given in their order; asked once for each
            ingredient but the best.
        strict: keep only what lowers the loss (the authors' code); else also what leaves it equal (paper).

    Raises:
        NumericsError: no ingredient has a finite loss.
    """
    known = [loss if math.isfinite(loss) else math.inf for loss in losses]
    first, *others = sorted(range(len(known)), key=lambda number: (known[number], number))
    best = known[first]
    if not math.isfinite(best):
        raise NumericsError(
            "no ingredient of the soup has a finite loss on the held-out text",
            hint="check the models and the text",
        )
    kept: tuple[int, ...] = (first,)
    trials = [Trial(first, best, best, True)]
    for number in others:
        tried = tuple(sorted((*kept, number)))
        loss = attempt(tried)
        good = loss < best or (not strict and loss == best)
        if good:
            kept, best = tried, loss
        trials.append(Trial(number, known[number], loss, good))
    return Soup(kept, best, tuple(trials))
