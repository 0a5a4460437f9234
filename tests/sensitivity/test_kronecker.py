"""The Kronecker factors against exact expectations over every label, and against autograd."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from attar.errors import ModelError
from attar.sensitivity.kronecker import collect
from tests import tiny_models

VOCABULARY, LENGTH = 4, 3


class Toy(nn.Module):
    """Embedding, a Linear, a causal mean over the tokens (so that a label reaches several of them), a
    head."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, 5)
        self.first = nn.Linear(5, 3)
        self.head = nn.Linear(3, VOCABULARY, bias=False)
        nn.init.normal_(self.first.weight)
        nn.init.normal_(self.head.weight)

    def forward(self, input_ids, use_cache=False):
        hidden = self.first(self.embedding(input_ids))
        count = torch.arange(1, hidden.shape[1] + 1)[:, None]
        return SimpleNamespace(logits=self.head(torch.tanh(hidden.cumsum(1) / count)))


def tokens(batch=2, seed=1):
    return torch.randint(0, VOCABULARY, (batch, LENGTH), generator=torch.Generator().manual_seed(seed))


def every_gradient(model, row, name):
    """(probability, G) of every sequence of labels, by autograd."""
    weight = model.get_submodule(name).weight
    for labels in itertools.product(range(VOCABULARY), repeat=LENGTH):
        log = model(row[None]).logits[0].log_softmax(-1)[range(LENGTH), list(labels)].sum()
        (G,) = torch.autograd.grad(log, weight)
        yield float(log.detach().exp()), G.double()


def exact_factors(model, rows, name, rounds):
    """Power iteration with the expectation taken over every label."""
    N, K = model.get_submodule(name).weight.shape
    H_O, H_I = torch.eye(N, dtype=torch.float64), torch.eye(K, dtype=torch.float64)
    pairs = [pair for row in rows for pair in every_gradient(model, row, name)]
    energy = sum(p * float(G.square().sum()) for p, G in pairs) / (len(rows) * LENGTH)
    for _ in range(rounds):
        new_O = sum(p * G @ H_I @ G.T for p, G in pairs)
        new_I = sum(p * G.T @ H_O @ G for p, G in pairs)
        H_O, H_I = new_O * (N / new_O.trace()), new_I * (energy / N / new_I.trace())
    return H_O, H_I


@pytest.mark.few(1)
@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("name", ["first", "head"])
def test_agrees_with_the_expectation_over_every_label(name, rounds):
    model, rows = Toy(), tokens()
    H_O, H_I = exact_factors(model, rows, name, rounds)
    actual = collect(model, [rows], [name], rounds=rounds, draws=1500, span=0)[name]
    assert (actual.output - H_O).norm() < 0.1 * H_O.norm()
    assert (actual.input - H_I).norm() < 0.1 * H_I.norm()


@pytest.mark.slow
def test_the_scale_is_the_divergence_of_a_small_change():
    model, rows = Toy(), tokens()
    actual = collect(model, [rows], ["head"], rounds=3, draws=1000, span=0)["head"]
    with torch.no_grad():
        before = model(rows).logits.double().log_softmax(-1)
        divergences, estimates = [], []
        for seed in range(40):
            E = 1e-2 * torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
            model.head.weight += E
            after = model(rows).logits.double().log_softmax(-1)
            model.head.weight -= E
            divergences.append(float((before.exp() * (before - after)).sum(-1).mean()))
            estimates.append(float(0.5 * torch.trace(E.T @ actual.output @ E @ actual.input)))
    assert sum(estimates) == pytest.approx(sum(divergences), rel=0.15)


