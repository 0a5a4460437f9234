"""Masks in the train walk: pruned weights get no gradient, no step and no share of the clipped norm."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from attar.errors import NumericsError
from attar.walks import train as train_walk
from attar.walks.masks import Masks
from attar.walks.train import train
from tests.killed import Killed
from tests.walks.test_train import ROWS, SETTINGS, Toy, dying, loss, state


def sparse():
    """The toy with the smaller half of every four inputs of its hidden matrix at zero. (Whole columns would
    not do: Muon's update of a gradient with zero columns has them too.)"""
    model = Toy()
    with torch.no_grad():
        groups = model.hidden.weight.view(8, 2, 4)
        groups.scatter_(-1, groups.abs().argsort(-1)[..., :2], 0.0)
    return model, Masks({"hidden.weight": model.hidden.weight != 0})


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_zeros_stay_and_the_rest_learns(optimizer, accumulate):
    model, masks = sparse()
    before, mask = model.hidden.weight.detach().clone(), masks.kept["hidden.weight"]
    settings = replace(SETTINGS, optimizer=optimizer, accumulate=accumulate, weight_decay=0.5)
    train(model, loss, ROWS, settings, masks=masks)
    after = model.hidden.weight.detach()
    assert torch.equal(after != 0, mask) and not after[~mask].signbit().any()
    assert (after != before)[mask].all()
    assert masks.sparsity == 0.5
    masks.check(model)


def test_the_clipped_norm_is_that_of_kept_weights(monkeypatch):
    """The gradient at the optimizer's step is that of a model in which pruned weights are no parameters."""
    model, masks = sparse()
    mask = masks.kept["hidden.weight"]
    seen = []
    monkeypatch.setattr(
        torch.optim.AdamW,
        "zero_grad",
        lambda self, set_to_none=True: seen.append(model.hidden.weight.grad.clone()),
    )
    monkeypatch.setattr(train_walk, "MAX_GRAD_NORM", 0.01)
    settings = replace(SETTINGS, steps=1, batch_size=len(ROWS))
    model.drop.p = 0.0
    train(model, loss, ROWS, settings, masks=masks)

    same, _ = sparse()
    kept = same.hidden.weight.detach()[mask].requires_grad_(True)
    weight = torch.zeros(8, 8).masked_scatter(mask, kept)
    hidden = torch.tanh(nn.functional.linear(same.embedding(ROWS), weight, same.hidden.bias))
    value = loss(lambda tokens: same.head(hidden), ROWS)
    others = [same.hidden.bias, same.embedding.weight, same.head.weight]
    gradients = torch.autograd.grad(value, [kept, *others])
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    assert torch.allclose(seen[0][mask], gradients[0] * 0.01 / norm, rtol=1e-3)
    assert not seen[0][~mask].any()


@pytest.mark.few(1)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("died_at", [5, 9])
def test_a_killed_masked_run_ends_with_the_same_bytes(tmp_path, optimizer, died_at):
    settings = replace(SETTINGS, optimizer=optimizer, patience=2)

    def held_out(model):
        return float(loss(model, ROWS))

    whole, masks = sparse()
    train(whole, loss, ROWS, settings, work=tmp_path / "whole", held_out=held_out, masks=masks)
    cut, _ = sparse()
    with pytest.raises(Killed):
        train(cut, dying(died_at), ROWS, settings, work=tmp_path / "cut", held_out=held_out, masks=masks)
    resumed, masks = sparse()
    train(resumed, loss, ROWS, settings, work=tmp_path / "cut", held_out=held_out, masks=masks)
    assert all(torch.equal(value, state(whole)[name]) for name, value in state(resumed).items())
    masks.check(resumed)


def test_a_broken_mask_is_one_line():
    model, masks = sparse()
    with torch.no_grad():
        model.hidden.weight[0, 1] = 1e-30
    with pytest.raises(NumericsError, match=r"hidden\.weight: 1 pruned weights are no longer zero"):
        masks.check(model)


def test_masks_are_of_the_named_linears():
    model, _ = sparse()
    masks = Masks.of(model, ["hidden", "head"], lambda w: w != 0 if (w == 0).any() else None)
    assert list(masks.kept) == ["hidden.weight"] and masks
    assert not Masks.of(model, ["head"], lambda w: None) and not Masks()
