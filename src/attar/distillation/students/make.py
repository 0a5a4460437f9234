"""A student made of its teacher: the units that matter most, or their shape with fresh weights.

Layers are chosen by a map (:mod:`attar.distillation.layer_map`) or by a score: ``influence`` (ShortGPT,
arXiv 2403.03853), ``kl``, ``run``. Heads, neurons and channels are chosen by Minitron's scores (Muralidharan
et al. 2024, arXiv 2407.14679, section 2.2): what they put out on calibration text. All scores are of the
whole teacher, taken once, as Minitron does it.
"""

from __future__ import annotations

from typing import Any

import torch

from attar.distillation.layer_map import layer_map
from attar.distillation.student_settings import StudentSettings
from attar.distillation.students.fresh import fresh_student, narrower_config
from attar.distillation.students.plan import StudentPlan, plan_student
from attar.distillation.students.text import ScoringText
from attar.importance import LAYER_CRITERIA
from attar.importance.activation import activation_importance
from attar.importance.ranking import RankedUnits, rank_units
from attar.importance.scoring import UnitScoring, no_loss
from attar.importance.stream_activation import stream_activation_importance
from attar.models.anatomy.discover import discover
from attar.models.anatomy.unit_weights import group_weights, neuron_weights
from attar.models.loading.empty import empty_model
from attar.models.surgery.cut_model import cut_model
from attar.models.surgery.cut_plan import CutPlan
from attar.models.surgery.plan_space import cut_plan_of, first_units
from attar.models.surgery.rebuild import named_config

RANKED = {
    "heads": RankedUnits("head groups", group_weights, activation_importance),
    "neurons": RankedUnits("neurons", neuron_weights, activation_importance),
    "hidden": RankedUnits("channels", lambda model, anatomy: [], stream_activation_importance),
}
"""Minitron's scores."""


def make_student(
    teacher: Any,
    settings: StudentSettings,
    seed: int = 0,
    *,
    plan: StudentPlan | None = None,
    text: ScoringText | None = None,
) -> tuple[CutPlan, Any]:
    """The student before its first step.

    Args:
        teacher: not changed.
        seed: of the weights that start afresh.
        plan: its sizes; None: those of the settings.
        text: needed where units are chosen by scores.

    Returns:
        the teacher's units that it has (or, where it starts afresh, whose shape and kinds), and the model:
        float32, in evaluation mode, all parameters trainable, on the teacher's device.

    Raises:
        SettingsError, ModelError: see :func:`attar.distillation.students.plan.plan_student`.
    """
    plan = plan or plan_student(named_config(teacher).to_dict(), torch.float32, settings)
    is_fresh = bool(settings.width) or settings.init == "random"
    units = _any_units(teacher, plan) if is_fresh else chosen_units(teacher, plan, text)
    if not is_fresh:
        return units, cut_model(teacher, units).requires_grad_(True)
    shape = cut_model(empty_model(named_config(teacher)), units)
    config = narrower_config(shape, settings.width) if settings.width else named_config(shape)
    return units, fresh_student(config, teacher, seed).requires_grad_(True)


def chosen_units(teacher: Any, plan: StudentPlan, text: ScoringText | None) -> CutPlan:
    """The most important units of the teacher, as many as the plan has."""
    if isinstance(plan.layers, tuple) and not plan.is_narrower:
        return CutPlan(layers=plan.layers)
    assert text is not None, "units are scored on text"
    anatomy, batches = discover(teacher), text.batches()
    layers = plan.layers
    passes: dict[str, Any] = {"precision": text.precision, "progress": text.progress}
    if isinstance(layers, str):
        stay = plan.sizes.layers
        what: dict[str, Any] = {"stay": stay, "what": f"rank layers by {layers}"}
        scoring = UnitScoring(teacher, anatomy, (), batches, no_loss, text.work / layers, **what, **passes)
        scores = LAYER_CRITERIA[layers](scoring).flatten()
        order = torch.argsort(scores, descending=True, stable=True)
        layers = tuple(sorted(order[:stay].tolist()))
    if not plan.is_narrower:
        return CutPlan(layers=layers)
    structures = {
        name: units for name, units in RANKED.items() if name in plan.sizes.cut_structures(plan.full)
    }
    ranking = rank_units(teacher, anatomy, structures, batches, no_loss, text.work, **passes)
    units = cut_plan_of(anatomy, plan.full, plan.sizes, ranking, layers)
    return CutPlan(units.heads, units.neurons, units.hidden, layers)


def _any_units(teacher: Any, plan: StudentPlan) -> CutPlan:
    """Units of the plan's shape, for a student that gets none of their weights."""
    layers = plan.layers
    if isinstance(layers, str):
        layers = tuple(layer_map("uniform", plan.full.layers, plan.sizes.layers))
    if not plan.is_narrower:
        return CutPlan(layers=layers)
    units = cut_plan_of(discover(teacher), plan.full, plan.sizes, first_units(plan.full), layers)
    return CutPlan(units.heads, units.neurons, units.hidden, layers)


def given_student(student: Any, settings: StudentSettings, seed: int) -> Any:
    """A model that was there before: with its own weights, or fresh ones."""
    if settings.init == "random":
        student = fresh_student(named_config(student), student, seed)
    return student.requires_grad_(True)