@pytest.mark.parametrize("family", ["llama3", "gpt2", "opt"])
def test_one_draw_is_autograds_sequence_gradient(family, monkeypatch):
    model = tiny_models.build(family)
    rows = tiny_models.tokens(model, batch=3, length=6)
    name = {"llama3": "model.layers.1.mlp.down_proj", "gpt2": "transformer.h.1.mlp.c_fc"}.get(
        family, "model.decoder.layers.1.fc1"
    )
    weight = model.get_submodule(name).weight
    drawn = []
    pick = lambda logits, _: drawn.append(logits.argmin(-1)) or drawn[-1]  # noqa: E731
    monkeypatch.setattr("attar.sensitivity.gradients._sampled_labels", pick)
    actual = collect(model, list(rows.split(2)), [name], rounds=1, span=0)[name]
    labels = torch.cat(drawn).reshape(3, 6)
    wanted_O = wanted_I = 0.0
    for row, label in zip(rows, labels, strict=True):
        log = model(row[None], use_cache=False).logits[0].log_softmax(-1)
        (G,) = torch.autograd.grad(-log[range(6), label].sum(), weight)
        G = G if isinstance(model.get_submodule(name), nn.Linear) else G.T
        wanted_O, wanted_I = wanted_O + G @ G.T, wanted_I + G.T @ G
    N = len(wanted_O)
    assert torch.allclose(actual.output, wanted_O * (N / wanted_O.trace()), atol=1e-4)
    scale = wanted_I.trace() / (3 * 6 * N)
    assert torch.allclose(actual.input, wanted_I * (scale / wanted_I.trace()), atol=1e-4 * scale)


@pytest.mark.parametrize("span", [1, 2, 3])
def test_a_span_is_its_tokens_gradient(span, monkeypatch):
    """By hand: the products g_t x_t^T summed over each span, the last one shorter."""
    model, rows = Toy(), tokens()
    monkeypatch.setattr("attar.sensitivity.gradients._sampled_labels", lambda logits, _: logits.argmin(-1))
    actual = collect(model, [rows], ["first"], rounds=1, span=span)["first"]
    x = model.embedding(rows).detach()
    hidden = model.first(x)
    count = torch.arange(1, LENGTH + 1)[:, None]
    log = model.head(torch.tanh(hidden.cumsum(1) / count)).log_softmax(-1)
    (g,) = torch.autograd.grad(-log.min(-1).values.sum(), hidden)
    spans = [
        (x[row, at : at + span], g[row, at : at + span]) for row in range(2) for at in range(0, LENGTH, span)
    ]
    gradients = [D.T @ X for X, D in spans]
    H_O, H_I = sum(G @ G.T for G in gradients), sum(G.T @ G for G in gradients)
    assert torch.allclose(actual.output, H_O * (3 / H_O.trace()), atol=1e-5)
    assert torch.allclose(actual.input, H_I / (3 * rows.numel()), atol=1e-6)


def test_several_modules_at_once_are_as_one_at_a_time():
    model, rows = Toy(), tokens()
    both = collect(model, [rows], ["first", "head"], rounds=2, seed=5)
    alone = collect(model, [rows], ["head"], rounds=2, seed=5)
    assert torch.equal(both["head"].input, alone["head"].input)
    assert not torch.equal(both["head"].input, collect(model, [rows], ["head"], seed=6)["head"].input)


@pytest.mark.parametrize("rounds", [1, 2])
def test_the_output_factor_alone_is_the_one_of_both(rounds):
    model, rows = Toy(), tokens()
    both = collect(model, [rows], ["first", "head"], rounds=rounds, seed=5)
    alone = collect(model, [rows], ["first", "head"], rounds=rounds, seed=5, inputs=False)
    for name, factors in both.items():
        assert torch.equal(alone[name].output, factors.output) and not alone[name].input.numel()


def test_the_model_is_left_as_it_was():
    model, rows = Toy(), tokens()
    model.head.weight.requires_grad_(False)
    collect(model, [rows], ["first"], rounds=1)
    assert model.first.weight.requires_grad and not model.head.weight.requires_grad
    assert model.first.weight.grad is None and not model.first._forward_hooks


@pytest.mark.slow
def test_bfloat16_comes_near_to_float32():
    model, rows = Toy(), tokens()
    exact = collect(model, [rows], ["first"], rounds=1, draws=500)["first"]
    near = collect(model, [rows], ["first"], rounds=1, draws=500, autocast=torch.bfloat16)["first"]
    assert near.input.dtype == torch.float32
    assert (near.input - exact.input).norm() < 0.2 * exact.input.norm()


def test_what_is_no_linear_is_refused():
    with pytest.raises(ModelError, match="embedding"):
        collect(Toy(), [tokens()], ["embedding"])
