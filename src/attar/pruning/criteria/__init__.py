"""Pruning criteria: one file each, and the tables of their names. A criterion of units gets a
:class:`~attar.importance.scoring.UnitScoring` and returns scores, the more important the larger: float64
(layers, units) of heads and neurons, (1, channels) of the residual stream, (1, layers).
"""

from attar.importance import UnitCriterion
from attar.importance.activation import activation_importance
from attar.importance.stream_activation import stream_activation_importance
from attar.pruning.criteria.gradient import gradient_importance
from attar.pruning.criteria.taylor import taylor_importance
from attar.pruning.criteria.weighted_activation import weighted_activation_importance

UNIT_CRITERIA: dict[str, UnitCriterion] = {
    "wanda": weighted_activation_importance,
    "gradient": gradient_importance,
    "taylor": taylor_importance,
    "activation": activation_importance,
}
"""Of heads and neurons. The first of a table is the default: it loses least on the models tried, and needs
forward passes only."""

HIDDEN_CRITERIA: dict[str, UnitCriterion] = {"activation": stream_activation_importance}

HEAD_CRITERIA = ("gradient", "taylor", "kl", "run")
"""Criteria that need the model's head."""

LOSS_CRITERIA = ("gradient", "taylor")
"""Criteria in units of the loss, which compare units of different layers as they are."""
