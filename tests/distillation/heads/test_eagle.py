"""EAGLE and EAGLE-3 in training: the unrolled head and the losses against loops that feed back states."""

import dataclasses

import pytest
import torch

from attar.data.examples import Examples
from attar.data.packing import PADDING
from attar.distillation.head_settings import Eagle3Settings, EagleSettings
from attar.distillation.heads import eagle3_loss as eagle3
from attar.distillation.heads import eagle_loss as eagle
from attar.distillation.heads import unroll
from attar.distillation.heads.draft_vocabulary import choose_tokens
from attar.distillation.heads.target_pass import run_target
from attar.distillation.heads.unrolled_chains import chains
from attar.errors import SettingsError
from attar.models.draft_heads.vocabulary import tokens_of
from attar.models.head import head_of
from tests import tiny_models
from tests.models.draft_heads.slow_eagle import SlowEagle

SWITCHES = {
    "plain": {},
    "norm_before_residual": {"norms": "residual"},
    "norm_before_fc": {"norms": "states"},
    "fc_norm, norm_output": {"norms": "3.1"},
    "reduced": {"draft_vocabulary": 200},
    "three layers": {"head_layers": 3},
}


def passed(head, model, length=9):
    tokens = tiny_models.tokens(model, length=length)
    batch = Examples.of_text(tokens)
    batch.targets[0, 4] = PADDING  # an answer ends there
    return run_target(model, head_of(model), head.config.layers, batch)


def made(kind, family="llama3", **options):
    """A head with random weights in float64, and a pass of its target."""
    model = tiny_models.build(family)
    settings = (EagleSettings if kind is eagle else Eagle3Settings)(**options)
    rows = Examples.of_text(tiny_models.tokens(model, batch=2, length=32))
    chosen = choose_tokens(rows, model.config.vocab_size, settings.draft_vocabulary)
    head = kind.make(model, head_of(model), settings, chosen)
    tiny_models.randomize(head, seed=3)
    return head.double(), passed(head, model.double()), settings


def embedded(target):
    return target.embedding[target.tokens]


@pytest.mark.slow
def test_each_step_is_that_of_a_head_that_drafts_after_its_own_states(monkeypatch):
    monkeypatch.setattr(unroll, "SCORES", 200)  # several parts
    for options in SWITCHES.values():
        head, target, _ = made(eagle3, **options)
        states = head.project(target.states[:, :-1])
        steps = list(unroll.unroll(head, embedded(target), states, 4))
        slow = SlowEagle(head)
        for row, i in ((0, 0), (1, 4)):
            wanted = slow.chain(embedded(target)[row], target.states[row], i, 4)
            for step, a in zip(steps, wanted, strict=True):
                torch.testing.assert_close(step[row, i], a, rtol=1e-5, atol=1e-5)


def test_the_layer_of_eagle_has_a_residual_stream_and_no_norm_before_attention():
    head, target, _ = made(eagle, family="qwen2")
    assert "fc.bias" in head.state_dict() and not any("input" in name for name in head.state_dict())
    (step,) = unroll.unroll(head, embedded(target), head.project(target.states[:, :-1]), 1)
    for i in range(5):
        (wanted,) = SlowEagle(head).chain(embedded(target)[1], target.states[1], i, 1)
        torch.testing.assert_close(step[1, i], wanted, rtol=1e-5, atol=1e-5)


