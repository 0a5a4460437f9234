"""Pruning criteria: one file each, and the table of their names. A criterion scores units: float64 (layers,
units)."""

from attar.pruning.criteria.gradient import gradient_importance

CRITERIA = {"gradient": gradient_importance}
