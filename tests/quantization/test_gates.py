"""The gates, each on a layer or a model that was broken on purpose, and on healthy ones of every kind."""

import copy
import math
from dataclasses import replace

import pytest
import torch

from attar.errors import NumericsError
from attar.quantization.gates import (
    GateViolation,
    check_layers,
    check_model,
    code_numbers,
    levels,
    raise_on_error,
    suspect,
)
from attar.quantization.grids import IntGrid, QuantizedTensor, TileParameters
from attar.quantization.grids.float8 import Float8Grid
from attar.quantization.grids.fp4 import MXFP4Grid, NVFP4Grid
from attar.quantization.grids.ggml import GGML
from attar.quantization.grids.nf4 import NF4Grid
from attar.quantization.methods.rtn import rtn
from attar.walks.objectives import Distance, DistanceSum, token_kl
from tests import tiny_models

GRIDS = {
    **{f"int{bits} g{size}": IntGrid(bits, size) for bits in (2, 3, 4, 8) for size in (64, 0)},
    "int2 asymmetric": IntGrid(2, 64, symmetric=False),
    "int2 tensor": IntGrid(2, 0, rows=0),
    "fp8": Float8Grid(),
    "nf4": NF4Grid(),
    "nvfp4": NVFP4Grid(storage=torch.bfloat16),
    "mxfp4": MXFP4Grid(storage=torch.bfloat16),
    "Q4_K": GGML["Q4_K"],
    "Q2_K": GGML["Q2_K"],
}


def model_kl(reference, model, batches) -> Distance:
    """The distance of two models over batches padded with negative numbers."""
    total = DistanceSum()
    with torch.no_grad():
        for batch in batches:
            kept = batch.flatten() >= 0
            total.add(
                *(m(input_ids=batch.clamp(min=0)).logits.flatten(0, 1)[kept] for m in (reference, model))
            )
    return total.distance()


