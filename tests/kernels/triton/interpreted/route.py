"""The choice of experts in Triton's interpreter, against the operator's body; order and ends, of what was
chosen, against a sort."""

import pytest
import torch

from attar.kernels.device.elementwise import route as body
from attar.kernels.triton import route

CHOICES = {  # k, scoring, normalized, scaling, groups, active groups, scores of a group, J
    "softmax": (2, "softmax", False, 1.0, 1, 1, 1, 0),
    "normalized, shared": (4, "softmax", True, 1.0, 1, 1, 1, 2),
    "groups": (3, "sigmoid", True, 2.5, 4, 2, 2, 1),
    "groups by their best": (2, "softmax", True, 1.0, 2, 1, 1, 0),
    "one": (1, "sigmoid", False, 1.0, 1, 1, 1, 0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("E", "T"), [(8, 1), (12, 7), (40, 33)])
@pytest.mark.parametrize("name", CHOICES)
def test_the_choice_is_the_operators(name, E, T, dtype):
    H, bias = 72, torch.randn(E)
    x, router = torch.randn(T, H).to(dtype), torch.randn(E, H)
    correction = torch.rand(E) if "groups" in name else None
    gate = torch.randn(H) / 8 if "shared" in name else None
    given = (x, router, bias, correction, gate, *CHOICES[name])
    ours, wanted = route.route(*given), body(*given)
    torch.testing.assert_close(ours[0], wanted[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours[3], wanted[3], rtol=1e-4, atol=1e-5)
    assert torch.equal(ours[1], wanted[1]) and torch.equal(ours[2], wanted[2])


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_of_equal_experts_the_first_is_chosen(scoring):
    shares, order, ends, _ = route.route(
        torch.ones(3, 16), torch.ones(6, 16), None, None, None, 2, scoring, True, 1.0, 3, 2, 1, 0
    )
    assert order.tolist() == [0, 2, 4, 1, 3, 5] and ends.tolist() == [3, 6, 6, 6, 6, 6]
    torch.testing.assert_close(shares, torch.full((3, 2), 0.5))


def test_more_pairs_and_experts_than_a_program_has():
    T, E, k = 90, 150, 3
    x, router = torch.randn(T, 32), torch.randn(E, 32)
    given = (x, router, None, None, None, k, "softmax", True, 1.0, 1, 1, 1, 1)
    ours, wanted = route.route(*given), body(*given)
    assert torch.equal(ours[1], wanted[1]) and torch.equal(ours[2], wanted[2])
