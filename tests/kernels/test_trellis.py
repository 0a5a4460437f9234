"""The compiled search on a trellis: the states of the search in torch, rings, nearer than a greedy path."""

import pytest
import torch

from attar.formats import exl3
from attar.kernels import build, trellis


def rings(states, bits):
    """Whether each state's low bits are the high ones of the next, around the seam too."""
    low = (1 << (16 - bits)) - 1
    return bool(((states & low) == (states.roll(-1, 1) >> bits)).all())


@pytest.mark.skipif(build.load("trellis") is None, reason="no compiler")
@pytest.mark.parametrize("bits", [2, 4])
def test_states_are_those_of_torch(monkeypatch, bits):
    values = exl3.codebook("mul1").float()
    numbers = torch.randn(1, 256, generator=torch.Generator().manual_seed(bits))
    compiled = trellis.nearest_paths(numbers, values, bits)
    monkeypatch.setenv("ATTAR_KERNELS", "off")
    assert torch.equal(trellis.nearest_paths(numbers, values, bits), compiled)


@pytest.mark.parametrize("bits", range(1, 9))
def test_rings_lose_as_little_as_theory_allows(bits):
    """Normal numbers: more than the rate-distortion bound 4^-b, less than 1.5 times it."""
    spread = {1: 1.1, 2: 1.0, 3: 0.9, 4: 0.87}.get(bits, 0.8)
    numbers = spread * torch.randn(2, 256, generator=torch.Generator().manual_seed(1))
    values = exl3.codebook("mul1").float()
    states = trellis.nearest_paths(numbers, values, bits)
    assert rings(states, bits)
    lost = float((values[states] - numbers).square().sum() / numbers.square().sum())
    assert 0.9 < lost * 4**bits < 1.5


def test_what_lies_on_a_ring_is_found():
    """Numbers that are a ring's own values."""
    ring = exl3.states(torch.arange(32).mul(2654435761).to(torch.int16)[None], 2)
    values = exl3.codebook("mul1").float()
    assert torch.equal(values[trellis.nearest_paths(values[ring], values, 2)], values[ring])
