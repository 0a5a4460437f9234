"""A Linear in EXL2: bytes known beforehand, what is decoded, less error than nearest, bits as asked."""

import itertools

import pytest
import torch

from attar.checkpoint.tensors import stored_dtype
from attar.errors import ModelError, NumericsError, SettingsError
from attar.formats import exl2 as exl2_format
from attar.models.loading.load import load_model
from attar.quantization.hessian import Hessian, output_error
from attar.quantization.methods import exl2
from attar.quantization.methods.gptq import gptq
from tests import tiny_models


def layer(rows, columns, seed=0):
    """A weight with unequal rows, and inputs that hang together."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(1024, columns, generator=g) @ torch.randn(columns, columns, generator=g) / columns**0.5
    x = x * torch.randn(columns, generator=g).exp()
    seen = Hessian(columns)
    seen.add(x)
    weight = torch.randn(rows, columns, generator=g) * 0.05
    return weight * (0.5 * torch.randn(rows, 1, generator=g)).exp(), seen.value()


SMALL = exl2.BitPattern(((4, 10, 32), (3, 35, 32), (2, 55, 64)))


def test_the_layer_is_what_the_file_decodes_to():
    weight, H = layer(40, 160)
    before = weight.clone(), H.clone()
    quantized = exl2.quantize_layer(weight, H, SMALL)
    sections = SMALL.sections(160)
    assert exl2_format.layout((40, 160), sections) == {
        name: (stored_dtype(value.dtype), tuple(value.shape)) for name, value in quantized.tensors.items()
    }
    assert torch.equal(exl2_format.decode(quantized.tensors, 40).float(), quantized.weight)
    assert exl2_format.sections_of(quantized.tensors) == list(sections)
    assert quantized.report["error"] == pytest.approx(output_error(weight, quantized.weight, H), rel=1e-3)
    bits = sum(8 * value.numel() * value.element_size() for value in quantized.tensors.values())
    assert quantized.report["bits"] * weight.numel() == pytest.approx(bits)
    assert SMALL.stored_bits((40, 160)) == bits
    assert torch.equal(weight, before[0]) and torch.equal(H, before[1])
    again = exl2.quantize_layer(weight, H, SMALL)
    assert all(torch.equal(quantized.tensors[name], again.tensors[name]) for name in quantized.tensors)


def test_inputs_stand_by_their_energy_and_the_first_get_more_bits():
    weight, H = layer(32, 128)
    quantized = exl2.quantize_layer(weight, H, exl2.BitPattern(((8, 25, 32), (2, 75, 32))))
    order = torch.argsort(quantized.tensors["q_invperm"].long())
    energy = H.diagonal()[order]
    assert (energy[:-1] >= energy[1:]).all()
    lost = (quantized.weight - weight).square().mean(0)[order]
    assert lost[:32].max() < lost[32:].min()


@pytest.mark.few(2)
@pytest.mark.parametrize("shape", [(64, 256), (96, 96), (33, 192)])
@pytest.mark.parametrize("pattern", [exl2.PATTERNS[0], SMALL, exl2.PATTERNS[6], exl2.PATTERNS[13]])
def test_less_output_error_than_nearest_and_than_plain_gptq(shape, pattern):
    weight, H = layer(*shape, seed=shape[0])
    rough, result = (exl2.quantize_layer(weight, H, pattern, sweeps=sweeps) for sweeps in (0, 4))
    inputs = exl2.order_inputs(H)
    grid = pattern.grid(shape[1])
    W = weight[:, inputs.order]
    parameters = grid.choose(W, importance=inputs.H.diagonal())
    plain = gptq(W, inputs.H, grid, parameters=parameters, act_order=False).quantized.dequantize()
    beforehand = output_error(W, plain, inputs.H)
    assert result.report["error"] < rough.report["error"] < 0.9 * result.report["rtn_error"]
    assert result.report["error"] < 0.98 * beforehand


@pytest.mark.slow
def test_scales_chosen_on_the_way_are_better_at_two_bits():
    """Geometric mean over layers; at four bits it hardly matters."""
    ratio = 1.0
    for seed in range(6):
        weight, H = layer(64, 256, seed)
        inputs, grid = exl2.order_inputs(H), exl2.PATTERNS[0].grid(256)
        W = weight[:, inputs.order]
        parameters = grid.choose(W, importance=inputs.H.diagonal())
        before = gptq(W, inputs.H, grid, parameters=parameters, act_order=False).quantized
        after = exl2.round_groups(W, inputs.U, grid)
        errors = [output_error(W, one.dequantize(), inputs.H) for one in (after, before)]
        ratio *= errors[0] / errors[1]
    assert ratio ** (1 / 6) < 0.99


@pytest.fixture(scope="module")
def tiny():
    """Weights and Hessians of a block of attar:tiny, by module."""
    model = load_model("attar:tiny")
    names = [f"model.layers.2.{part}" for part in ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj")]
    seen = {name: Hessian(model.get_submodule(name).in_features) for name in names}
    for name in names:
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, inputs, name=name: seen[name].add(inputs[0])
        )
    tiny_models.logits(model, tiny_models.tokens(model, batch=8, length=128))
    return {name: (model.get_submodule(name).weight.detach(), seen[name].value()) for name in names}


@pytest.mark.slow
@pytest.mark.parametrize("pattern", [exl2.PATTERNS[0], exl2.PATTERNS[6], exl2.PATTERNS[11]])
def test_layers_of_the_embedded_model(pattern, tiny):
    for name, (weight, H) in tiny.items():
        quantized = exl2.quantize_layer(weight, H, pattern)
        assert quantized.report["error"] < 0.6 * quantized.report["rtn_error"], name
        assert torch.equal(exl2_format.decode(quantized.tensors, len(weight)).float(), quantized.weight)


def test_the_loop_is_gptq_with_its_groups_one_after_the_other():
    """With one group the scales are chosen on the untouched weight, and the rounding is gptq's own."""
    weight, H = layer(24, 64)
    inputs, grid = exl2.order_inputs(H), exl2.BitPattern(((3, 100, 64),)).grid(64)
    W = weight[:, inputs.order]
    ours = exl2.round_groups(W, inputs.U, grid)
    theirs = gptq(W, inputs.H, grid, parameters=ours.parameters, act_order=False).quantized
    assert torch.equal(ours.codes, theirs.codes)


