"""Plans within a budget, measured as a whole."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attar.checkpoint.units import bytes_text
from attar.models.surgery.plan_costs import STRUCTURES, PlanGrid, PlannedModel, PlanSizes
from attar.progress import Progress
from attar.pruning.planning.budget import plan_budget
from attar.pruning.planning.plans import QualityCurve, plans_within, predicted_kl, shortlist
from attar.pruning.planning.scan import curves, distance
from attar.pruning.planning.study import CutScan, CutStudy
from attar.pruning.settings import MixedSettings

SHORTLIST = 6  # distinct plans of the smallest predicted KL that are measured


@dataclass(frozen=True)
class PlanTrial:
    """A plan that was measured as a whole.

    Attributes:
        predicted: the sum of its structures' scanned KLs.
        kl: of the uncut model to the cut one; loss: of the latter, None for encoders.
        share: of the parameters that go.
        bytes: of the cut model's weights, in the type they are stored in.
        speed: tokens a second over the uncut model's, predicted from the bytes of weights that a step
            of decoding reads at batch 1.
    """

    sizes: PlanSizes
    predicted: float
    kl: float
    loss: float | None
    parameters: int
    share: float
    bytes: int
    speed: float

    def to_json(self, full: PlanSizes) -> dict[str, Any]:
        """For the card."""
        return {
            "plan": self.sizes.text(full),
            **self.sizes._asdict(),
            "predicted_kl": self.predicted,
            "kl": self.kl if math.isfinite(self.kl) else None,
            "loss": self.loss,
            "parameters": self.parameters,
            "share": self.share,
            "bytes": self.bytes,
            "predicted_speed": self.speed,
        }

    def text(self, full: PlanSizes) -> str:
        """The cut, its cost and its loss, on one line."""
        return (
            f"{self.sizes.text(full)}: removes {self.share:.1%} of the parameters, {bytes_text(self.bytes)}, "
            f"decodes about {self.speed:.2f}x as fast (predicted from the bytes read); KL {self.kl:.4f}, the "
            f"sum of its parts {self.predicted:.4f}"
        )


def try_plans(
    study: CutStudy, scanned: CutScan, options: MixedSettings, work: Path, progress: Progress
) -> list[PlanTrial]:
    """The shortlisted plans within the budget, measured; the best first.

    Raises:
        SettingsError: no plan of the scan is within the budget.
    """
    space, planned = study.space, scanned.planned
    known = curves(scanned.rows, space.full)
    grid = scanned_grid(space.grid, known)
    budget = plan_budget(planned, options)
    budget.check(planned, grid)

    def candidates(part: PlanGrid) -> Iterator[PlanSizes]:
        return plans_within(predicted_kl(known, part), planned.over(part, budget.cost), budget.limit, part)

    def accepts(plan: PlanSizes) -> bool:
        return plan != space.full and budget.fits(plan) and space.allows(plan)

    plans = shortlist(candidates, accepts, grid, space.full, SHORTLIST)
    trials = []
    with progress.task("plans", total=len(plans)) as task, study.reference(work) as reference:
        for plan in plans:
            with study.masked(plan, planned.kept_layers(plan.layers)):
                kl, loss = distance(reference, space.anatomy.causal)
            trials.append(_trial(planned, plan, known, kl, loss))
            task.advance(kl=kl)
    return sorted(trials, key=lambda trial: (trial.kl, trial.parameters))


def _trial(
    planned: PlannedModel, plan: PlanSizes, known: Mapping[str, QualityCurve], kl: float, loss: float | None
) -> PlanTrial:
    parameters = planned.parameters(plan)
    return PlanTrial(
        sizes=plan,
        predicted=float(predicted_kl(known, PlanGrid(*((size,) for size in plan)))),
        kl=kl,
        loss=loss,
        parameters=parameters,
        share=1 - parameters / planned.parameters(planned.full),
        bytes=planned.file_bytes(plan),
        speed=planned.read_bytes(planned.full) / planned.read_bytes(plan),
    )


def scanned_grid(grid: PlanGrid, known: Mapping[str, QualityCurve]) -> PlanGrid:
    """The amounts between the measured amounts that did not break the model."""
    parts = []
    for name, values in zip(STRUCTURES, grid, strict=True):
        least = known[name].points[0][0] if name in known else values[-1]
        parts.append(tuple(units for units in values if units >= least))
    return PlanGrid(*parts)
