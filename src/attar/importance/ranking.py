"""The units of a model in the order of their importance, for plans that cut several structures together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attar.importance import UnitCriterion
from attar.importance.scoring import UnitScoring
from attar.models.anatomy.parts import Anatomy
from attar.models.anatomy.unit_weights import UnitWeights
from attar.models.surgery.plan_space import UnitRanking
from attar.progress import Progress
from attar.walks.objectives import Loss


class RankedUnits(NamedTuple):
    """How the units of a structure are ranked.

    Attributes:
        noun: what a message calls them.
        weights: per layer, the weights of its units; empty where the criterion needs none.
    """

    noun: str
    weights: Callable[[nn.Module, Anatomy], list[UnitWeights]]
    criterion: UnitCriterion


def rank_units(
    model: Any,
    anatomy: Anatomy,
    structures: Mapping[str, RankedUnits],
    batches: Sequence[Tensor],
    loss: Loss,
    work: Path,
    *,
    precision: str,
    progress: Progress,
) -> UnitRanking:
    """Rank the units of a model.

    Args:
        structures: those of heads (KV groups), neurons and hidden that are asked for.
        loss: that the model was trained with.
        work: folder for scores, which survive a kill.
    """
    ranked: dict[str, list[list[int]]] = {}
    for name, units in structures.items():
        weights = units.weights(model, anatomy)
        options: dict[str, Any] = {"precision": precision, "progress": progress, "what": f"rank {units.noun}"}
        scoring = UnitScoring(model, anatomy, weights, batches, loss, work / f"rank-{name}", **options)
        scores = units.criterion(scoring)
        ranked[name] = torch.argsort(scores, dim=1, descending=True, stable=True).tolist()
    hidden = ranked.get("hidden", [[]])[0]
    return UnitRanking(ranked.get("heads", ()), ranked.get("neurons", ()), hidden)
