"""Distances of hidden states and attention maps, against loops over single numbers in float64."""

import math

import pytest
import torch

from attar.distillation.features.attention import attention_distance
from attar.distillation.features.hidden import distance
from attar.distillation.features.patient import direction_distance


def dot(x, y):
    return sum(a * b for a, b in zip(x, y, strict=True))


def state_reference(h, target, kind):
    """One token, lists of numbers."""
    if kind == "cosine":
        return 1 - dot(h, target) / math.sqrt(dot(h, h) * dot(target, target))
    squares = sum((a - b) ** 2 for a, b in zip(h, target, strict=True))
    return squares / len(h) if kind == "mse" else squares / dot(target, target)


def direction_reference(h, target):
    a, b = math.sqrt(dot(h, h)), math.sqrt(dot(target, target))
    return sum((x / a - y / b) ** 2 for x, y in zip(h, target, strict=True))


def attention_reference(a, target, kind):
    """One query, heads of lists of numbers."""
    if len(a) != len(target):
        a = [[sum(column) / len(a) for column in zip(*a, strict=True)]]
        target = [[sum(column) / len(target) for column in zip(*target, strict=True)]]
    total = 0.0
    for p, q in zip(a, target, strict=True):
        if kind == "mse":
            total += sum((x - y) ** 2 for x, y in zip(p, q, strict=True))
        elif kind == "kl":
            total += sum(y * math.log(y / x) for x, y in zip(p, q, strict=True) if y > 0)
        else:
            seen = [(math.log(x), math.log(y)) for x, y in zip(p, q, strict=True) if x > 0 and y > 0]
            means = [sum(pair[side] for pair in seen) / len(seen) for side in (0, 1)]
            total += sum(((x - means[0]) - (y - means[1])) ** 2 for x, y in seen) / len(seen)
    return total / len(a)


def maps(heads, seed):
    """Causal attention maps (m, heads, S): weights of unseen keys are 0."""
    torch.manual_seed(seed)
    scores = torch.randn(5, heads, 6) * 2
    hidden = torch.arange(6) > torch.arange(5)[:, None] + 1
    return scores.masked_fill(hidden[:, None], -math.inf).softmax(-1)


@pytest.mark.parametrize("kind", ["mse", "relative", "cosine"])
def test_states_against_the_reference(kind):
    torch.manual_seed(0)
    h, target = torch.randn(4, 7), torch.randn(4, 7) * 3
    wanted = [state_reference(*pair, kind) for pair in zip(h.tolist(), target.tolist(), strict=True)]
    assert distance(h, target, kind).tolist() == pytest.approx(wanted, rel=1e-5)
    assert distance(target, target, kind).tolist() == pytest.approx([0.0] * 4, abs=1e-6)
    assert distance(h.bfloat16(), target.bfloat16(), kind).tolist() == pytest.approx(wanted, rel=0.05)


def test_directions_against_the_reference():
    torch.manual_seed(1)
    h, target = torch.randn(4, 7), torch.randn(4, 7) * 3
    wanted = [direction_reference(*pair) for pair in zip(h.tolist(), target.tolist(), strict=True)]
    assert direction_distance(h, target).tolist() == pytest.approx(wanted, rel=1e-5)
    assert direction_distance(5 * h, target / 9).tolist() == pytest.approx(wanted, rel=1e-5)
    assert wanted == pytest.approx((2 * distance(h, target, "cosine")).tolist(), rel=1e-5)


@pytest.mark.parametrize("heads", [(2, 2), (2, 3), (8, 4)])
@pytest.mark.parametrize("kind", ["mse", "kl", "scores"])
def test_attention_against_the_reference(kind, heads):
    a, target = maps(heads[0], 0), maps(heads[1], 1)
    wanted = [attention_reference(*pair, kind) for pair in zip(a.tolist(), target.tolist(), strict=True)]
    assert attention_distance(a, target, kind).tolist() == pytest.approx(wanted, rel=1e-4)
    assert attention_distance(a, a, kind).tolist() == pytest.approx([0.0] * 5, abs=1e-6)


def test_scores_are_those_before_the_softmax():
    torch.manual_seed(2)
    scores, others = torch.randn(3, 2, 6), torch.randn(3, 2, 6)
    wanted = (scores - scores.mean(-1, keepdim=True)) - (others - others.mean(-1, keepdim=True))
    got = attention_distance(scores.softmax(-1), others.softmax(-1), "scores")
    assert got.tolist() == pytest.approx(wanted.square().mean(-1).mean(-1).tolist(), rel=1e-4)


@pytest.mark.parametrize("kind", ["mse", "relative", "cosine"])
def test_gradients_of_states_by_finite_differences(kind, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.manual_seed(3)
    h, target = torch.randn(3, 4, dtype=torch.double, requires_grad=True), torch.randn(3, 4).double()
    assert torch.autograd.gradcheck(lambda x: distance(x, target, kind), (h,))
    assert torch.autograd.gradcheck(lambda x: direction_distance(x, target), (h,))


@pytest.mark.parametrize("kind", ["mse", "kl", "scores"])
def test_gradients_of_attention_by_finite_differences(kind, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.manual_seed(4)
    scores = torch.randn(3, 2, 5, dtype=torch.double, requires_grad=True)
    target = maps(2, 5)[:3, :, :5].double()
    target = target / target.sum(-1, keepdim=True)
    assert torch.autograd.gradcheck(lambda x: attention_distance(x.softmax(-1), target, kind), (scores,))
