"""Losses and measures of drafting against their definitions, by hand and by enumeration."""

import itertools

import pytest
import torch

from attar.distillation.for_drafting import by_rows
from attar.distillation.objectives import OBJECTIVES, chunked
from attar.distillation.objectives.overlap import acceptance, expected_tokens
from tests.distillation.on_logits import on_logits


def total_variation(student, teacher, temperature=1.0):
    return on_logits(OBJECTIVES["tv"], student, teacher, T=temperature)


def lk(student, teacher, temperature=1.0):
    return on_logits(OBJECTIVES["lk"], student, teacher, T=temperature)


def logits(rows=5, vocabulary=11, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(2, rows, vocabulary, generator=g, dtype=dtype) * 2 for _ in range(2)]


def of(*probabilities):
    """Logits (1, V) of a distribution."""
    return torch.tensor([probabilities], dtype=torch.float64).log()


def lk_by_definition(student, teacher):
    p, q = torch.softmax(teacher, -1), torch.softmax(student, -1)
    a = torch.minimum(p, q).sum(-1)
    weight = torch.exp(-3 * a).detach()
    return (weight * (p * (p / q).log()).sum(-1) + (1 - weight) * (1 - a)).mean()


def test_values_by_hand():
    p, q = of(0.5, 0.3, 0.2), of(0.2, 0.2, 0.6)
    assert acceptance(q, p).item() == pytest.approx(0.6)
    assert total_variation(q, p).item() == pytest.approx(0.4)
    kl = 0.5 * 0.9162907 + 0.3 * 0.4054651 - 0.2 * 1.0986123
    assert lk(q, p).item() == pytest.approx(0.1652989 * kl + 0.8347011 * 0.4, rel=1e-6)


def test_acceptance_is_one_less_the_total_variation():
    student, teacher = logits()
    for temperature in (0.5, 1.0, 2.0):
        p, q = (torch.softmax(z / temperature, -1) for z in (teacher, student))
        half = 0.5 * (p - q).abs().sum(-1)
        assert torch.allclose(acceptance(student, teacher, temperature), 1 - half)
        assert total_variation(student, teacher, temperature).item() == pytest.approx(half.mean().item())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("loss", [total_variation])
def test_gradient_against_finite_differences(loss, temperature):
    student, teacher = logits()
    assert torch.autograd.gradcheck(lambda z: loss(z, teacher, temperature), student.requires_grad_())


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_lk_and_its_gradient_against_autograd(temperature):
    """The weight is a number and not a function, so finite differences would see another gradient."""
    student, teacher = logits()
    student.requires_grad_()
    value, wanted = (
        lk(student, teacher, temperature),
        lk_by_definition(student / temperature, teacher / temperature),
    )
    assert value.item() == pytest.approx(wanted.item(), rel=1e-12)
    got, should = (torch.autograd.grad(3 * item, student)[0] for item in (value, wanted))
    assert torch.allclose(got, should, atol=1e-14)


@pytest.mark.parametrize("loss", [total_variation, lk])
def test_zero_at_equality_and_one_where_nothing_overlaps(loss):
    _, teacher = logits()
    assert loss(teacher, teacher).item() == pytest.approx(0.0, abs=1e-12)
    certain, other = torch.tensor([[0.0, -1e4, -1e4]]), torch.tensor([[-1e4, 0.0, -1e4]])
    assert torch.isfinite(loss(other, certain))
    assert total_variation(other, certain).item() == 1.0


@pytest.mark.parametrize("loss", [total_variation, lk])
def test_chunks_change_nothing(loss, monkeypatch):
    student, teacher = logits(rows=37, dtype=torch.float32)
    whole = loss(student, teacher).item()
    monkeypatch.setattr(chunked, "CACHED", 88)
    assert loss(student, teacher).item() == pytest.approx(whole, rel=1e-6)


def test_bf16_logits_keep_their_gradient_type():
    student, teacher = logits(dtype=torch.float32)
    z = student.bfloat16().requires_grad_()
    value = total_variation(z, teacher.bfloat16())
    value.backward()
    assert value.dtype == torch.float32 and z.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("K", [1, 2, 4, 8])
@pytest.mark.parametrize("a", [0.0, 0.3, 0.8])
def test_expected_tokens_is_the_formula(a, K):
    assert expected_tokens(a, K) == pytest.approx((1 - a ** (K + 1)) / (1 - a))
    assert expected_tokens(1.0, K) == K + 1


def test_tokens_of_a_chain_by_rows_are_those_of_all_drafts():
    """A Markov target and draft over three tokens: what rows of the target say is what the rule brings."""
    g = torch.Generator().manual_seed(1)
    p, q = (torch.softmax(torch.randn(3, 3, generator=g, dtype=torch.float64) * 2, -1) for _ in range(2))
    K, start = 3, 0
    wanted = 1.0  # enumerated over drafts: every prefix that is drawn from q and accepted
    for length in range(1, K + 1):
        for path in itertools.product(range(3), repeat=length):
            steps = list(zip((start, *path), path, strict=False))
            wanted += float(torch.stack([torch.minimum(p[s, x], q[s, x]) for s, x in steps]).prod())
    rows, weights = [], []  # every row of the target of K tokens, repeated as often as it is likely
    for path in itertools.product(range(3), repeat=K):
        steps = list(zip((start, *path), path, strict=False))
        rows.append([float((q[s, x] / p[s, x]).log().clamp(max=0)) for s, x in steps])
        weights.append(float(torch.stack([p[s, x] for s, x in steps]).prod()))
    counts = [round(weight * 200_000) for weight in weights]
    drawn = torch.tensor(rows, dtype=torch.float64).repeat_interleave(torch.tensor(counts), 0)
    padded = [torch.cat([drawn[:, :k], torch.full((len(drawn), K - k), torch.nan)], 1) for k in (1, 2, 3)]
    sums = [float(item[:, :k].sum(1).exp().mean()) for k, item in zip((1, 2, 3), padded, strict=True)]
    assert 1 + sum(sums) == pytest.approx(wanted, rel=1e-3)
    assert by_rows(drawn[:, :1], 1) == pytest.approx(1 + sums[0], rel=1e-9)
    assert by_rows(drawn, 3) - by_rows(drawn, 2) == pytest.approx(sums[2], rel=1e-9)


def test_runs_over_padding_do_not_count():
    rows = torch.tensor([[-1.0, -2.0, torch.nan], [0.0, torch.nan, torch.nan]], dtype=torch.float64)
    e = torch.tensor([-1.0, -2.0, 0.0, -3.0]).exp().tolist()
    assert by_rows(rows, 2) == pytest.approx(1 + sum(e[:3]) / 3 + e[3], rel=1e-6)
