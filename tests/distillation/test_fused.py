"""The loss through the head without the logits, against plain autograd over all of them."""

import subprocess
import sys

import pytest
import torch

from attar.distillation import fused
from attar.distillation.fused import chunk_rows, head_loss
from attar.distillation.objectives import OBJECTIVES, chunked
from attar.distillation.objectives.chunked import blockwise
from attar.models.head import Head, head_of, hidden_states
from tests import tiny_models
from tests.distillation.on_logits import on_logits

SOFT = [name for name in OBJECTIVES if name != "hard"]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(fused, "BYTES", 0)
    monkeypatch.setattr(fused, "ROWS", 5)
    monkeypatch.setattr(
        chunked, "CACHED", 2 * tiny_models.VOCABULARY
    )  # blocks of 2 rows, of chunks of 5 or 16


def teacher_loss(name, states, head, T=2.0):
    """The chunk loss of an online teacher, whose logits are made of its states chunk by chunk."""

    def chunk_loss(z, part):
        return blockwise(OBJECTIVES[name], z, head.logits(states[part]), T=T, out=z)

    return chunk_loss


@pytest.mark.few(4)
@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_value_and_all_gradients_in_every_family(family):
    """Soft caps, scales, biases and tied weights are part of the head: float64, all parameters."""
    student, teacher = (tiny_models.build(family, seed=seed).double() for seed in (0, 1))
    rows = tiny_models.tokens(student, batch=3, length=9)
    chosen = torch.rand(rows.shape, generator=torch.Generator().manual_seed(0)) < 0.7
    with torch.no_grad():
        states = hidden_states(teacher, rows)[chosen]
        t = teacher(input_ids=rows).logits[chosen]
    loss = head_loss(
        hidden_states(student, rows)[chosen], head_of(student), teacher_loss("kl", states, head_of(teacher))
    )
    (loss * 3).backward()
    gradients = {name: p.grad.clone() for name, p in student.named_parameters() if p.grad is not None}
    student.zero_grad()
    plain = 4 * torch.nn.functional.kl_div(
        (student(input_ids=rows).logits[chosen] / 2).log_softmax(-1),
        (t / 2).log_softmax(-1),
        reduction="batchmean",
        log_target=True,
    )
    (plain * 3).backward()
    assert loss.item() == pytest.approx(plain.item(), rel=1e-9)
    for name, parameter in student.named_parameters():
        if parameter.grad is not None:
            assert torch.allclose(gradients[name], parameter.grad, rtol=1e-6, atol=1e-9), name


@pytest.mark.parametrize("name", SOFT)
def test_every_objective_in_float32(name):
    g = torch.Generator().manual_seed(0)
    h, s = torch.randn(23, 12, generator=g), torch.randn(23, 8, generator=g)
    W, U = torch.randn(40, 12, generator=g), torch.randn(40, 8, generator=g)
    weights = torch.rand(23, generator=g)
    results = []
    for whole in (False, True):
        h, W = (x.detach().clone().requires_grad_() for x in (h, W))
        head, teacher = Head(W, None, 0.5, 6.0), Head(U)
        if whole:
            z, t = head.logits(h), teacher.logits(s)
            losses = torch.stack([on_logits(OBJECTIVES[name], z[i], t[i], T=2.0) for i in range(23)])
            loss = (losses * weights).mean()
        else:
            loss = head_loss(h, head, teacher_loss(name, s, teacher), weights)
        loss.backward()
        results.append((loss.item(), h.grad, W.grad))
        h, W = h.detach(), W.detach()
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    for got, wanted in zip(results[0][1:], results[1][1:], strict=True):
        assert torch.allclose(got, wanted, rtol=1e-3, atol=1e-6)


def test_what_is_frozen_gets_no_gradient_and_no_work(monkeypatch):
    h, W = torch.randn(9, 6, requires_grad=True), torch.randn(11, 6)
    products = []
    add = fused._add_gradients
    monkeypatch.setattr(
        fused, "_add_gradients", lambda g, *more: products.append([x is not None for x in g]) or add(g, *more)
    )
    loss = head_loss(h, Head(W, torch.zeros(11)), teacher_loss("kl", torch.randn(9, 6), Head(W)))
    loss.backward()
    assert products[0] == [True, False, False]
    products.clear()
    with torch.no_grad():
        value = head_loss(h, Head(W.requires_grad_()), teacher_loss("kl", torch.randn(9, 6), Head(W)))
    assert not value.requires_grad and products[0] == [False, False, False]


