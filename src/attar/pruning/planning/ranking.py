"""The units of a model in the order of their importance, for plans that cut several structures together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attar.models.parts import Anatomy
from attar.progress import Progress
from attar.pruning.planning.costs import WIDTHS
from attar.pruning.planning.space import UnitRanking
from attar.pruning.scoring import UnitScoring
from attar.pruning.structures import STRUCTURES
from attar.walks.objectives import Loss


def rank_units(
    model: Any,
    anatomy: Anatomy,
    structures: Sequence[str],
    batches: Sequence[Tensor],
    loss: Loss,
    work: Path,
    *,
    criterion: str,
    precision: str,
    progress: Progress,
) -> UnitRanking:
    """Rank the heads, neurons and channels of a model, those of these structures.

    Args:
        loss: that the model was trained with.
        work: folder for scores, which survive a kill.
        criterion: of heads and neurons; ``auto`` is the first of each structure.
    """
    ranked: dict[str, list[list[int]]] = {}
    for name in WIDTHS:
        if name in structures:
            structure = STRUCTURES[name]
            chosen = criterion if criterion in structure.criteria else next(iter(structure.criteria))
            scoring = UnitScoring(
                model,
                anatomy,
                structure.weights(model, anatomy),
                batches,
                loss,
                work / f"rank-{name}",
                precision=precision,
                progress=progress,
                what=f"rank {structure.noun}",
            )
            scores = structure.criteria[chosen](scoring).reshape(-1, structure.total(anatomy))
            ranked[name] = torch.argsort(scores, dim=1, descending=True, stable=True).tolist()
    hidden = ranked.get("hidden", [[]])[0]
    return UnitRanking(ranked.get("heads", ()), ranked.get("neurons", ()), hidden)