def test_a_further_layer_of_eagle_has_a_norm_before_attention():
    head, target, _ = made(eagle, head_layers=2)
    names = [name for name in head.state_dict() if "input_layernorm" in name]
    assert names == ["layers.1.input_layernorm.weight"]
    (step,) = unroll.unroll(head, embedded(target), head.project(target.states[:, :-1]), 1)
    for i in range(5):
        (wanted,) = SlowEagle(head).chain(embedded(target)[1], target.states[1], i, 1)
        torch.testing.assert_close(step[1, i], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_gradients_do_not_depend_on_the_parts(monkeypatch):
    gradients = []
    for scores in (100, 1 << 23):
        monkeypatch.setattr(unroll, "SCORES", scores)
        head, target, settings = made(eagle3)
        eagle3.loss(head, target, settings).backward()
        gradients.append([parameter.grad for parameter in head.parameters()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


def divergence(p, q):
    return (p * (p.log() - q.log())).sum()


def same_gradients(head, value, wanted):
    """Two losses have the same gradients; and every parameter that is trained has one."""
    parameters = dict(head.named_parameters())
    ours, theirs = (torch.autograd.grad(loss, parameters.values()) for loss in (value, wanted))
    for name, a, b in zip(parameters, ours, theirs, strict=True):
        assert b.abs().max() > 0, f"{name} is not trained"
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6 * float(b.abs().max()), msg=name)


@pytest.mark.few(1)
@pytest.mark.parametrize("options", SWITCHES.values(), ids=SWITCHES)
def test_the_loss_of_eagle3_is_that_of_a_loop(options):
    head, target, settings = made(eagle3, **{"unrolled": 3, "decay": 0.5, **options})
    slow, (B, S) = SlowEagle(head), target.tokens.shape
    tokens = torch.arange(head.config.vocabulary) if tokens_of(head) is None else tokens_of(head)
    chains = {
        (row, i): slow.chain(embedded(target)[row], target.states[row], i, min(3, S - 1 - i))
        for row in range(B)
        for i in range(S - 1)
    }
    wanted, counted = 0.0, []
    for j in range(3):
        terms = []
        for (row, i), chain in chains.items():
            at = i + 1 + j
            if at >= S or target.batch.targets[row, at] == PADDING:
                continue
            logits = target.head.logits(target.final[row, at])
            if logits.argmax() in tokens:
                q = (slow.weight("lm_head") @ slow.read(chain[j])).softmax(-1)
                terms.append(divergence(logits[tokens].softmax(-1), q))
        counted.append(len(terms))
        wanted = wanted + 0.5**j * torch.stack(terms).mean()
    assert counted[0] < B * (S - 1) - 2 or tokens_of(head) is None, (
        "every likeliest token is in the vocabulary"
    )
    value = eagle3.loss(head, target, settings)
    torch.testing.assert_close(value.double(), wanted, rtol=1e-5, atol=1e-6)
    same_gradients(head, value, wanted)


def test_the_loss_of_eagle_is_that_of_a_loop():
    head, target, settings = made(eagle, family="gemma2")
    slow, (B, S) = SlowEagle(head.eval()), target.tokens.shape
    distances, divergences = [], []
    for row in range(B):
        for i in range(S - 1):
            if target.batch.targets[row, i + 1] == PADDING:
                continue
            (predicted,) = slow.chain(embedded(target)[row], target.states[row], i, 1)
            off = (predicted - target.final[row, i + 1]).abs()
            distances.append(torch.where(off < 1, off**2 / 2, off - 0.5).mean())
            p, q = (target.head.logits(f).softmax(-1) for f in (target.final[row, i + 1], predicted))
            divergences.append(divergence(p, q))
    wanted = torch.stack(distances).mean() + 0.1 * torch.stack(divergences).mean()
    value = eagle.loss(head, target, settings)
    torch.testing.assert_close(value.double(), wanted, rtol=1e-5, atol=1e-6)
    same_gradients(head, value, wanted)


def test_noise_is_for_training_alone():
    head, target, settings = made(eagle)
    with torch.no_grad():
        quiet = eagle.loss(head, target, dataclasses.replace(settings, noise=0.0))
        assert eagle.loss(head.eval(), target, settings) == quiet
        assert eagle.loss(head.train(), target, settings) != quiet


def test_a_new_head_has_the_targets_own_rows_of_its_tokens():
    model = tiny_models.build("llama3")
    head = eagle3.make(model, head_of(model), Eagle3Settings(), torch.tensor([3, 7, 9]))
    assert tokens_of(head).tolist() == [3, 7, 9]
    torch.testing.assert_close(head.lm_head.weight, model.lm_head.weight[[3, 7, 9]].detach())
    states = torch.randn(4, 3, 64)
    torch.testing.assert_close(head.project(states), states[:, -1])


def test_the_layers_that_are_read_are_the_published_ones():
    assert eagle3.read_layers(32) == (1, 15, 28)  # what enters layers 2, 16 and 29
    assert [eagle3.read_layers(count) for count in (1, 2, 3, 6)] == [(0,), (0, 1), (0, 1, 2), (0, 3, 5)]


def test_options_that_exclude_each_other_are_refused():
    with pytest.raises(SettingsError, match=r"norms is 'twice', but must be plain, residual, states or 3.1"):
        Eagle3Settings(norms="twice")
    with pytest.raises(SettingsError, match="EAGLE drafts with its model's own head"):
        EagleSettings(draft_vocabulary=100)
    with pytest.raises(SettingsError, match="branches"):
        EagleSettings(branches=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [eagle, eagle3])
@torch.no_grad()
def test_chains_are_compared_with_the_target_at_each_position(kind):
    head, target, settings = made(kind, drafts=3)
    table = chains(head, target, settings)
    (B, S), slow, rows = target.tokens.shape, SlowEagle(head), []
    for row in range(B):
        for i in range(S - 1):
            counts = target.batch.targets[row, i + 1 : i + 4] != PADDING
            if not counts[0]:
                continue
            outputs = slow.chain(embedded(target)[row], target.states[row], i, min(3, S - 1 - i))
            values = [(torch.nan, torch.nan)] * 3
            for k, a in enumerate(outputs):
                if not counts[: k + 1].all():
                    break
                p = target.head.logits(target.final[row, i + 1 + k]).softmax(-1)
                own = target.head.logits(a) if kind is eagle else slow.weight("lm_head") @ slow.read(a)
                q = own.softmax(-1)
                values[k] = (1 - float((p - q).abs().sum()) / 2, float(p.argmax() == q.argmax()))
            rows.append(values)
    wanted = torch.tensor(rows)
    torch.testing.assert_close(table.acceptance, wanted[..., 0], rtol=1e-4, atol=1e-4, equal_nan=True)
    torch.testing.assert_close(table.agreement, wanted[..., 1], equal_nan=True)
    assert 0 < int(table.complete.sum()) < len(rows)
