"""Sequential temperature scaling: known temperatures are found, and the error is that of a loop."""

import pytest
import torch

from attar.distillation.heads.finish import (
    calibrate,
    expected_calibration_error,
    fit_temperatures,
    survival_errors,
)


def confidences(n=4000, K=3, seed=0):
    """Logits that are too large by a factor for each position, of outcomes drawn from the right chances."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(n, K, generator=generator, dtype=torch.float64) + 1.0
    drawn = torch.rand(n, K, generator=generator, dtype=torch.float64) < torch.sigmoid(z)
    return z, drawn.double()


def test_the_error_is_that_of_a_loop_over_bins():
    generator = torch.Generator().manual_seed(1)
    predicted, actual = torch.rand(2, 300, generator=generator, dtype=torch.float64)
    wanted = 0.0
    for bin in range(15):
        inside = [i for i in range(300) if bin / 15 <= predicted[i] < (bin + 1) / 15]
        if inside:
            wanted += len(inside) / 300 * abs(float(predicted[inside].mean() - actual[inside].mean()))
    assert expected_calibration_error(predicted, actual) == pytest.approx(wanted, abs=1e-12)
    assert expected_calibration_error(torch.ones(4), torch.ones(4)) == 0.0


def test_temperatures_of_overconfident_positions_are_found():
    z, outcomes = confidences()
    factors = torch.tensor([3.0, 0.5, 1.0], dtype=torch.float64)
    fitted = fit_temperatures(z * factors, outcomes)
    assert fitted == pytest.approx(factors.tolist(), rel=0.3)
    before, after = (survival_errors(z * factors, outcomes, T) for T in ((), fitted))
    assert max(after) < 0.03 < max(before)


@pytest.mark.slow
def test_the_error_is_of_chains_that_were_not_fitted():
    z, outcomes = confidences(8000)
    b, temperatures, details = calibrate(4 * z, outcomes)
    errors = details["calibration_error"]
    assert details["chains_calibrated_on"] == 4000 and len(temperatures) == 3
    assert errors["calibrated"] == pytest.approx(
        survival_errors(4 * z[4000:] + b, outcomes[4000:], temperatures), abs=1e-4
    )
    assert max(errors["calibrated"]) < 0.03 < max(errors["uncalibrated"])
    assert calibrate(z[:100], outcomes[:100]) == (0.0, (), {})


@pytest.mark.slow
def test_a_head_that_is_too_sure_of_everything_gets_a_bias():
    z, outcomes = confidences(8000)
    sure = z + 1.6
    alone = survival_errors(sure[4000:], outcomes[4000:], fit_temperatures(sure[:4000], outcomes[:4000]))
    b, _, details = calibrate(sure, outcomes)
    assert b == pytest.approx(-1.6, abs=0.4)
    assert max(details["calibration_error"]["calibrated"]) < 0.03 < max(alone)