def test_errors_of_a_group_reach_all_that_follow():
    """Brute force in float64: the weights that are left after a group are the best answer to its error."""
    weight, H = layer(8, 96)
    inputs, grid = exl2.order_inputs(H, damp=0.01), exl2.BitPattern(((4, 30, 32), (3, 70, 32))).grid(96)
    W = weight[:, inputs.order]
    result = exl2.round_groups(W, inputs.U, grid)
    damped = inputs.H.double() + 0.01 * inputs.H.diagonal().mean().double() * torch.eye(96)
    first = result.dequantize()[:, :32].double() - W[:, :32].double()
    moved = W[:, 32:].double() - first @ damped[:32, 32:] @ torch.linalg.inv(damped[32:, 32:])
    second = exl2.EXL2Grid(grid.sections[1:])
    h, c = exl2.fit(moved[:, :32].float(), inputs.U.diagonal()[32:64].square().reciprocal(), 3)
    chosen = second.parameters([h] * 2, [c] * 2).column(torch.zeros(1, dtype=torch.int64))
    wanted = second.encode(moved[:, :1].float(), chosen)
    assert torch.equal(wanted[:, 0], result.codes[:, 32].float())


def test_linears_of_the_same_inputs_share_the_work():
    weight, H = layer(32, 128)
    inputs = exl2.order_inputs(H)
    one, other = exl2.quantize_layer(weight, H, SMALL), exl2.quantize_layer(weight, H, SMALL, inputs=inputs)
    assert torch.equal(one.weight, other.weight)


