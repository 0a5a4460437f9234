"""Forward KL against its definition in float64."""

import pytest
import torch
from torch.nn import functional as F

from attar.distillation.objectives import chunked
from attar.distillation.objectives.forward_kl import loss_and_grad, sparse_loss_and_grad
from tests.distillation.on_logits import on_logits


def forward_kl(student, teacher, temperature=1.0):
    return on_logits(loss_and_grad, student, teacher, T=temperature)


def logits(rows=5, vocabulary=11, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(2, rows, vocabulary, generator=g, dtype=dtype) * 2 for _ in range(2)]


def by_definition(student, teacher, temperature):
    p = torch.softmax(teacher / temperature, -1)
    q = torch.softmax(student / temperature, -1)
    return temperature**2 * (p * (p.log() - q.log())).sum(-1).mean()


@pytest.mark.few(2)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
def test_value_and_gradient(temperature):
    student, teacher = logits()
    student.requires_grad_()
    value = forward_kl(student, teacher, temperature)
    assert value.dtype == torch.float64
    assert value.item() == pytest.approx(by_definition(student, teacher, temperature).item(), rel=1e-12)
    (got,) = torch.autograd.grad(value * 3, student)
    (wanted,) = torch.autograd.grad(by_definition(student, teacher, temperature) * 3, student)
    assert torch.allclose(got, wanted, atol=1e-14)
    assert torch.autograd.gradcheck(lambda z: forward_kl(z, teacher, temperature), student)


def test_is_zero_at_equality_and_positive_elsewhere():
    student, teacher = logits()
    assert forward_kl(teacher, teacher).item() == pytest.approx(0.0, abs=1e-14)
    assert forward_kl(student, teacher).item() > 0.1


def test_agrees_with_torch_over_chunks(monkeypatch):
    student, teacher = logits(rows=37, dtype=torch.float32)
    monkeypatch.setattr(chunked, "CACHED", 88)
    wanted = F.kl_div(student.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="sum") / 74
    assert forward_kl(student, teacher).item() == pytest.approx(wanted.item(), rel=1e-5)


def test_gradient_size_is_comparable_across_temperatures():
    student, teacher = (z * 0.1 for z in logits())  # small logits: softmax is nearly linear
    sizes = []
    for temperature in (1.0, 8.0):
        z = student.clone().requires_grad_()
        forward_kl(z, teacher, temperature).backward()
        sizes.append(z.grad.norm().item())
    assert sizes[0] == pytest.approx(sizes[1], rel=0.2)


def test_bf16_logits_keep_their_gradient_type():
    student, teacher = logits(dtype=torch.float32)
    z = student.bfloat16().requires_grad_()
    value = forward_kl(z, teacher.bfloat16())
    value.backward()
    assert value.dtype == torch.float32 and z.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
def test_the_sparse_loss_over_all_tokens_is_the_dense_one(temperature, monkeypatch):
    """In float64 and over chunks: value and gradient, tokens in any order and one of them split in two."""
    monkeypatch.setattr(chunked, "CACHED", 44)
    student, teacher = (z.flatten(0, 1) for z in logits())
    p = torch.softmax(teacher / temperature, -1)
    entropy = -(p * p.log()).sum(-1)
    weights, tokens = p.sort(-1)
    weights = torch.cat([weights[:, :1] / 3, weights[:, 1:], weights[:, :1] * 2 / 3], -1)
    tokens = torch.cat([tokens, tokens[:, :1]], -1)
    student.requires_grad_()
    sparse = on_logits(sparse_loss_and_grad, student, tokens, weights, entropy, T=temperature)
    dense = by_definition(student, teacher, temperature)
    assert sparse.dtype == torch.float64
    assert sparse.item() == pytest.approx(dense.item(), rel=1e-12)
    (got,) = torch.autograd.grad(sparse * 3, student)
    (wanted,) = torch.autograd.grad(dense * 3, student)
    assert torch.allclose(got, wanted, atol=1e-14)
