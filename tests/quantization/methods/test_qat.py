"""Quantization-aware training: learns, ends on its grid exactly, and resumes to the same bytes."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from attar.errors import ModelError, SettingsError
from attar.formats.rules import ActivationRule
from attar.models.anatomy.discover import discover
from attar.quantization.grids import IntGrid, QuantizedTensor
from attar.quantization.grids.float8 import Float8Grid, MXFP8Grid
from attar.quantization.grids.fp4 import MXFP4Grid, NVFP4Grid
from attar.quantization.grids.ggml import GGMLGrid
from attar.quantization.grids.nf4 import NF4Grid
from attar.quantization.methods.qat import learn
from attar.quantization.methods.rtn import rtn
from attar.walks.objectives import distillation_loss, divergence, next_token, soft_loss
from attar.walks.settings import TrainSettings
from tests import tiny_models
from tests.killed import Killed

SETTINGS = TrainSettings(
    steps=12,
    batch_size=2,
    sequence_length=12,
    learning_rate=1e-3,
    weight_decay=0.0,
    checkpoint_every=4,
    precision="fp32",
)
ROWS = torch.randint(5, 300, (8, 12), generator=torch.Generator().manual_seed(0))


def linears(model):
    return [name for block in discover(model).blocks for name in block.linears]


def ready(family="qwen2", grid=None):
    model = tiny_models.build(family)
    return model, dict.fromkeys(linears(model), grid or IntGrid(3, 16, storage=torch.bfloat16))


def loss_of(model, loss):
    with torch.no_grad():
        return float(loss(model, ROWS))


def weight(model, name):
    module = model.get_submodule(name)
    return module.weight if isinstance(module, nn.Linear) else module.weight.T


def nearest(model, grids):
    """The same model rounded to nearest."""
    rounded = copy.deepcopy(model)
    with torch.no_grad():
        for name, grid in grids.items():
            weight(rounded, name).copy_(rtn(weight(model, name), grid).dequantize())
    return rounded


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("family", "grid"),
    [
        ("qwen2", IntGrid(3, 16, storage=torch.bfloat16)),
        ("gpt2", IntGrid(2, 16, symmetric=False)),
        ("qwen2", NF4Grid(16)),
        ("qwen2", NVFP4Grid()),
        ("qwen2", Float8Grid(group_size=0)),
        ("qwen2", MXFP4Grid()),
        ("qwen2", MXFP8Grid()),
    ],
    ids=["int3", "int2 with zeros, Conv1D", "nf4", "nvfp4", "fp8", "mxfp4", "mxfp8"],
)
@pytest.mark.parametrize("train", ["weights", "scales"])
def test_learns_and_ends_on_its_grid(family, grid, train):
    model, grids = ready(family, grid)
    if train == "scales" and isinstance(grid, MXFP4Grid | MXFP8Grid):
        with pytest.raises(SettingsError, match="whose scales are powers of two"):
            learn(model, grids, None, ROWS, SETTINGS, train=train)
        return
    original = copy.deepcopy(model)
    loss = distillation_loss(soft_loss(original))
    before = loss_of(nearest(model, grids), loss)
    rate = {"weights": 1e-5 if isinstance(grid, Float8Grid) else 1e-3, "scales": 3e-3}[train]
    settings = replace(SETTINGS, steps=20, learning_rate=rate)
    trained = learn(model, grids, None, ROWS, settings, loss=loss, train=train)
    assert list(trained.weights) == list(grids) and not trained.dense and not trained.activations
    for name, result in trained.weights.items():
        assert torch.equal(weight(model, name), result.dequantize())
        again = QuantizedTensor.from_tensors(result.grid, result.tensors())
        assert torch.equal(again.dequantize(), result.dequantize())
    assert loss_of(model, loss) < 0.95 * before
    assert not any("parametrizations" in name for name, _ in model.named_parameters())
    for name, value in original.named_parameters():  # nothing else has changed
        if name.removesuffix(".weight") not in grids:
            assert torch.equal(value, model.get_parameter(name)), name


def test_fixed_codes_stay_fixed():
    model, grids = ready()
    start = {name: rtn(weight(model, name), grid) for name, grid in grids.items()}
    trained = learn(model, grids, None, ROWS, SETTINGS, train="scales", start=start)
    assert all(torch.equal(trained.weights[name].codes, start[name].codes) for name in grids)
    changed = [
        name
        for name in grids
        if not torch.equal(trained.weights[name].parameters.scale, start[name].parameters.scale)
    ]
    assert changed


def test_training_starts_at_given_codes():
    """With a rate of nearly nothing the codes of the start come back, far from the nearest ones as they
    are."""
    model, grids = ready()
    g = torch.Generator().manual_seed(0)
    start = {}
    for name, grid in grids.items():
        quantized = rtn(weight(model, name), grid)
        moved = quantized.codes + torch.randint(-1, 2, quantized.codes.shape, generator=g)
        start[name] = QuantizedTensor(
            grid, moved.clamp(grid.low, grid.high).to(torch.int8), quantized.parameters
        )
    trained = learn(model, grids, None, ROWS, replace(SETTINGS, steps=1, learning_rate=1e-9), start=start)
    assert all(torch.equal(trained.weights[name].codes, start[name].codes) for name in grids)


STATIC = ActivationRule("int", 8, "tensor", dynamic=False)
ASYMMETRIC = ActivationRule("int", 8, "tensor", dynamic=False, symmetric=False)
TOKEN = ActivationRule("int", 8, "token")


@pytest.mark.slow
@pytest.mark.parametrize("train", ["weights", "scales"])
def test_a_killed_run_ends_with_the_bytes_of_an_undisturbed_one(tmp_path, train):
    calls = 0

    def deadly(model, tokens):
        nonlocal calls
        calls += 1
        if calls > 6:
            raise Killed
        return next_token(model, tokens)

    def run(loss, work):
        model, grids = ready(grid=IntGrid(3, 16, symmetric=False))
        rules = {name: (STATIC, TOKEN, ASYMMETRIC)[n % 3] for n, name in enumerate(grids)}
        return model, learn(
            model, grids, rules, ROWS, SETTINGS, loss=loss, work=work, train=train, others=train == "weights"
        )

    model, whole = run(next_token, tmp_path / "whole")
    with pytest.raises(Killed):
        run(deadly, tmp_path / "cut")
    torch.manual_seed(99)
    other, resumed = run(next_token, tmp_path / "cut")
    for name, result in whole.weights.items():
        for key, value in result.tensors().items():
            assert torch.equal(value, resumed.weights[name].tensors()[key]), (name, key)
    assert whole.history == resumed.history and whole.activations.keys() == resumed.activations.keys()
    for name, actual in whole.activations.items():
        assert all(torch.equal(value, resumed.activations[name][key]) for key, value in actual.items())
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
    assert bool(whole.dense) == (train == "weights")


def test_static_scales_of_activations_are_learned_and_dynamic_ones_are_not():
    model, grids = ready()
    names = list(grids)
    rules = {names[0]: STATIC, names[1]: TOKEN, names[2]: ASYMMETRIC}
    largest = {}

    def note(name):
        return lambda _, args: largest.update({name: float(args[0].abs().max())})

    hooks = [model.get_submodule(name).register_forward_pre_hook(note(name)) for name in names[:3]]
    with torch.no_grad():
        model(input_ids=ROWS)
    for hook in hooks:
        hook.remove()
    trained = learn(model, grids, rules, ROWS, replace(SETTINGS, steps=3))
    assert sorted(trained.activations) == sorted([names[0], names[2]])
    assert sorted(trained.activations[names[2]]) == ["scale", "zero"]
    scale = float(trained.activations[names[0]]["scale"])
    assert scale == pytest.approx(2 * largest[names[0]] / 255, rel=0.02)
    assert scale != 2 * largest[names[0]] / 255
    assert not any("input_quantizer" in name for name, _ in model.named_modules())
    first = model.get_submodule(names[0])
    assert not first._forward_pre_hooks


def test_inputs_are_really_rounded_while_it_trains():
    model, grids = ready()
    name = next(iter(grids))
    seen = []

    def spy(m, tokens):
        handle = m.get_submodule(name).register_forward_hook(lambda _, args, out: seen.append((args[0], out)))
        try:
            return next_token(m, tokens)
        finally:
            handle.remove()

    learn(model, grids, {name: ActivationRule("int", 2, "token")}, ROWS, replace(SETTINGS, steps=1), loss=spy)
    assert all(len(row.unique()) <= 4 for row in seen[0][0].flatten(0, 1))


def test_scales_are_vectors_that_no_weight_decay_touches():
    """Matrices decay; a factor on a scale must not."""
    model, grids = ready()
    shapes = {}

    def spy(m, tokens):
        shapes.update({n: p.shape for n, p in m.named_parameters() if p.requires_grad and "factor" in n})
        return next_token(m, tokens) * 0.0

    settings = replace(SETTINGS, steps=3, weight_decay=0.5, learning_rate=0.1)
    trained = learn(model, grids, None, ROWS, settings, loss=spy, train="scales")
    assert len(shapes) == len(grids) and all(len(shape) == 1 for shape in shapes.values())
    for name, grid in grids.items():
        want = grid.choose(weight(tiny_models.build("qwen2"), name)).scale
        assert torch.equal(trained.weights[name].parameters.scale, want)


def test_agreement_is_zero_for_the_teacher_itself_and_kl_otherwise():
    model = tiny_models.build("qwen2")
    assert loss_of(model, distillation_loss(soft_loss(model))) == pytest.approx(0.0, abs=1e-6)
    p, q = torch.randn(5, 7, dtype=torch.float64), torch.randn(5, 7, dtype=torch.float64)
    P, Q = (p / 2).softmax(-1), (q / 2).softmax(-1)
    want = 4 * float((P * (P.log() - Q.log())).sum(-1).mean())
    assert float(divergence(q, p, 2.0)) == pytest.approx(want, rel=1e-5)
    other = nearest(model, dict.fromkeys(linears(model), IntGrid(2, 16)))
    hard, soft, mixed = (
        loss_of(other, distillation_loss(soft_loss(model), alpha)) for alpha in (0.0, 1.0, 0.25)
    )
    assert mixed == pytest.approx(0.75 * hard + 0.25 * soft, rel=1e-5)
    assert hard == pytest.approx(loss_of(other, next_token), rel=1e-6)


def test_padding_counts_for_nothing():
    model = tiny_models.build("qwen2")
    padded = ROWS.clone()
    padded[:, 8:] = -100
    other = nearest(model, dict.fromkeys(linears(model), IntGrid(2, 16)))
    loss = distillation_loss(soft_loss(model), 0.5)
    with torch.no_grad():
        assert float(loss(other, padded)) == pytest.approx(float(loss(other, ROWS[:, :8])), rel=1e-5)


def test_refuses_what_it_cannot_do():
    model, grids = ready()
    with pytest.raises(SettingsError, match="train"):
        learn(model, grids, None, ROWS, SETTINGS, train="codes")
    with pytest.raises(ModelError, match="nowhere"):
        learn(model, {"nowhere": IntGrid(4, 16)}, None, ROWS, SETTINGS)
    with pytest.raises(SettingsError, match="free scales"):
        learn(model, {next(iter(grids)): GGMLGrid("Q4_0")}, None, ROWS, SETTINGS)
