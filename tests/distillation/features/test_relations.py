"""Relations between tokens against loops over single numbers in float64, and what must not change them."""

import math

import pytest
import torch

from attar.distillation.features.relation import similarity_distance
from attar.distillation.features.rkd import angle_loss, angles, distance_loss, distances


def dot(x, y):
    return sum(a * b for a, b in zip(x, y, strict=True))


def minus(x, y):
    return [a - b for a, b in zip(x, y, strict=True)]


def norm(x):
    return math.sqrt(dot(x, x))


def huber(x):
    return x * x / 2 if abs(x) < 1 else abs(x) - 0.5


def similarity_reference(x):
    rows = [[dot(a, b) for b in x] for a in x]
    return [[value / norm(row) for value in row] for row in rows]


def distances_reference(x):
    mean = sum(norm(minus(a, b)) for a in x for b in x) / (len(x) * (len(x) - 1))
    return [[norm(minus(a, b)) / mean for b in x] for a in x]


def angle_reference(x, j, i, k):
    a, b = minus(x[i], x[j]), minus(x[k], x[j])
    return dot(a, b) / (norm(a) * norm(b))


def states():
    """Of five tokens, widths 4 and 6."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(5, 4, generator=generator), 7 * torch.randn(5, 6, generator=generator) + 3


def test_similarity_against_the_reference():
    ours, theirs = states()
    a, b = similarity_reference(ours.tolist()), similarity_reference(theirs.tolist())
    wanted = [sum((x - y) ** 2 for x, y in zip(*rows, strict=True)) for rows in zip(a, b, strict=True)]
    assert similarity_distance(ours, theirs).tolist() == pytest.approx(wanted, rel=1e-5)


def test_distances_against_the_reference():
    ours, theirs = states()
    a, b = distances_reference(ours.tolist()), distances_reference(theirs.tolist())
    wanted = [sum(huber(x - y) for x, y in zip(*rows, strict=True)) / 4 for rows in zip(a, b, strict=True)]
    assert distance_loss(ours, theirs).tolist() == pytest.approx(wanted, rel=1e-5)


def test_angles_against_the_reference():
    ours, theirs = (x.tolist() for x in states())
    wanted = []
    for j in range(5):
        others = [i for i in range(5) if i != j]
        errors = [
            huber(angle_reference(ours, j, i, k) - angle_reference(theirs, j, i, k))
            for i in others
            for k in others
            if i != k
        ]
        wanted.append(sum(errors) / 12)
    assert angle_loss(*states()).tolist() == pytest.approx(wanted, rel=1e-5)


def test_a_huge_state_does_not_spoil_the_others():
    """A massive activation: one token a thousand times as large, in float32."""
    ours, _ = states()
    ours[0] *= 3000
    points = ours.double().tolist()
    wanted = [angle_reference(points, 1, 2, 3), angle_reference(points, 4, 3, 2)]
    assert [angles(ours)[1, 2, 3].item(), angles(ours)[4, 3, 2].item()] == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("loss", [distance_loss, angle_loss])
def test_turning_moving_and_scaling_change_nothing(loss):
    ours, theirs = states()
    turn, _ = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(1)))
    wanted = loss(ours, theirs).tolist()
    assert loss(5 * (ours @ turn) + 2, theirs).tolist() == pytest.approx(wanted, rel=1e-4)
    assert loss(ours, ours @ turn).tolist() == pytest.approx([0.0] * 5, abs=1e-6)


def test_turning_and_scaling_do_not_change_similarities_but_moving_does():
    ours, theirs = states()
    turn, _ = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(1)))
    wanted = similarity_distance(ours, theirs).tolist()
    assert similarity_distance(5 * (ours @ turn), theirs).tolist() == pytest.approx(wanted, rel=1e-4)
    assert similarity_distance(ours + 2, theirs).tolist() != pytest.approx(wanted, rel=1e-2)


@pytest.mark.parametrize("loss", [distance_loss, angle_loss, similarity_distance])
def test_gradients_by_finite_differences(loss, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    ours, theirs = (x.double() for x in states())
    assert torch.autograd.gradcheck(lambda x: loss(x, theirs), (ours.requires_grad_(),))


@pytest.mark.parametrize("loss", [distance_loss, angle_loss, similarity_distance])
@pytest.mark.parametrize("count", [0, 1, 2, 4])
def test_equal_and_few_tokens_have_finite_gradients(loss, count):
    """Two tokens with one state, as two rows that begin alike have."""
    ours, theirs = (x[:count].clone() for x in states())
    ours[count // 2 :] = ours[:1]
    ours.requires_grad_()
    loss(ours, theirs).sum().backward()
    assert torch.isfinite(ours.grad).all() and len(loss(ours, theirs)) == count


def test_distances_have_mean_one():
    x, _ = states()
    assert distances(x).sum().item() == pytest.approx(20.0) and not distances(x).diagonal().any()
