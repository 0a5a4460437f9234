"""What becomes of a head after its last step: it is measured on held-out rows, and its confidence
calibrated.

Calibration of a confidence head by sequential temperature scaling (Cheng et al. 2026, arXiv 2607.05147,
section 3.3; temperature scaling: Guo et al. 2017, arXiv 1706.04599).

    s_k = sigmoid((z_1 + b) / T_1) ... sigmoid((z_k + b) / T_k)      the survival of a chain to its draft k
    T_k = argmin ECE(s_k, a_1 ... a_k)                   for k = 1, 2, ...: those before it stay as they are
    b   = argmin sum_k ECE(s_k, a_1 ... a_k)             one of all drafts (Platt 1999): 0 in the paper

    ECE = sum over bins of (chains in it / n) |mean s - mean a_1 ... a_k|

What a scheduler needs is the survival, not each confidence. A temperature does not change which chain of two
is the likelier one. A head that has seen its rows several times is too sure of all of them, which no
temperature mends: b is the difference, and goes into the bias of the confidence. Temperatures and b are
fitted on one half of the chains, and their error is that on the other.

Letters: n chains, K drafts of a chain, z logits of confidence, a acceptance, T temperatures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attar.data.examples import Examples
from attar.distillation.heads.report import DraftedChains
from attar.distillation.heads.target_pass import TargetPass

BINS = 15
LEAST = 64  # chains of a half
BIASES = torch.linspace(-3, 3, 31, dtype=torch.float64)
TEMPERATURES = torch.logspace(-0.7, 0.7, 141, dtype=torch.float64)  # 0.2 to 5


def expected_calibration_error(predicted: Tensor, actual: Tensor, bins: int = BINS) -> float:
    """ECE of probabilities (n,) in bins of equal width; 0 of none."""
    index = (predicted * bins).long().clamp(0, bins - 1)
    differences = torch.zeros(bins, dtype=torch.float64).index_add_(0, index, (predicted - actual).double())
    return float(differences.abs().sum()) / max(len(predicted), 1)


def fit_temperatures(logits: Tensor, acceptance: Tensor) -> tuple[float, ...]:
    """T_1..T_K.

    Args:
        logits: (n, K) of whole chains.
        acceptance: (n, K).
    """
    z, lived = logits.double(), acceptance.double().cumprod(1)
    before, temperatures = torch.ones(len(z), dtype=torch.float64), []
    for k in range(z.shape[1]):
        errors = [
            expected_calibration_error(before * torch.sigmoid(z[:, k] / T), lived[:, k]) for T in TEMPERATURES
        ]
        T = float(TEMPERATURES[int(torch.tensor(errors).argmin())])
        before = before * torch.sigmoid(z[:, k] / T)
        temperatures.append(round(T, 4))
    return tuple(temperatures)


def fit_bias(logits: Tensor, acceptance: Tensor) -> tuple[float, tuple[float, ...]]:
    """b and T_1..T_K; arguments as above."""
    fitted = [(float(b), fit_temperatures(logits + b, acceptance)) for b in BIASES]
    return min(fitted, key=lambda fit: sum(survival_errors(logits + fit[0], acceptance, fit[1])))


def survival_errors(logits: Tensor, acceptance: Tensor, temperatures: tuple[float, ...]) -> list[float]:
    """ECE of the survival to each draft, (K,)."""
    T = torch.tensor(temperatures or [1.0] * logits.shape[1], dtype=torch.float64)
    survival, lived = torch.sigmoid(logits.double() / T).cumprod(1), acceptance.double().cumprod(1)
    return [expected_calibration_error(survival[:, k], lived[:, k]) for k in range(logits.shape[1])]


def calibrate(logits: Tensor, acceptance: Tensor) -> tuple[float, tuple[float, ...], dict[str, Any]]:
    """b and T_1..T_K, 0 and none where there are too few chains or they do not help; and the card's details.

    Args:
        logits: (n, K) of whole chains, in the order of their text.
        acceptance: (n, K).
    """
    half = len(logits) // 2
    if half < LEAST:
        return 0.0, (), {}
    b, fitted = fit_bias(logits[:half], acceptance[:half])
    raw = survival_errors(logits[half:], acceptance[half:], ())
    scaled = survival_errors(logits[half:] + b, acceptance[half:], fitted)
    b, fitted = (b, fitted) if sum(scaled) < sum(raw) else (0.0, ())
    errors = {"uncalibrated": raw, "calibrated": scaled if fitted else raw}
    rounded = {name: [round(error, 4) for error in values] for name, values in errors.items()}
    return b, fitted, {"calibration_error": rounded, "chains_calibrated_on": half}


TargetRun = Callable[[Examples], TargetPass]
HeadFinish = Callable[[Any, TargetRun, Sequence[Examples], Any], tuple[DraftedChains, dict[str, Any]]]


def finish_by(chains_of: Callable[[Any, TargetPass, Any], DraftedChains]) -> HeadFinish:
    """The finish of a head whose chains on a pass of its target are those of a function."""

    def finish(
        head: Any, target: TargetRun, batches: Sequence[Examples], options: Any
    ) -> tuple[DraftedChains, dict[str, Any]]:
        with torch.no_grad():
            chains = DraftedChains.joined([chains_of(head, target(batch), options) for batch in batches])
        return chains, _calibrate(head, chains)

    return finish


def _calibrate(head: Any, chains: DraftedChains) -> dict[str, Any]:
    """Give a head with a confidence its temperatures, and their bias. What the card says of them."""
    if chains.confidence is None:
        return {}
    complete = chains.complete
    bias, temperatures, details = calibrate(chains.confidence[complete], chains.acceptance[complete])
    with torch.no_grad():
        head.confidence_head.proj.bias += bias
    head.config = replace(head.config, temperatures=temperatures)
    return details