def weight(rows=32, columns=512, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def judged(W, grid, quantized=None):
    report = {"name": "layer", **code_numbers(quantized or rtn(W, grid), W)}
    return check_layers([report])


@pytest.mark.parametrize("name", GRIDS)
def test_healthy_weights_pass_on_every_grid(name):
    W = weight()
    assert judged(W, GRIDS[name]) == []
    if name == "int2 tensor":  # one scale at 2 bits is for normal weights only
        return
    heavy = W * (1 + weight(seed=1).abs() ** 2)  # kurtosis far above normal
    assert not [finding for finding in judged(heavy, GRIDS[name]) if finding.severity == "error"]


@pytest.mark.parametrize(
    ("grid", "wanted"),
    [
        (IntGrid(2), 4),
        (IntGrid(5, symmetric=False), 32),
        (IntGrid(8), 256),
        (NF4Grid(), 16),
        (Float8Grid(), 253),  # e4m3fn: 2 x 126 and zero
        (GGML["Q6_K"], 64),
    ],
)
def test_levels(grid, wanted):
    assert levels(grid) == wanted


def test_used_is_the_entropy_of_the_codes():
    codes = torch.tensor([[0, 0, 0, 1], [0, 0, -1, 1]], dtype=torch.int8)
    W = codes.float() + 0.1
    W[1, 3] = 0.0  # a pruned weight: its code does not count
    numbers = code_numbers(QuantizedTensor(IntGrid(2, 0), codes, TileParameters(torch.ones(2, 1))), W)
    shares = (5 / 7, 1 / 7, 1 / 7)
    assert numbers["used"] == pytest.approx(-sum(p * math.log2(p) for p in shares) / 2)
    assert numbers["zeros"] == pytest.approx(5 / 7)
    assert numbers["codes"] == 3


@pytest.mark.parametrize(
    ("bits", "peak", "severity"),
    [
        *[(2, 4, None), (2, 6, "warning"), (2, 12, "error")],
        *[(4, 12, None), (4, 22, "warning"), (4, 60, "error")],
        *[(8, 60, None), (8, 200, "warning"), (8, 2000, "error")],
    ],
)
def test_outliers_that_own_the_scale_collapse_the_codes(bits, peak, severity):
    W = weight()
    W[:, ::64] = peak
    verdict = judged(W, IntGrid(bits, 64))
    assert [finding.severity for finding in verdict] == ([severity] if severity else [])
    assert all(finding.check == "codes" and "collapsed" in finding.message for finding in verdict)


def test_pruned_and_zero_layers_pass():
    W = weight()
    sparse = torch.where(weight(seed=2).abs() > 1.6, W, torch.zeros(()))  # 89 % zeros
    assert judged(sparse, IntGrid(4, 64)) == []
    assert judged(torch.zeros(8, 64), IntGrid(4, 64)) == []
    assert judged(torch.full((8, 64), 0.5), IntGrid(4, 64)) == []


def test_one_code_for_different_weights_is_an_error():
    W = weight()
    quantized = rtn(W, IntGrid(4, 64))
    verdict = judged(W, IntGrid(4, 64), replace(quantized, codes=torch.full_like(quantized.codes, 3)))
    assert [(f.severity, f.message) for f in verdict] == [("error", "every weight has the same code")]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_scale_that_is_not_finite_is_an_error(value):
    W, grid = weight(), IntGrid(4, 64)
    quantized = rtn(W, grid)
    quantized.parameters.scale[3, 1] = value
    verdict = judged(W, grid, quantized)
    assert verdict[0].severity == "error" and verdict[0].message == "1 scales are not finite"


def test_zero_scales_count_by_what_they_lose():
    grid = IntGrid(4, 64)
    tiny = weight()
    tiny[0, :64] *= 1e-4
    for W, severity in ((weight(), "error"), (tiny, "warning")):
        quantized = rtn(W, grid)
        quantized.parameters.scale[0, 0] = 0.0
        verdict = judged(W, grid, quantized)
        assert [(f.check, f.severity) for f in verdict] == [("scales", severity)]
    zero = weight()
    zero[0, :64] = 0.0
    quantized = rtn(zero, grid)
    quantized.parameters.scale[0, 0] = 0.0
    assert judged(zero, grid, quantized) == []


def test_layers_are_held_against_round_to_nearest():
    reports = [
        {"name": "good", "error": 0.01, "rtn_error": 0.02},
        {"name": "equal", "error": 0.02, "rtn_error": 0.02},
        {"name": "worse", "error": 0.03, "rtn_error": 0.02},
        {"name": "lost", "error": 1.5, "rtn_error": 2.0},
        {"name": "broken", "error": math.nan, "rtn_error": 0.02},
    ]
    actual = check_layers(reports, method="gptq")
    assert [(f.layer, f.severity) for f in actual] == [
        ("worse", "warning"),
        ("lost", "warning"),
        ("broken", "error"),
    ]
    assert "gptq has output error 0.03, round to nearest 0.02" in actual[0].message


def test_tokens_seen():
    reports = [{"name": f"expert{tokens}", "tokens": tokens} for tokens in (0, 5, 128)]
    assert [(f.layer, f.severity) for f in check_layers(reports)] == [
        ("expert0", "error"),
        ("expert5", "warning"),
    ]


def test_the_error_names_layer_and_mend():
    findings = [
        GateViolation("a", "tokens", "warning", "few", "more"),
        GateViolation("b", "codes", "error", "codes collapsed", "smaller groups"),
        GateViolation("c", "codes", "error", "codes collapsed", "smaller groups"),
    ]
    with pytest.raises(NumericsError) as caught:
        raise_on_error(findings)
    assert caught.value.message == "b: codes collapsed (and 1 more)"
    assert caught.value.hint == "smaller groups"
    raise_on_error(findings[:1])


@pytest.mark.parametrize(
    ("kl", "severity"),
    [(0.0, None), (0.5, None), (1.2, "warning"), (2.0, "error"), (math.nan, "error"), (math.inf, "error")],
)
def test_the_whole_model(kl, severity):
    actual = check_model(kl, 2.0, top1=0.5, worst_layer="layer")
    assert [f.severity for f in actual] == ([severity] if severity else [])
    assert all(f.layer == "layer" for f in actual)


def test_a_stuck_sample_is_an_error_unless_the_original_is_stuck_too():
    stuck, fine = [7] * 15 + [8], list(range(16))
    assert check_model(0.2, 2.0, sample=stuck, original_sample=fine)[0].severity == "error"
    assert check_model(0.01, 2.0, sample=stuck, original_sample=fine)[0].severity == "warning"
    assert check_model(0.1, 2.0, sample=stuck, original_sample=stuck) == []
    assert check_model(0.1, 2.0, sample=fine, original_sample=fine) == []


def test_suspect():
    reports = [
        {"name": "a", "error": 0.5, "rtn_error": 0.6},
        {"name": "b", "error": 0.1, "rtn_error": 0.02},
        {"name": "c", "error": 0.2, "rtn_error": 0.1},
    ]
    assert suspect(reports) == "b"
    assert suspect(reports[::2]) == "c"
    assert suspect([{"name": "x", "error": 0.1}, {"name": "y", "error": 0.3}]) == "y"
    assert suspect([*reports, {"name": "broken", "error": math.nan, "rtn_error": 0.1}]) == "broken"
    assert suspect([{"name": "streamed", "weight_error": 0.1}]) == ""


class Model:
    """A tiny model, a quantized copy of it, and the KL with any layers restored."""

    def __init__(self, bits=4):
        self.original = tiny_models.build("llama3")
        self.quantized = copy.deepcopy(self.original)
        self.layers = [name for name, m in self.original.named_modules() if "_proj" in name]
        self.rows = [tiny_models.tokens(self.original, batch=4, length=16)]
        self.calls = 0
        for name in self.layers:
            W = self.weight(self.quantized, name)
            W.copy_(rtn(W, IntGrid(bits, 32)).dequantize())

    @staticmethod
    def weight(model, name):
        return model.get_submodule(name).weight.data

    def kl_with(self, restored):
        self.calls += 1
        model = copy.deepcopy(self.quantized)
        for name in restored:
            self.weight(model, name).copy_(self.weight(self.original, name))
        return model_kl(self.original, model, self.rows).kl


def test_a_destroyed_model_is_garbage_and_a_rounded_one_is_not():
    fine, broken = Model(4), Model(4)
    for name in broken.layers:
        W = broken.weight(broken.quantized, name)
        W.copy_(weight(*W.shape) / W.shape[1] ** 0.5)
    for model, severity in ((fine, None), (broken, "error")):
        there = model_kl(model.original, model.quantized, model.rows)
        actual = check_model(there.kl, there.blind, top1=there.top1)
        assert [f.severity for f in actual] == ([severity] if severity else [])


def test_model_kl_is_the_definition_in_float64():
    model = Model(3)
    padded = model.rows[0].clone()
    padded[1, 9:] = -100
    there = model_kl(model.original, model.quantized, [padded[:1], padded[1:]])
    kept = padded.flatten() >= 0
    with torch.no_grad():
        p, q = (
            m(input_ids=padded.clamp(min=0)).logits.flatten(0, 1)[kept].double().softmax(-1)
            for m in (model.original, model.quantized)
        )
    kl = (p * (p / q).log()).sum(-1).mean()
    mean = p.mean(0)
    assert there.kl == pytest.approx(float(kl), rel=1e-5)
    assert there.top1 == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
    assert there.blind == pytest.approx(float((p * (p / mean).log()).sum(-1).mean()), rel=1e-5)
    assert there.tokens == int(kept.sum()) == 57
    assert model_kl(model.original, model.original, model.rows)[:2] == (0.0, 1.0)


def test_token_kl_resolves_what_eight_bits_cost():
    g = torch.Generator().manual_seed(0)
    p = torch.randn(50, 4000, generator=g) * 4
    q = p + 1e-3 * torch.randn(50, 4000, generator=g)
    P, Q = p.double().softmax(-1), q.double().softmax(-1)
    wanted = (P * (P / Q).log()).sum(-1)
    assert torch.allclose(token_kl(p, q), wanted, rtol=0.0, atol=5e-8)
    assert wanted.mean() < 1e-6
    forbidden = torch.tensor([[0.0, -math.inf]])
    assert token_kl(forbidden, torch.zeros(1, 2)).item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("kind", ["both signs", "positive", "negative", "one value", "dense"])
def test_the_numbers_of_codes_leave_zero_weights_out(kind):
    """As copies without the zeros give them."""
    W, generator = weight(seed=5), torch.Generator().manual_seed(6)
    values = {"positive": W.abs(), "negative": -W.abs(), "one value": torch.full_like(W, 0.5)}.get(kind, W)
    if kind != "dense":
        values = values * (torch.rand(W.shape, generator=generator) > 0.3)
    quantized = rtn(values, IntGrid(4, 64))
    inside = values != 0
    codes, rest = quantized.codes[inside], values[inside]
    numbers = code_numbers(quantized, values)
    assert numbers["codes"] == len(codes.unique())
    assert numbers["varied"] == (len(rest.unique()) > 1)
    share = codes.unique(return_counts=True)[1] / len(codes)
    assert numbers["used"] == pytest.approx(float(-(share * share.log2()).sum()) / 4, rel=1e-5)
