"""Conversions between integer layouts: codes and numbers stay the same, scale changes are reported."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attar.errors import NumericsError
from attar.formats import awq, compressed_tensors, gptq, layouts
from attar.formats.coded import Coded
from attar.formats.convert import WIDTHS, convert, converted_rule, misfit
from attar.formats.readers import READERS
from attar.formats.rules import INT, PACK, WeightRule
from tests.formats.integer_weights import equal, folder, random_coded, rule

MODULE = "model.layers.0.mlp.down_proj"
SHAPE = (16, 64)


def write(path, target, weight, made, form=PACK):
    """A checkpoint of one weight in a target, opened with its reader."""
    if target == "compressed-tensors":
        group = compressed_tensors.ConfigGroup((MODULE,), made, None, form)
        tensors = layouts.encode(weight, made, form, torch.float16)
        message, module = compressed_tensors.quantization_config([group], ignore=[]), compressed_tensors
    else:
        module = {"gptq": gptq, "awq": awq}[target]
        tensors, message = module.encode(weight, made), module.quantization_config({MODULE: made})
    named = {f"{MODULE}.{leaf}": tensor for leaf, tensor in tensors.items()}
    return READERS[module.METHOD](folder(path, named, message))


def read(reader):
    """Codes, rule and dense weight of that checkpoint."""
    name = next(name for name in reader.checkpoint.tensors if reader.is_coded(name))
    return *reader.codes(name), reader.decode(name)


CHAINS = [
    (rule(4, 16), ["gptq", "awq", "compressed-tensors", "gptq"]),
    (rule(4, 16, symmetric=False), ["awq", "gptq", "compressed-tensors", "awq"]),
    (rule(4, 0), ["compressed-tensors", "awq", "gptq", "compressed-tensors"]),
    (rule(4, 0, symmetric=False), ["gptq", "compressed-tensors", "awq", "gptq"]),
    (rule(8, 16, symmetric=False), ["compressed-tensors", "gptq", "compressed-tensors"]),
    (rule(3, 16, symmetric=False), ["gptq", "compressed-tensors", "gptq"]),
    (rule(2, 32), ["compressed-tensors", "gptq", "compressed-tensors"]),
    (rule(4, 16, ordered=True), ["gptq", "compressed-tensors", "gptq"]),
    (rule(3, 16, symmetric=False, ordered=True), ["compressed-tensors", "gptq", "compressed-tensors"]),
]


@pytest.mark.parametrize(
    ("made", "chain"), CHAINS, ids=lambda part: "-".join(part) if isinstance(part, list) else ""
)
def test_codes_and_numbers_stay_through_every_conversion(tmp_path, made, chain):
    start = weight = random_coded(made, SHAPE)
    actual, first = made, None
    for step, target in enumerate(chain):
        assert misfit(actual, SHAPE, target) is None
        carried = convert(weight, actual, target)
        assert carried.change == 0.0 and carried.note is None
        weight, actual, dense = read(write(tmp_path / str(step), target, carried.weight, carried.rule))
        first = dense if first is None else first
        assert equal(weight, start) and actual == made
        assert dense.dtype == torch.float16 and torch.equal(dense, first)


@settings(max_examples=40, deadline=None)
@given(
    bits=st.sampled_from([2, 3, 4, 8]),
    size=st.sampled_from([0, 8, 32]),
    symmetric=st.booleans(),
    ordered=st.booleans(),
    seed=st.integers(0, 99),
)
def test_gptq_and_compressed_tensors_hold_the_same(bits, size, symmetric, ordered, seed):
    weight_rule = rule(bits, size, symmetric=symmetric, ordered=ordered and size > 0)
    weight = random_coded(weight_rule, (8, 32), seed)
    packed = layouts.encode(weight, weight_rule, PACK, torch.float16)
    tensors = gptq.encode(weight, weight_rule)
    assert torch.equal(tensors["qweight"], packed["weight_packed"].T)
    assert torch.equal(tensors["scales"], packed["weight_scale"].T)
    assert torch.equal(gptq.decode(tensors, weight_rule), layouts.decode(packed, weight_rule, PACK))
    if not symmetric:
        assert torch.equal(tensors["qzeros"], packed["weight_zero_point"].T)
    if bits == 4 and not weight_rule.ordered:
        assert torch.equal(
            awq.decode(awq.encode(weight, weight_rule), weight_rule), gptq.decode(tensors, weight_rule)
        )


@pytest.mark.few(16)
@pytest.mark.parametrize("form", [PACK, INT])
@pytest.mark.parametrize("strategy", ["tensor", "channel", "group"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [1, 4, 7, 8])
def test_compressed_tensors_gives_its_codes(tmp_path, form, strategy, symmetric, bits):
    weight_rule = WeightRule("int", bits, strategy, 16 if strategy == "group" else 0, symmetric)
    weight = random_coded(weight_rule, SHAPE)
    actual, back, _ = read(write(tmp_path, "compressed-tensors", weight, weight_rule, form))
    assert equal(actual, weight) and back == weight_rule


@pytest.mark.parametrize("form", ["nvfp4-pack-quantized", "mxfp4-pack-quantized", "float-quantized"])
def test_float_codes_come_as_they_are_too(tmp_path, form):
    g = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, SHAPE, generator=g, dtype=torch.uint8)
    if form == "float-quantized":
        weight_rule = WeightRule("float", 8, "channel")
        weight = Coded(
            torch.randn(SHAPE, generator=g).to(torch.float8_e4m3fn), torch.rand(16, 1).half().float()
        )
    elif form == "mxfp4-pack-quantized":
        weight_rule = WeightRule("float", 4, "group", 32)
        weight = Coded(codes, torch.exp2(torch.randint(-9, 9, (16, 2), generator=g).float()))
    else:
        weight_rule, above = WeightRule("float", 4, "tensor_group", 16), torch.tensor([700.0])
        local = (torch.rand(16, 4, generator=g) * 400 + 1).to(torch.float8_e4m3fn).float()
        weight = Coded(codes, local / above, global_scale=above)
    reader = write(tmp_path, "compressed-tensors", weight, weight_rule, form)
    actual, back, _ = read(reader)
    assert back == weight_rule and torch.equal(actual.scale, weight.scale)
    assert torch.equal(actual.codes.view(torch.uint8), weight.codes.view(torch.uint8))
    again = layouts.encode(actual, weight_rule, form, torch.float16)
    assert all(torch.equal(again[leaf], reader.checkpoint.load(f"{MODULE}.{leaf}")) for leaf in again)


def test_static_act_order_is_no_order():
    config = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16}
    for order in ("static", "weight", None):
        result = WeightRule.read({**config, "actorder": order})
        assert all(misfit(result, SHAPE, target) is None for target in WIDTHS)
    assert "act-order" in misfit(WeightRule.read({**config, "actorder": "group"}), SHAPE, "awq")


def test_a_g_idx_of_neighbours_is_none(tmp_path):
    weight_rule = rule(4, 16, ordered=True)
    weight = replace(random_coded(weight_rule, SHAPE), g_idx=torch.arange(64) // 16)
    actual, back, _ = read(write(tmp_path, "compressed-tensors", weight, weight_rule))
    assert back == rule(4, 16) and actual.g_idx is None


@pytest.mark.parametrize(
    ("made", "shape", "target", "why"),
    [
        (WeightRule("float", 8, "channel"), SHAPE, "gptq", "float codes"),
        (WeightRule("nf4", 4, "group", 64), SHAPE, "compressed-tensors", "nf4 codes"),
        (WeightRule("int", 8, "block", block=(128, 128)), SHAPE, "gptq", "blocks of 128 x 128"),
        (rule(8, 16), SHAPE, "awq", "4 bits at most, not 8"),
        (rule(4, 16, ordered=True), SHAPE, "awq", "no g_idx"),
        (rule(4, 16), (12, 64), "awq", "8 outputs in a word, and it has 12"),
        (rule(4, 48), SHAPE, "awq", "64 inputs are no multiple of 48"),
    ],
)
def test_what_does_not_fit_is_reported(made, shape, target, why):
    assert why in misfit(made, shape, target)


@pytest.mark.parametrize("target", list(WIDTHS))
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_wider_code_holds_the_same_number(tmp_path, target, bits):
    weight_rule = rule(bits, 16, symmetric=False)
    weight = random_coded(weight_rule, SHAPE)
    carried = convert(weight, weight_rule, target)
    assert carried.rule.bits == next(width for width in WIDTHS[target] if width >= bits)
    actual, back, dense = read(write(tmp_path, target, carried.weight, carried.rule))
    assert equal(actual, weight) and back.bits == carried.rule.bits
    assert torch.equal(dense, gptq.decode(gptq.encode(weight, weight_rule), weight_rule))


def test_five_bits_become_eight_in_gptq():
    assert converted_rule(rule(5, 16), "gptq") == rule(8, 16)
    assert converted_rule(rule(5, 16), "compressed-tensors") == rule(5, 16)


def test_one_scale_for_all_becomes_one_for_each_output(tmp_path):
    weight_rule = WeightRule("int", 4, "tensor", symmetric=False)
    weight = random_coded(weight_rule, SHAPE)
    carried = convert(weight, weight_rule, "gptq")
    assert carried.rule == rule(4, 0, symmetric=False) and carried.weight.scale.shape == (16, 1)
    actual, _, dense = read(write(tmp_path, "gptq", carried.weight, carried.rule))
    wanted = layouts.decode(layouts.encode(weight, weight_rule, PACK, torch.float16), weight_rule, PACK)
    assert torch.equal(actual.codes, weight.codes) and torch.equal(dense, wanted)
    assert convert(weight, weight_rule, "compressed-tensors").rule == weight_rule


def test_symmetric_weights_next_to_asymmetric_ones(tmp_path):
    weight = random_coded(rule(), SHAPE)
    carried = convert(weight, rule(), "gptq", zeros=True)
    assert not carried.rule.symmetric and not carried.weight.zero.any()
    tensors = gptq.encode(carried.weight, carried.rule)
    assert {int(word) & 0xFFFFFFFF for word in tensors["qzeros"].flatten()} == {0x88888888}
    assert torch.equal(gptq.decode(tensors, carried.rule), gptq.decode(gptq.encode(weight, rule()), rule()))


@pytest.mark.parametrize(
    ("scale", "change"),
    [
        ([1.0, 65280.0, 2.0**-14], 0.0),  # bfloat16 numbers within float16's range
        ([2.0**-17 * (1 + 127 / 128)], 0.0),  # the smallest power of two whose bfloat16 numbers are all there
        ([2.0**-18 * (1 + 127 / 128)], 2.0**-18 / 128 / (2.0**-18 * (1 + 127 / 128))),
        ([1.0 + 2.0**-11, 3.0], 2.0**-11 / (1 + 2.0**-11)),  # float32: half a step of float16
    ],
)
def test_scales_change_by_the_reported_amount(scale, change):
    weight = Coded(torch.zeros(len(scale), 16, dtype=torch.int8), torch.tensor(scale)[:, None])
    carried = convert(weight, rule(4, 0), "gptq")
    assert carried.change == pytest.approx(change, rel=1e-6)
    assert (carried.note is None) == (change == 0)
    assert torch.equal(carried.weight.scale, carried.weight.scale.half().float())
    if change:
        assert f"{change:.1e}" in carried.note and "float16" in carried.note


@pytest.mark.parametrize("scale", [1e-9, 7e4, float("nan")])
def test_scales_out_of_range_are_an_error(scale):
    weight = Coded(torch.zeros(1, 16, dtype=torch.int8), torch.tensor([[scale]]))
    with pytest.raises(NumericsError, match=r"a\.b: its scales.*do not fit float16"):
        convert(weight, rule(4, 0), "gptq", name="a.b")


def test_bfloat16_scales_can_stay(tmp_path):
    weight = Coded(torch.zeros(1, 16, dtype=torch.int8), torch.tensor([[1e-9]]).bfloat16().float())
    assert convert(weight, rule(4, 0), "compressed-tensors", dtype=torch.bfloat16).change == 0.0


def test_nothing_is_modified():
    weight_rule = rule(3, 16, symmetric=False)
    weight = random_coded(weight_rule, SHAPE)
    convert(weight, weight_rule, "awq")
    assert equal(weight, random_coded(weight_rule, SHAPE))
