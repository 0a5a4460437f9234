"""Criteria of forward passes against slow float64 references, one sequence at a time."""

import pytest
import torch

from attar.models.anatomy.discover import discover
from attar.models.anatomy.parts import weight_of
from attar.models.surgery.cut_model import cut_model
from attar.models.surgery.cut_plan import CutPlan
from attar.models.surgery.masking import masked_units
from attar.pruning.structures import STRUCTURES
from tests import tiny_models
from tests.pruning.scored import scored, scoring

FAMILIES = ["llama3", "phi3", "gpt2", "opt", "gpt_neox", "bert", "gemma3"]


def batches(model):
    tokens = tiny_models.tokens(model, batch=5, length=9)
    return [tokens[:2], tokens[2:4], tokens[4:]]


def recorded(model, modules, rows, outputs=False):
    """Inputs (or outputs) of modules in float64, for each row by itself: [row][module] (S, F)."""
    model = model.double()
    values = []
    for row in rows:
        seen = {}
        hooks = [
            module.register_forward_hook(
                lambda m, args, y, k=k, seen=seen: seen.__setitem__(k, y if outputs else args[0])
            )
            for k, module in enumerate(modules)
        ]
        with torch.no_grad():
            model(input_ids=row[None])
        for hook in hooks:
            hook.remove()
        values.append([seen[k].reshape(len(row), -1) for k in range(len(modules))])
    model.float()
    return values


@pytest.mark.few(3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", ["heads", "query-heads", "neurons"])
def test_activation_is_the_norm_over_sequences_of_the_mean_over_tokens(family, method, tmp_path):
    model = tiny_models.build(family)
    weights = STRUCTURES[method].weights(model, discover(model))
    got = scored(model, method, "activation", batches(model), tmp_path)
    rows = recorded(model, [layer.consumer for layer in weights], torch.cat(batches(model)))
    for index, layer in enumerate(weights):
        means = torch.stack([row[index].abs().mean(0) for row in rows])  # (sequences, F)
        for unit in range(layer.count):
            expected = means[:, layer.columns == unit].norm()
            assert got[index, unit].item() == pytest.approx(float(expected), rel=1e-5, abs=1e-6)


@pytest.mark.few(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_wanda_is_what_a_neuron_adds_to_the_next_projection(family, tmp_path):
    """For a single column the score is the norm of what the output loses: exactly."""
    model = tiny_models.build(family)
    anatomy = discover(model)
    got = scored(model, "neurons", "wanda", batches(model), tmp_path)
    block = anatomy.blocks[1]
    down = model.get_submodule(block.mlp.down.name)
    rows = torch.cat([row[0] for row in recorded(model, [down], torch.cat(batches(model)))])  # (T, F)
    for unit in (0, 7, block.mlp.neurons - 1):
        less = rows.clone()
        less[:, unit] = 0.0
        W = weight_of(down).detach().double()
        lost = rows @ W.T - less @ W.T
        assert got[1, unit].item() == pytest.approx(float(lost.norm()), rel=1e-5)


@pytest.mark.parametrize("method", ["heads", "query-heads"])
def test_wanda_adds_the_squares_of_a_heads_columns(method, tmp_path):
    model = tiny_models.build("llama3")
    got = scored(model, method, "wanda", batches(model), tmp_path).reshape(3, -1)
    layer = STRUCTURES[method].weights(model, discover(model))[2]
    rows = torch.cat([row[0] for row in recorded(model, [layer.consumer], torch.cat(batches(model)))])
    squares = rows.square().sum(0) * weight_of(layer.consumer).detach().double().square().sum(0)
    for unit in range(layer.count):
        expected = squares[layer.columns == unit].sum().sqrt()
        assert got[2, unit].item() == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.few(2)
@pytest.mark.parametrize("family", ["llama3", "gemma3", "opt", "bert"])
def test_channels_are_scored_by_all_norms_over_the_stream(family, tmp_path):
    model = tiny_models.build(family)
    got = scored(model, "hidden", "activation", batches(model), tmp_path)
    norms = scoring(model, "hidden", [], tmp_path).norms()
    a_block, outside = {"llama3": (2, 1), "gemma3": (4, 1), "opt": (2, 1), "bert": (2, 2)}[family]
    assert len(norms) == 3 * a_block + outside  # not the norms of single heads
    rows = recorded(model, norms, torch.cat(batches(model)), outputs=True)
    expected = sum(
        torch.stack([row[k].abs().mean(0) for row in rows]).square().sum(0).sqrt() for k in range(len(norms))
    )
    torch.testing.assert_close(got[0], expected, rtol=1e-5, atol=0)


def test_influence_is_one_minus_the_cosine_of_a_blocks_input_and_output(tmp_path):
    model = tiny_models.build("llama3")
    got = scored(model, "layers", "influence", batches(model), tmp_path)
    blocks = [block.module for block in discover(model).blocks]
    rows = torch.cat(batches(model))
    inputs, outputs = recorded(model, blocks, rows), recorded(model, blocks, rows, outputs=True)
    for index in range(3):
        total = []
        for before, after in zip(inputs, outputs, strict=True):
            x, y = before[index], after[index]
            total += [float(1 - (x[t] @ y[t]) / (x[t].norm() * y[t].norm())) for t in range(len(x))]
        assert got[0, index].item() == pytest.approx(sum(total) / len(total), rel=1e-5)


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["llama3", "gpt2", "bert", "gemma3"])
def test_kl_of_a_layer_is_that_of_the_model_cut_without_it(family, tmp_path):
    model = tiny_models.build(family)
    rows = torch.cat(batches(model))
    got = scored(model, "layers", "kl", batches(model), tmp_path)
    p = tiny_models.logits(model, rows).double().log_softmax(-1)
    for layer in range(3):
        cut = cut_model(model, CutPlan(layers=tuple(sorted({0, 1, 2} - {layer}))))
        q = tiny_models.logits(cut, rows).double().log_softmax(-1)
        assert got[0, layer].item() == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-3)


@pytest.mark.slow
def test_the_run_that_goes_has_the_least_kl_of_those_that_turn_the_stream_least(tmp_path):
    model = tiny_models.build("llama3", num_hidden_layers=7)
    rows = torch.cat(batches(model))
    got = scored(model, "layers", "run", batches(model), tmp_path, stay=5)
    gone = [layer for layer in range(7) if got[0, layer] == 0]
    assert len(gone) == 2 and gone[1] == gone[0] + 1

    blocks = [block.module for block in discover(model).blocks]
    inputs, outputs = recorded(model, blocks, rows), recorded(model, blocks, rows, outputs=True)
    angles, losses = [], []
    p = tiny_models.logits(model, rows).double().log_softmax(-1)
    for start in range(6):
        rows_of = zip(inputs, outputs, strict=True)
        pairs = [(a[start][t], b[start + 1][t]) for a, b in rows_of for t in range(9)]
        angles.append(sum(float(torch.arccos(x @ y / (x.norm() * y.norm()))) for x, y in pairs))
        stay = tuple(layer for layer in range(7) if layer not in (start, start + 1))
        with masked_units(model, CutPlan(layers=stay)):
            q = tiny_models.logits(model, rows).double().log_softmax(-1)
        losses.append(float((p.exp() * (p - q)).sum()))
    least = sorted(range(6), key=lambda start: angles[start])[:3]
    assert gone[0] == min(least, key=lambda start: losses[start])
