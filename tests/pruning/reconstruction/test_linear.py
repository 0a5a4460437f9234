"""Least squares after a cut or a mask, against numpy's lstsq in float64 and against whole models."""

import numpy as np
import pytest
import torch

from attar.checkpoint import open_checkpoint
from attar.errors import NumericsError
from attar.models.anatomy.parts import weight_of
from attar.models.loading.load import load_model
from attar.pruning.reconstruction.linear import HessianWithBias, LinearReconstructor, reconstructed_weight
from attar.quantization.hessian import CrossHessian, Hessian
from attar.walks.sweep import SweepOptions, sweep_linears
from tests import tiny_models

N, K, T = 12, 40, 400


def inputs(seed=0, changed=0.2, columns=K):
    """Inputs of the original model and after pruned layers: (T, K) each, correlated."""
    g = torch.Generator().manual_seed(seed)
    mix = torch.eye(columns) + 0.5 * torch.randn(columns, columns, generator=g) / columns**0.5
    original = torch.randn(T, columns, generator=g) @ mix + 0.3
    return original, original + changed * torch.randn(T, columns, generator=g)


def weight(seed=1, rows=N, columns=K):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def columns_mask():
    mask = torch.ones(N, K, dtype=torch.bool)
    mask[:, [1, 2, 7, 20, 39]] = False
    return mask


def scattered_mask():
    return torch.rand(N, K, generator=torch.Generator().manual_seed(2)) < 0.5


def by_lstsq(X, targets, mask):
    """Each row apart: the least-squares weights of the inputs that it may use."""
    solved = np.zeros(mask.shape)
    for row, stays in enumerate(mask.numpy()):
        solved[row, stays] = np.linalg.lstsq(
            X.double().numpy()[:, stays], targets.double().numpy()[:, row], rcond=None
        )[0]
    return torch.from_numpy(solved)


@pytest.mark.parametrize("crossed", [False, True])
@pytest.mark.parametrize("mask", [columns_mask(), scattered_mask()], ids=["columns", "scattered"])
def test_is_the_least_squares_solution(mask, crossed):
    original, X = inputs()
    W, statistics = weight(), CrossHessian(K)
    statistics.add(X, original if crossed else None)
    wanted = by_lstsq(X, (original if crossed else X) @ W.T, mask)
    cross = statistics.cross() if crossed else None
    solved = reconstructed_weight(W, statistics.value(), mask, cross=cross, damp=1e-7)
    assert (solved[~mask] == 0).all() and solved.dtype == torch.float32
    assert (solved - wanted).norm() < 0.01 * (W * mask - wanted).norm()


def test_damping_holds_the_weights_where_the_inputs_say_little():
    """With a damping far above H, the weights that stay are the original ones."""
    original, X = inputs()
    statistics, W, mask = CrossHessian(K), weight(), columns_mask()
    statistics.add(X, original)
    solved = reconstructed_weight(W, statistics.value(), mask, cross=statistics.cross(), damp=1e6)
    assert torch.allclose(solved, W * mask, atol=1e-4)


def test_the_inputs_stay_as_they_are_and_bad_ones_are_refused():
    _, X = inputs()
    statistics, W = Hessian(K), weight().bfloat16()
    statistics.add(X)
    H, before = statistics.value(), W.clone()
    kept = H.clone()
    assert reconstructed_weight(W, H, scattered_mask()).dtype == torch.float32
    assert torch.equal(W, before) and torch.equal(H, kept)
    H[0, 0] = torch.nan
    with pytest.raises(NumericsError):
        reconstructed_weight(W, H, scattered_mask())


@pytest.mark.parametrize("mask", [columns_mask(), scattered_mask()], ids=["columns", "scattered"])
def test_a_bias_is_solved_with_the_weights(mask):
    """The inputs have means, so that an output loses its mean with its columns."""
    original, X = inputs()
    W, b = weight(), torch.linspace(-1, 1, N)
    b[3] = 0.0  # no mask: a bias is never removed
    statistics = HessianWithBias(K + 1)
    statistics.add(X, original)
    reconstructor = LinearReconstructor(lambda name: W * mask, {"m": b}, damp=1e-7)
    solution = reconstructor.solve({"m": W}, statistics)["m"]
    ones, always = torch.ones(T, 1), torch.ones(N, 1, dtype=torch.bool)
    wanted = by_lstsq(torch.cat([X, ones], 1), original @ W.T + b, torch.cat([mask, always], 1))
    solved = torch.cat([solution.weight, solution.tensors["bias"][:, None]], 1)
    start = torch.cat([W * mask, b[:, None]], 1)
    assert (solved - wanted).norm() < 0.01 * (start - wanted).norm()


