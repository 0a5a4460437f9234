"""MLX's layout against numbers of ``mx.quantize`` and ``mx.dequantize`` (mlx 0.32.4) for one row of 32."""

import pytest
import torch

from attar.formats.coded import Coded, dequantize
from attar.formats.mlx import AFFINE, MLXRule, carried_rule, decode, encode, float_rule
from attar.formats.rules import WeightRule

WORDS = {  # weight, scales, biases of (7 i mod 32) / 32 - 1/2, and the first six numbers of mx.dequantize
    MLXRule(AFFINE, 3, 32): (
        ([3196648208, 3019129814, 3516899866], [0.125], [-0.5]),
        [-0.5, -0.25, 0.0, 0.125, 0.375, -0.375],
    ),
    MLXRule(AFFINE, 5, 32): (
        ([2278209760, 1184626826, 4210051255, 3893274306, 3432402649], [0.03125], [-0.5]),
        [-0.5, -0.28125, -0.0625, 0.15625, 0.375, -0.40625],
    ),
    MLXRule(AFFINE, 4, 32): (
        ([2234427200, 1105880060, 228995016, 3378703236], [0.0625], [-0.5]),
        [-0.5, -0.25, -0.0625, 0.125, 0.375, -0.375],
    ),
    float_rule("mxfp4"): (
        ([198519246, 3176307812, 3826963760, 1101878028], [124]),
        [-0.5, -0.25, -0.0625, 0.125, 0.375, -0.375],
    ),
    float_rule("mxfp8"): (
        (
            [1793126904, 1491924340, 3841095536, 4009128808, 4084624896, 4151469288, 1970067696, 1902177012],
            [118],
        ),
        [-0.5, -0.28125, -0.0625, 0.15625, 0.375, -0.40625],
    ),
    float_rule("nvfp4"): (
        ([484854239, 3747851893, 4130072400, 1657697437], [27, 26]),
        [-0.515625, -0.2578125, -0.04296875, 0.171875, 0.34375, -0.34375],
    ),
}


@pytest.mark.parametrize("rule", WORDS, ids=lambda rule: f"{rule.mode}-{rule.bits}")
def test_words_of_mlx_decode_as_there(rule):
    (words, scales, *biases), wanted = WORDS[rule]
    kind = torch.float32 if rule.mode == AFFINE else torch.uint8
    tensors = {
        "weight": torch.tensor([words], dtype=torch.uint32),
        "scales": torch.tensor([scales], dtype=kind),
    }
    if biases:
        tensors["biases"] = torch.tensor(biases)
    assert decode(tensors, rule)[0, :6].tolist() == wanted


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_integer_codes_are_carried_exactly(bits):
    g = torch.Generator().manual_seed(bits)
    rule = WeightRule("int", bits, "group", 64, symmetric=False)
    target = carried_rule(rule, (6, 128))
    assert target == MLXRule(AFFINE, 8 if bits == 7 else bits, 64)
    half = 2 ** (bits - 1)
    codes = torch.randint(-half, half, (6, 128), generator=g).to(torch.int8)
    scale = torch.rand((6, 2), generator=g).half().float()
    weight = Coded(codes, scale, torch.randint(-half, half, (6, 2), generator=g).float())
    tensors = encode(weight, rule, target, torch.float32)
    assert torch.allclose(decode(tensors, target), dequantize(weight, 64), rtol=1e-5, atol=2e-5)
    assert tensors["weight"].shape == (6, 128 * target.bits // 32)


@pytest.mark.parametrize(
    ("rule", "wanted"),
    [
        (WeightRule("int", 4, "channel"), MLXRule(AFFINE, 4, 128)),
        (WeightRule("int", 4, "tensor"), MLXRule(AFFINE, 4, 128)),
        (WeightRule("int", 4, "group", 96), MLXRule(AFFINE, 4, 32)),
        (WeightRule("float", 4, "tensor_group", 16), float_rule("nvfp4")),
        (WeightRule("float", 4, "group", 32), float_rule("mxfp4")),
        (WeightRule("int", 4, "group", 16), "no multiple of 32"),
        (WeightRule("int", 4, "group", 256), "no multiple of its groups of 256"),
        (WeightRule("int", 4, "group", 64, ordered=True), "act-order"),
        (WeightRule("float", 8, "channel"), "no float8 codes with a scale by channel"),
        (WeightRule("float", 8, "block", block=(128, 128)), "blocks of 128 x 128"),
        (WeightRule("nf4", 4, "group", 64), "no nf4 codes"),
    ],
)
def test_which_rules_mlx_holds(rule, wanted):
    actual = carried_rule(rule, (8, 384))
    assert actual == wanted or (isinstance(wanted, str) and wanted in actual)


def test_one_scale_is_spread_over_rows_and_groups():
    rule, weight = (
        WeightRule("int", 8, "tensor"),
        Coded(torch.arange(-96, 96).view(3, 64).to(torch.int8), torch.tensor([[0.5]])),
    )
    target = carried_rule(rule, (3, 64))
    tensors = encode(weight, rule, target, torch.bfloat16)
    assert tensors["scales"].shape == (3, 1) and tensors["biases"].dtype == torch.bfloat16
    assert torch.equal(decode(tensors, target), weight.codes * 0.5)