def test_no_tokens_and_sizes_of_chunks(monkeypatch):
    h, W = torch.randn(0, 6, requires_grad=True), torch.randn(11, 6, requires_grad=True)
    loss = head_loss(h, Head(W), teacher_loss("kl", torch.randn(0, 6), Head(W)))
    loss.backward()
    assert loss.item() == 0.0 and W.grad.abs().max() == 0.0 and h.grad.shape == (0, 6)
    monkeypatch.undo()

    def rows(n, *shape, dtype=torch.float32, free=None):
        return chunk_rows(n, torch.empty(shape, device="meta", dtype=dtype), free)

    assert rows(10_000, 128_000, 64) == 131 and rows(10_000, 128_000, 64, dtype=torch.bfloat16) == 262
    assert rows(10_000, 128_000, 4096) == 2048  # half of dW
    assert rows(10_000, 10**7, 8) == 16 and rows(7, 100, 8) == 7
    card = {"dtype": torch.bfloat16, "free": 70 << 30}  # chunks of 1 GB
    assert rows(10_000, 128_000, 4096, **card) == 4194 and rows(10_000, 128_000, 4096, free=1 << 20) == 16


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_bf16_products_and_float32_sums(stored):
    """Under autocast, and with weights stored in bf16: near the float32 result, gradients in the types of
    their parameters."""
    g = torch.Generator().manual_seed(0)
    h, W = (torch.randn(64, 32, generator=g), torch.randn(50, 32, generator=g))
    s = torch.randn(64, 32, generator=g)
    wanted = []
    for exact in (True, False):
        dtype = torch.float32 if exact else stored
        x, weight = (y.detach().to(dtype, copy=True).requires_grad_() for y in (h, W))
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=not exact and stored == torch.float32)
        with autocast:
            loss = head_loss(x, Head(weight), teacher_loss("kl", s.to(dtype), Head(W.to(dtype))))
        loss.backward()
        assert loss.dtype == torch.float32 and x.grad.dtype == dtype and weight.grad.dtype == dtype
        wanted.append((loss.item(), x.grad.float(), weight.grad.float()))
    assert wanted[0][0] == pytest.approx(wanted[1][0], rel=0.02)
    for exact, near in zip(wanted[0][1:], wanted[1][1:], strict=True):
        assert (exact - near).norm() < 0.02 * exact.norm()


MEMORY = """
import torch
from attar.distillation.fused import BYTES, head_loss
from attar.distillation.objectives import OBJECTIVES
from attar.distillation.objectives.chunked import blockwise, mean_of_chunks
from attar.memory import peak_rss_bytes
from attar.models.head import Head

torch.set_num_threads(1)
n, V, H = 2048, 131_072, 32
h, W = torch.randn(n, H, requires_grad=True), torch.randn(V, H, requires_grad=True)
s, U = torch.randn(n, H), torch.randn(V, H)

def chunk_loss(z, part):
    return blockwise(OBJECTIVES["kl"], z, s[part] @ U.T, out=z)

before = peak_rss_bytes()
if {whole}:
    t = s @ U.T
    mean_of_chunks(lambda z, part: blockwise(OBJECTIVES["kl"], z, t[part], out=z), h @ W.T).backward()
else:
    head_loss(h, Head(W), chunk_loss).backward()
outputs = 4 * (n * H + V * H)
two_chunks = 2 * BYTES  # of the student's logits and of the teacher's
print((peak_rss_bytes() - before - outputs) / two_chunks)
"""


@pytest.mark.slow
def test_peak_memory_is_two_chunks():
    """At V = 131,072 and n = 2,048, where one tensor of all logits takes 16 chunks."""

    def chunks(whole):
        code = [sys.executable, "-c", MEMORY.format(whole=whole)]
        return float(subprocess.run(code, capture_output=True, text=True, check=True).stdout)

    assert chunks(False) < 2.0
    assert chunks(True) > 16.0  # the measure sees what it should
