"""The output side of the Hessian against the exact expectation over every label, and against autograd."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from attar.errors import ModelError
from attar.sensitivity.kronecker import output_hessians
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


def of_labels(model, rows, name, labels):
    """(N, N), sum over tokens of |x|^2 g g^T for given labels (B, S), by autograd, and the log-likelihood."""
    kept = {}
    hook = model.get_submodule(name).register_forward_hook(
        lambda _, args, output: kept.update(x=args[0], y=output)
    )
    log = model(rows, use_cache=False).logits.log_softmax(-1).gather(-1, labels[..., None]).sum()
    hook.remove()
    (g,) = torch.autograd.grad(log, kept["y"])
    g, x = (value.detach().double().reshape(-1, value.shape[-1]) for value in (g, kept["x"]))
    return sum(torch.outer(u, u) * v.square().sum() for u, v in zip(g, x, strict=True)), float(log.detach())


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["first", "head"])
def test_agrees_with_the_expectation_over_every_label(name):
    model, rows = Toy(), tokens()
    wanted = 0.0
    for row in rows:
        for labels in itertools.product(range(VOCABULARY), repeat=LENGTH):
            H, log = of_labels(model, row[None], name, torch.tensor(labels)[None])
            wanted = wanted + math.exp(log) * H
    actual = output_hessians(model, [rows] * 1500, [name])[name]
    wanted *= len(wanted) / wanted.trace()
    assert (actual - wanted).norm() < 0.1 * wanted.norm()
    assert float(actual.trace()) == pytest.approx(len(actual), rel=1e-5)


@pytest.mark.parametrize("family", ["llama3", "gpt2", "opt"])
def test_one_draw_is_autograds_gradient(family, monkeypatch):
    model = tiny_models.build(family)
    rows = tiny_models.tokens(model, batch=3, length=6)
    name = {"llama3": "model.layers.1.mlp.down_proj", "gpt2": "transformer.h.1.mlp.c_fc"}.get(
        family, "model.decoder.layers.1.fc1"
    )
    drawn = []
    pick = lambda logits, _: drawn.append(logits.argmin(-1)) or drawn[-1]  # noqa: E731
    monkeypatch.setattr("attar.sensitivity.gradients._sampled_labels", pick)
    actual = output_hessians(model, list(rows.split(2)), [name])[name]
    wanted, _ = of_labels(model, rows, name, torch.cat(drawn).reshape(3, 6))
    assert torch.allclose(actual.double(), wanted * (len(wanted) / wanted.trace()), atol=1e-4)


def test_several_modules_at_once_are_as_one_at_a_time():
    model, rows = Toy(), tokens()
    both = output_hessians(model, [rows], ["first", "head"], seed=5)
    alone = output_hessians(model, [rows], ["head"], seed=5)
    assert torch.equal(both["head"], alone["head"])
    assert not torch.equal(both["head"], output_hessians(model, [rows], ["head"], seed=6)["head"])


def test_the_model_is_left_as_it_was():
    model, rows = Toy(), tokens()
    model.head.weight.requires_grad_(False)
    output_hessians(model, [rows], ["first"])
    assert model.first.weight.requires_grad and not model.head.weight.requires_grad
    assert model.first.weight.grad is None and not model.first._forward_hooks


@pytest.mark.slow
def test_bfloat16_comes_near_to_float32():
    model, rows = Toy(), tokens()
    exact = output_hessians(model, [rows] * 500, ["first"])["first"]
    near = output_hessians(model, [rows] * 500, ["first"], autocast=torch.bfloat16)["first"]
    assert near.dtype == torch.float32
    assert (near - exact).norm() < 0.2 * exact.norm()


def test_what_is_no_linear_is_refused():
    with pytest.raises(ModelError, match="embedding"):
        output_hessians(Toy(), [tokens()], ["embedding"])
