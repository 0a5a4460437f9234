"""Static scales: what the calibration must see, and what comes out."""

import pytest
import torch

from attar.errors import NumericsError
from attar.formats.rules import ActivationRule
from attar.quantization.calibration import ActivationRange

INT8 = ActivationRule("int", 8, "tensor", dynamic=False)
FP8 = ActivationRule("float", 8, "tensor", dynamic=False)


@pytest.mark.parametrize(("rule", "most"), [(INT8, 127.5), (FP8, 448.0)])
def test_the_largest_magnitude_of_all_batches(rule, most):
    seen = ActivationRange(rule)
    batches = [torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    for batch in batches:
        seen.add(batch.to(torch.bfloat16))
    top = max(float(batch.to(torch.bfloat16).abs().max()) for batch in batches)
    assert seen.scale() == pytest.approx(top / most, rel=1e-6) and seen.zero() == 0
    assert seen.tokens == 40


def test_asymmetric_ranges_reach_to_zero():
    seen = ActivationRange(ActivationRule("int", 8, "tensor", dynamic=False, symmetric=False))
    seen.add(torch.tensor([[2.0, 10.2]]))
    assert seen.scale() == pytest.approx(10.2 / 255) and seen.zero() == -128
    seen.add(torch.tensor([[-10.2, 0.0]]))
    assert seen.scale() == pytest.approx(20.4 / 255) and seen.zero() == 0  # halves go to the even number


def test_zeros_nothing_and_nan():
    seen = ActivationRange(INT8)
    with pytest.raises(NumericsError, match="no activation"):
        seen.scale()
    seen.add(torch.zeros(1, 4))
    assert seen.scale() == 1.0
    for bad in (float("nan"), float("inf")):
        seen = ActivationRange(INT8)
        for value in (1.0, bad, 2.0):
            seen.add(torch.tensor([[0.0, value]]))
        with pytest.raises(NumericsError, match="NaN or infinity"):
            seen.scale()
