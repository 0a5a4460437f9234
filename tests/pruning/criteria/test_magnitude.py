"""Magnitudes, and the exact threshold over several matrices against a sort of all their weights."""

import pytest
import torch

from attar.pruning.criteria.magnitude import global_zeros, magnitude_scores


def matrices(dtype, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = {"a": (7, 40), "b": (30, 16), "c": (5, 5), "d": (64, 33)}
    weights = {
        name: torch.randn(shape, generator=g) * 10.0 ** (number - 2)
        for number, (name, shape) in enumerate(shapes.items())
    }
    weights["b"][:4] = 0.0
    weights["c"][0] = -0.0
    return {name: weight.to(dtype) for name, weight in weights.items()}


def by_sorting(weights, zeros):
    """The same in float64: the ``zeros`` smallest of all, of equal ones the last."""
    entries = [
        (abs(value), -position, name)
        for position, (name, value) in enumerate(
            (name, value) for name, weight in weights.items() for value in weight.double().flatten().tolist()
        )
    ]
    gone = [name for _, _, name in sorted(entries)[:zeros]]
    return {name: gone.count(name) for name in weights}


@pytest.mark.few(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.5, 0.9, 1.0])
def test_one_threshold_is_that_of_a_sort(dtype, share):
    weights = matrices(dtype)
    zeros = round(share * sum(weight.numel() for weight in weights.values()))
    counts = global_zeros({name: lambda name=name: weights[name] for name in weights}, zeros)
    assert counts == by_sorting(weights, zeros) and sum(counts.values()) == zeros


def test_scores_are_sizes():
    weight = torch.tensor([[-3.0, 0.5], [-0.0, 2.0]], dtype=torch.bfloat16)
    assert magnitude_scores(weight).tolist() == [[3.0, 0.5], [0.0, 2.0]]