def test_unseen_inputs_and_bfloat16():
    weight, H = layer(32, 128)
    H[5], H[:, 5] = 0.0, 0.0
    quantized = exl2.quantize_layer(weight.bfloat16(), H, SMALL)
    error = (quantized.weight - weight)[:, 5].norm() / weight[:, 5].norm()
    assert error < 2 * (quantized.weight - weight).norm() / weight.norm()


def test_bad_numbers_and_shapes_are_named():
    weight, H = layer(32, 128)
    with pytest.raises(NumericsError, match="weight holds NaN"):
        exl2.quantize_layer(weight.index_fill(0, torch.tensor([3]), float("nan")), H, SMALL)
    with pytest.raises(NumericsError, match="Hessian holds NaN"):
        exl2.order_inputs(H.clone().fill_(float("inf")))
    with pytest.raises(ModelError, match="multiple of 32 inputs"):
        exl2.quantize_layer(weight[:, :100], H[:100, :100], SMALL)


def test_patterns_are_groups_of_the_format():
    for columns in (32, 96, 160, 1024, 2816, 14336):
        actual = exl2.patterns((1024, columns))
        bits = [pattern.stored_bits((1024, columns)) for pattern in actual]
        assert bits == sorted(bits) and len(actual) >= 5
        for pattern in (*actual, *exl2.HEADS.values()):
            exl2_format.check_sections(pattern.sections(columns), columns)
    whole = [pattern.stored_bits((4096, 4096)) / 4096**2 for pattern in exl2.patterns((4096, 4096))]
    assert whole[0] < 2.2 and whole[-1] < 8.1
    assert max(after / before for before, after in itertools.pairwise(whole)) < 1.2
    near = exl2.patterns((4096, 4096), 3.9, 4.6)
    assert {pattern.name for pattern in near} == {
        p.name for p, b in zip(exl2.patterns((4096, 4096)), whole, strict=True) if 3.9 <= b <= 4.6
    }
    assert exl2.patterns((64, 64), 0.0, 1.0) == exl2.patterns((64, 64))[:1]


def test_percent_is_of_whole_groups_and_the_rest_is_the_last():
    assert exl2.BitPattern(((4, 10, 128), (3, 90, 128))).sections(1280) == ((4, 128), *[(3, 128)] * 9)
    assert exl2.BitPattern(((4, 10, 128), (3, 90, 128))).sections(1312) == ((4, 128),) * 2 + (
        *[(3, 128)] * 8,
        (3, 32),
    )
    assert exl2.BitPattern(((6, 50, 128), (5, 50, 128))).sections(96) == ((6, 96),)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [2.75, 4.5])
def test_the_average_is_as_asked(bits):
    """Twelve Linears of two shapes; those that lose more get more."""
    measured, weights, layers = {}, {}, {}
    for number in range(12):
        shape = (128, 256) if number % 2 else (256, 128)
        name = f"layers.{number}"
        layers[name] = weight, H = layer(*shape, seed=number)
        measured[name] = exl2.measure(weight, H, exl2.patterns(shape, 0.0, 1.5 * bits))
        weights[name] = weight.numel()
        errors = [one.error for one in measured[name]]
        assert errors[-1] < 0.5 * errors[0]
    chosen = exl2.choose(measured, weights, bits)
    average = sum(one.bits for one in chosen.values()) / sum(weights.values())
    assert 0.99 * bits < average <= bits
    stored = 0
    for name, one in list(chosen.items())[:3]:
        quantized = exl2.quantize_layer(*layers[name], one.pattern)
        stored = sum(8 * value.numel() * value.element_size() for value in quantized.tensors.values())
        assert stored == one.bits and quantized.report["error"] < one.error
    dear = exl2.choose(
        measured, weights, bits, {name: 100.0 if name == "layers.4" else 1.0 for name in measured}
    )
    assert dear["layers.4"].bits > chosen["layers.4"].bits


def test_an_average_that_cannot_be():
    weight, H = layer(64, 128)
    measured = {"a": exl2.measure(weight, H, exl2.patterns((64, 128))[:2])}
    with pytest.raises(SettingsError, match="at least"):
        exl2.choose(measured, {"a": weight.numel()}, 2.0)
