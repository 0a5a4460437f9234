"""Importance of units that stages share: one score a file. A criterion gets a
:class:`~attar.importance.scoring.UnitScoring` and returns scores, the more important the larger: float64
(layers, units) of heads and neurons, (1, channels) of the residual stream, (1, layers).
"""

from collections.abc import Callable

from torch import Tensor

from attar.importance.influence import influence
from attar.importance.layer_kl import layer_kl
from attar.importance.layer_run import run_scores
from attar.importance.scoring import UnitScoring

UnitCriterion = Callable[[UnitScoring], Tensor]

LAYER_CRITERIA: dict[str, UnitCriterion] = {"influence": influence, "kl": layer_kl, "run": run_scores}
"""Of layers."""