def zeroed(model, names, share=0.25):
    """Pruned weights: of each Linear whose name ends so, the first columns are zero."""
    pruned = {}
    for name, module in model.named_modules():
        if name.endswith(names):
            W = weight_of(module).detach().clone()
            W[:, : round(share * W.shape[1])] = 0.0
            pruned[name] = W
    return pruned


DOWN = ("down_proj", "fc2", "mlp.c_proj", "dense_4h_to_h", "output.dense", "lin2")


@pytest.mark.few(1)
@pytest.mark.parametrize("originals", [False, True])
@pytest.mark.parametrize("family", ["llama3", "phi3", "gpt2", "opt", "gpt_neox", "bert"])
def test_a_model_comes_closer_to_the_original(tmp_path, family, originals):
    """Grouped-query heads, fused modules, Conv1D, biases, encoders; stored in bfloat16."""
    model = tiny_models.build(family).to(torch.bfloat16).float()
    checkpoint = open_checkpoint(tiny_models.save(model, tmp_path / "model"))
    tokens = [tiny_models.tokens(model, batch=8, length=32, seed=seed) for seed in range(6)]
    pruned = zeroed(model, DOWN)
    pruned = {name: W for name, W in pruned.items() if "attention.output" not in name}
    biases = {name: model.get_submodule(name).bias.detach() for name in pruned if has_bias(model, name)}
    assert len(pruned) == 3 and bool(biases) == (family not in ("llama3", "phi3"))
    result = sweep_linears(
        checkpoint,
        tokens,
        LinearReconstructor(lambda name: pruned[name].bfloat16(), biases, originals),
        SweepOptions(work=tmp_path / "work", select=pruned.__contains__, precision="fp32"),
    )
    rows = tiny_models.tokens(model, batch=8, length=32, seed=99)
    whole, losses = tiny_models.logits(model, rows), []
    with torch.no_grad():
        for solved in (False, True):
            for block in range(3):
                for name, tensors in result.tensors(block).items():
                    module = model.get_submodule(name)
                    weight_of(module).copy_(tensors["weight"] if solved else pruned[name])
                    assert (weight_of(module)[pruned[name] == 0] == 0).all()
                    if solved and "bias" in tensors:
                        assert tensors["bias"].dtype == torch.bfloat16
                        module.bias.copy_(tensors["bias"])
            losses.append(float((tiny_models.logits(model, rows) - whole).square().mean()))
    assert losses[1] < 0.95 * losses[0]


def has_bias(model, name):
    return model.get_submodule(name).bias is not None


def test_a_new_bias_is_used_by_the_layers_after_it(tmp_path):
    """After the sweep the hidden states are those of the model with the new weights and biases."""
    model = tiny_models.build("opt")
    checkpoint = open_checkpoint(tiny_models.save(model, tmp_path / "model"))
    tokens = [tiny_models.tokens(model, batch=4, length=16)]
    pruned = zeroed(model, DOWN)
    biases = {name: model.get_submodule(name).bias.detach() for name in pruned}
    for resumed in (False, True):
        last = {}
        result = sweep_linears(
            checkpoint,
            tokens,
            LinearReconstructor(pruned.__getitem__, biases),
            SweepOptions(
                work=tmp_path / "work",
                select=pruned.__contains__,
                precision="fp32",
                after_blocks=lambda offloaded, batches, hidden, _, last=last: last.update(hidden=hidden[0]),
            ),
        )
        changed = load_model(checkpoint, dtype=torch.float32)
        with torch.no_grad():
            for block in range(3):
                for name, tensors in result.tensors(block).items():
                    weight_of(changed.get_submodule(name)).copy_(tensors["weight"])
                    changed.get_submodule(name).bias.copy_(tensors["bias"])
            seen = changed.model.decoder.final_layer_norm.register_forward_pre_hook(
                lambda _, args, last=last: last.update(wanted=args[0])
            )
            changed(input_ids=tokens[0])
            seen.remove()
        assert torch.allclose(last["hidden"], last["wanted"], atol=1e-4), resumed


@pytest.mark.parametrize("crossed", [False, True])
def test_rows_solved_in_parts_are_those_solved_together(monkeypatch, crossed):
    original, X = inputs()
    W, statistics, mask = weight(), CrossHessian(K), scattered_mask()
    statistics.add(X, original if crossed else None)
    H, cross = statistics.value(), statistics.cross() if crossed else None
    together = reconstructed_weight(W, H, mask, cross=cross)
    monkeypatch.setattr("attar.pruning.reconstruction.linear.WEIGHTS", 5 * K)
    parts = reconstructed_weight(W, H, mask, cross=cross)
    torch.testing.assert_close(parts, together)
    assert torch.equal(H, statistics.value())
