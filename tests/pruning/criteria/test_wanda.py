"""Wanda's scores and masks against float64 by hand."""

import copy

import pytest
import torch
from torch import nn

from attar.errors import NumericsError
from attar.pruning.criteria.wanda import InputNorms, observe_norms, wanda_scores
from attar.sparsity import Sparsity, parse_sparsity


def data(seed=0):
    g = torch.Generator().manual_seed(seed)
    batches = [torch.randn(2, 9, 24, generator=g) * torch.logspace(-2, 2, 24) for _ in range(3)]
    return torch.randn(10, 24, generator=g), batches


def test_norms_and_scores():
    weight, batches = data()
    norms = InputNorms(24)
    for batch in batches:
        norms.add(batch)
    X = torch.cat([batch.reshape(-1, 24) for batch in batches]).double()
    assert norms.tokens == 54
    assert torch.allclose(norms.value().double(), X.square().sum(0).sqrt(), rtol=1e-6)
    scores = wanda_scores(weight.bfloat16(), norms.value())
    by_hand = torch.tensor(
        [[abs(float(weight.bfloat16()[i, j])) * float(X[:, j].norm()) for j in range(24)] for i in range(10)]
    )
    assert torch.allclose(scores, by_hand, rtol=1e-5)


@pytest.mark.parametrize("amount", ["0.5", "0.3", "0.77", "2:4", "1:4", "4:8"])
def test_masks_compare_the_weights_of_one_row(amount):
    """A loop over rows, each row's smallest scores by sorting."""
    weight, batches = data()
    norms = torch.cat([batch.reshape(-1, 24) for batch in batches]).norm(dim=0)
    sparsity = parse_sparsity(amount)
    scores = wanda_scores(weight, norms)
    mask = sparsity.mask(scores, by_row=True)
    for row, stays in zip(scores.tolist(), mask.tolist(), strict=True):
        runs = (
            [range(start, start + sparsity.of) for start in range(0, 24, sparsity.of)] if sparsity.of else []
        )
        for columns in runs or [range(24)]:
            ranked = sorted(columns, key=lambda column: row[column])
            gone = [column for column in columns if not stays[column]]
            assert set(gone) == set(ranked[: len(gone)])
            assert len(gone) == sparsity.of - sparsity.kept if sparsity.of else True
    if not sparsity.of:
        zeros = (~mask).sum(1)
        assert int(zeros.sum()) == round(240 * sparsity.zeros), "exact to the weight"
        assert int(zeros.max() - zeros.min()) <= 1


def test_output_error_is_that_of_the_tokens_kept():
    weight, batches = data()
    norms = InputNorms(24, sample=7)
    for batch in batches:
        norms.add(batch)
    X = torch.cat(norms.kept).double()
    every = torch.cat([batch.reshape(-1, 24) for batch in batches]).double()
    assert len(X) == 2 * 3, "a sixteenth of each batch, rounded up"
    assert all(any(torch.equal(row, one) for one in every) for row in X)
    changed = weight.masked_fill(~Sparsity(0.5).mask(weight.abs()), 0.0)
    lost = ((weight - changed).double() @ X.T).square().sum() / (weight.double() @ X.T).square().sum()
    assert norms.output_error(weight, changed) == pytest.approx(float(lost), rel=1e-5)


def test_hooks_observe_every_pass_but_not_meta():
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    seen, hooks = observe_norms(model, {"0": 4, "2": 6})
    x = torch.randn(5, 4)
    with torch.no_grad():
        model(x)
        model(x)
        hidden = torch.tanh(model[0].weight @ x.T + model[0].bias[:, None]).T
    assert torch.allclose(seen["2"].value(), (2 * hidden.square().sum(0)).sqrt(), rtol=1e-5)
    copy.deepcopy(model).to("meta")(torch.empty(3, 4, device="meta"))
    assert seen["0"].tokens == 10
    for hook in hooks:
        hook.remove()
    model(x)
    assert seen["0"].tokens == 10


def test_inputs_that_are_not_finite_are_named():
    norms = InputNorms(2)
    norms.add(torch.tensor([[1.0, float("inf")]]))
    with pytest.raises(NumericsError, match="not finite"):
        norms.value()
