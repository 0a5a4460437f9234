"""From the loss of a plan to the KL that its recipe will have on held-out text, with an interval.

    o_i = ln(measured_i / loss_i)                of plans that were run, and of the prior
    mean = (m_0 / s_0^2 + sum o_i / v_i) / (1 / s_0^2 + sum 1 / v_i)
    v_i = s_1^2 + (d ln(loss / loss_i))^2
    KL = loss e^mean,  90 % interval  loss e^(mean +- 1.645 sqrt(1 / (1 / s_0^2 + sum 1 / v_i) + s_1^2))

A loss is measured on the calibration text with every Linear rounded by the method alone, a recipe rounds
behind rounded layers, tunes few bits, and is measured on other text: they differ by a factor that
depends on the method and the model, and varies slowly with the loss. Without runs of this model the prior
(m_0, s_0) counts, with them it is forgotten: the mean of normal observations with a normal prior.

What a cut costs is no rounding: it is counted as it was measured, times e^(+- 1.645 s_2) at the ends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from attar.recipe.plan_history import PlanRecord

Z90 = 1.645
WITHIN = 0.12  # s_1: of plans of one model
DRIFT = 0.15  # d: of the factor's logarithm for each e-fold of loss
CUT = 0.2  # s_2: of a cut's KL between texts
PRIORS = {"rtn": (0.05, 0.25), "gptq": (-0.35, 0.25)}
OTHER = (-0.5, 0.6)
"""m_0 and s_0 by method: guesses from few runs of attar:tiny and attar:tiny-moe, until a model has runs of
its own; ``python benchmarks/plan.py`` prints ln(measured / loss) of new ones."""


@dataclass(frozen=True)
class PredictedKL:
    """KL in nats a token, and its 90 % interval."""

    kl: float
    low: float
    high: float


def predicted_kl(
    loss: float, method: str, model: str, records: Sequence[PlanRecord], cut_loss: float = 0.0
) -> PredictedKL:
    """The KL of a plan of this loss.

    Args:
        loss: nats a token, on the calibration text.
        cut_loss: the part of it that the model lost before it was coded.
        method: of the rounding.
        model: fingerprint; runs of other models do not count.
        records: of plans that were run.
    """
    coded = max(loss - cut_loss, 0.0)
    start, spread = PRIORS.get(method, OTHER)
    weight, total = 1 / spread**2, start / spread**2
    for record in records:
        known, measured = record.predicted.get("loss", 0.0), record.measured.get("kl", 0.0)
        if record.model == model and record.method == method and known > 0 and measured > 0 and coded > 0:
            variance = WITHIN**2 + (DRIFT * math.log(coded / known)) ** 2
            weight, total = weight + 1 / variance, total + math.log(measured / known) / variance
    mean, spread = total / weight, math.sqrt(1 / weight + WITHIN**2)
    return PredictedKL(
        *(
            coded * math.exp(mean + side * Z90 * spread) + cut_loss * math.exp(side * Z90 * CUT)
            for side in (0, -1, 1)
        )
    )
