"""What every objective must do: values and gradients against a transparent float64 reference, and finite
differences; zero where student and teacher agree; extreme logits, one token, no tokens, bf16."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from attar.distillation.objectives import OBJECTIVES, chunked
from attar.distillation.objectives.forward_kl import sparse_loss_and_grad
from tests.distillation.on_logits import on_logits


def kl(p, q):
    return torch.where(p > 0, p * (p.log() - q.log()), 0.0).sum(-1)


def jsd(p, q, T, beta):
    m = beta * p + (1 - beta) * q
    return T**2 * (beta * kl(p, m) + (1 - beta) * kl(q, m)) / (beta * (1 - beta))


def lk(p, q, T):
    a = torch.minimum(p, q).sum(-1)
    weight = torch.exp(-3 * a).detach()
    return weight * kl(p, q) + (1 - weight) * (1 - a)


REFERENCES = {  # (objective, options): the loss of each token, by its definition
    ("kl", ()): lambda p, q, T: T**2 * kl(p, q),
    ("reverse-kl", ()): lambda p, q, T: T**2 * kl(q, p),
    **{
        ("jsd", (("beta", beta),)): lambda p, q, T, beta=beta: jsd(p, q, T, beta)
        for beta in (0.1, 0.5, 0.7, 0.999)
    },
    ("skew-kl", (("beta", 0.1),)): lambda p, q, T: T**2 * kl(p, 0.1 * p + 0.9 * q),
    ("skew-reverse-kl", (("beta", 0.1),)): lambda p, q, T: T**2 * kl(q, 0.9 * p + 0.1 * q),
    ("tv", ()): lambda p, q, T: 0.5 * (p - q).abs().sum(-1),
    ("lk", ()): lk,
}
CASES = [pytest.param(name, dict(options), id=f"{name}{dict(options) or ''}") for name, options in REFERENCES]
SOFT = [name for name in OBJECTIVES if name != "hard"]


def logits(rows=7, vocabulary=11, seed=0, dtype=torch.float64, size=2.0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, vocabulary, generator=g, dtype=dtype) * size for _ in range(2)]


def reference(name, options, z, t, T):
    p, q = (x.div(T).softmax(-1) for x in (t, z))
    return REFERENCES[name, tuple(options.items())](p, q, T)


@pytest.mark.parametrize("T", [0.5, 1.0, 4.0])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_values_and_slopes_are_those_of_the_definition(name, options, T):
    z, t = logits()
    values, dz = OBJECTIVES[name](z.clone(), t.clone(), T, **options)
    z.requires_grad_()
    wanted = reference(name, options, z, t, T)
    assert torch.allclose(values, wanted, rtol=1e-10, atol=1e-13)
    (gradient,) = torch.autograd.grad(wanted.sum(), z)
    assert torch.allclose(dz, gradient, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("name", [name for name in SOFT if name != "lk"])  # lk's weight has no gradient
def test_gradient_against_finite_differences(name):
    z, t = logits(rows=3, vocabulary=5)
    assert torch.autograd.gradcheck(lambda x: on_logits(OBJECTIVES[name], x, t, T=1.5), z.requires_grad_())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SOFT)
def test_no_loss_and_no_slopes_where_student_and_teacher_agree(name, dtype):
    z, _ = logits(dtype=dtype, size=5.0)
    for T in (1.0, 3.0):
        values, dz = OBJECTIVES[name](z.clone(), z + 7.0, T)
        tolerance = 1e-5 if dtype == torch.float32 else 1e-12
        assert values.abs().max() <= tolerance
        assert name in ("tv", "lk") or dz.abs().max() <= tolerance  # |p - q| has two slopes at 0
    assert OBJECTIVES["kl"](z.clone(), z.clone(), 1.0)[0].abs().max() == 0.0


@pytest.mark.parametrize("name", [name for name in SOFT if name not in ("tv", "lk")])
def test_gradients_keep_their_size_over_temperatures(name):
    """T^2: while softmax is nearly linear, the slopes do not depend on the temperature."""
    z, t = logits(size=0.05)
    sizes = [OBJECTIVES[name](z.clone(), t.clone(), T)[1].norm().item() for T in (1.0, 2.0, 8.0)]
    assert sizes == pytest.approx([sizes[0]] * 3, rel=0.1)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_extreme_logits(name, options):
    """Certain and opposite predictions, differences of 10^4, tokens that both or one hold for impossible:
    nothing is NaN or infinite, and far logits agree with float64."""
    rows = [
        ([0.0, -1e4, -1e4], [-1e4, 0.0, -1e4]),
        ([1e4, 0.0, -5.0], [-1e4, 3.0, 1.0]),
        ([1.0, 2.0, -torch.inf], [0.5, 0.1, -torch.inf]),
        ([1.0, 2.0, 0.3], [0.5, 0.1, -torch.inf]),
        ([1.0, 2.0, -torch.inf], [0.5, 0.1, -1.0]),
        ([0.0, -100.0, -200.0], [-200.0, 0.0, -100.0]),
        ([0.0, -60.0, -90.0], [-90.0, 0.0, -60.0]),
    ]
    z, t = (torch.tensor(side) for side in zip(*rows, strict=True))
    values, dz = OBJECTIVES[name](z.clone(), t.clone(), 1.0, **options)
    assert torch.isfinite(values).all() and torch.isfinite(dz).all()
    assert (dz.sum(-1).abs() <= 1e-4 * (1 + dz.abs().amax(-1))).all()  # moving all logits changes nothing
    exact = reference(name, options, z.double(), t.double(), 1.0)
    known = torch.isfinite(exact)
    assert known[5:].all()
    assert torch.allclose(values.double()[known], exact[known], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", SOFT)
def test_one_token_in_the_vocabulary_and_no_tokens(name):
    values, dz = OBJECTIVES[name](torch.randn(4, 1), torch.randn(4, 1), 1.0)
    assert values.abs().max() == 0.0 and dz.abs().max() == 0.0
    values, dz = OBJECTIVES[name](torch.randn(0, 5), torch.randn(0, 5), 1.0)
    assert values.shape == (0,) and dz.shape == (0, 5)
    assert on_logits(OBJECTIVES[name], torch.randn(0, 5), torch.randn(0, 5)).item() == 0.0


@pytest.mark.parametrize("name", SOFT)
def test_blocks_change_nothing_and_inputs_stay(name, monkeypatch):
    z, t = logits(rows=37, dtype=torch.float32)
    before = z.clone(), t.clone()
    results = []
    for size in (1 << 19, 50, 1):
        monkeypatch.setattr(chunked, "CACHED", size)
        x = z.clone().requires_grad_()
        value = on_logits(OBJECTIVES[name], x.view(1, 37, -1), t.view(1, 37, -1), T=2.0)
        value.backward()
        results.append((value.item(), x.grad))
    for value, gradient in results[1:]:
        assert value == pytest.approx(results[0][0], rel=1e-6)
        assert torch.allclose(gradient, results[0][1], rtol=1e-5, atol=1e-8)
    assert torch.equal(z, before[0]) and torch.equal(t, before[1])


@pytest.mark.parametrize("name", SOFT)
def test_bf16_logits_are_computed_in_float32(name):
    z, t = (x.bfloat16() for x in logits(dtype=torch.float32))
    x = z.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):  # products of an objective are not rounded
        value = on_logits(OBJECTIVES[name], x, t)
    value.backward()
    assert value.dtype == torch.float32 and x.grad.dtype == torch.bfloat16
    wide = z.float().requires_grad_()
    wanted = on_logits(OBJECTIVES[name], wide, t.float())
    wanted.backward()
    assert value.item() == pytest.approx(wanted.item(), rel=1e-6)
    assert torch.allclose(x.grad.float(), wide.grad, rtol=1e-2, atol=1e-6)


def test_jsd_is_continuous_up_to_both_kl():
    """JSD(beta) itself shrinks like beta at 0 and like 1 - beta at 1; divided by both it does not."""
    z, t = logits(dtype=torch.float32)
    ends = {0.0: OBJECTIVES["kl"](z.clone(), t.clone()), 1.0: OBJECTIVES["reverse-kl"](z.clone(), t.clone())}
    for end, (values, dz) in ends.items():
        exact = OBJECTIVES["jsd"](z.clone(), t.clone(), beta=end)
        assert torch.equal(exact[0], values) and torch.equal(exact[1], dz)
        for distance in (1e-6, 1e-4):
            near = OBJECTIVES["jsd"](z.clone(), t.clone(), beta=abs(end - distance))
            assert torch.allclose(near[0], values, rtol=200 * distance, atol=1e-6)
            assert torch.allclose(near[1], dz, rtol=1000 * distance, atol=1000 * distance)
    steps = [
        OBJECTIVES["jsd"](z.clone(), t.clone(), beta=number / 200)[0].mean().item() for number in range(201)
    ]
    assert max(abs(a - b) for a, b in itertools.pairwise(steps)) < 0.1 * max(steps)


def test_skew_of_zero_is_plain_kl():
    z, t = logits(dtype=torch.float32)
    for skewed, plain in (("skew-kl", "kl"), ("skew-reverse-kl", "reverse-kl")):
        wanted = OBJECTIVES[plain](z.clone(), t.clone())
        for beta, tolerance in ((0.0, 0.0), (1e-6, 1e-3)):
            got = OBJECTIVES[skewed](z.clone(), t.clone(), beta=beta)
            for a, b in zip(got, wanted, strict=True):
                assert torch.allclose(a, b, rtol=tolerance, atol=tolerance)


def test_hard_labels_are_cross_entropy():
    z, _ = logits(rows=9)
    targets = torch.arange(9) % 11
    z.requires_grad_()
    value, wanted = on_logits(OBJECTIVES["hard"], z, targets), F.cross_entropy(z, targets)
    assert value.item() == pytest.approx(wanted.item(), rel=1e-12)
    got, should = (torch.autograd.grad(item, z)[0] for item in (value, wanted))
    assert torch.allclose(got, should, atol=1e-15)
    values, dz = OBJECTIVES["hard"](torch.tensor([[1e4, 0.0, -torch.inf]]), torch.tensor([1]))
    assert values.item() == 1e4 and dz.tolist() == [[1.0, -1.0, 0.0]]


def test_sparse_slopes_with_impossible_tokens():
    """A token without weight may be impossible for the student."""
    z = torch.tensor([[1.0, 2.0, -torch.inf]])
    weights, tokens = torch.tensor([[0.4, 0.6, 0.0]]), torch.tensor([[0, 1, 2]])
    entropy = -(weights[:, :2] * weights[:, :2].log()).sum(-1)
    values, dz = sparse_loss_and_grad(z.clone(), tokens, weights, entropy, 2.0)
    wanted = 4 * F.kl_div((z[:, :2] / 2).log_softmax(-1), weights[:, :2], reduction="sum")
    assert values.item() == pytest.approx(wanted.item(), abs=1e-6)
    assert torch.isfinite(dz).all() and dz[0, 2] == 0
