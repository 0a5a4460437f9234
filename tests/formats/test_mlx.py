"""MLX's layout against numbers of ``mx.quantize`` and ``mx.dequantize`` (mlx 0.32.4) for one row of 32."""

from pathlib import Path

import pytest
import torch

from attar.checkpoint.tensors import TensorInfo, stored_dtype
from attar.formats.coded import Coded, dequantize
from attar.formats.mlx import AFFINE, MLXReader, MLXRule, affine, carried_rule, decode, encode, float_rule
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


class StoredWeight:
    """A checkpoint with one weight."""

    def __init__(self, tensors, rule):
        self.values = {f"layer.{leaf}": value for leaf, value in tensors.items()}
        self.config = {"model_type": "llama", "quantization_config": rule.config()}
        self.tensors = {
            name: TensorInfo(
                name, stored_dtype(value.dtype), tuple(value.shape), value.nbytes, Path("file"), 0
            )
            for name, value in self.values.items()
        }
        self.load, self.path = self.values.__getitem__, Path("file")


GRIDS = [
    *(
        WeightRule("int", bits, "group", 64, symmetric=symmetric)
        for bits in (4, 8)
        for symmetric in (True, False)
    ),
    WeightRule("float", 4, "group", 32),
    WeightRule("float", 8, "group", 32),
    WeightRule("float", 4, "tensor_group", 16),
]


@pytest.mark.parametrize(
    "rule", GRIDS, ids=lambda rule: f"{rule.kind}{rule.bits}-{rule.strategy}-{rule.symmetric}"
)
def test_codes_come_back_on_the_grid_that_they_had(rule):
    g = torch.Generator().manual_seed(0)
    shape, groups = (6, 128), (6, 128 // rule.group_size)
    integer = torch.randint(-(2 ** (rule.bits - 1)), 2 ** (rule.bits - 1), shape, generator=g)
    codes = integer.to(torch.int8) if rule.kind == "int" else (integer + 8).to(torch.uint8)
    codes = (
        torch.randn(shape, generator=g).to(torch.float8_e4m3fn)
        if (rule.kind, rule.bits) == ("float", 8)
        else codes
    )
    scale = (
        torch.randint(1, 200, groups, generator=g) * 0.5
        if rule.strategy != "group" or rule.kind == "int"
        else (2.0 ** torch.randint(-8, 8, groups, generator=g))
    )
    scale = scale.to(torch.float8_e4m3fn).float() if rule.strategy == "tensor_group" else scale.float()
    zero = None if rule.symmetric else torch.randint(-3, 4, groups, generator=g).float()
    target = carried_rule(rule, shape)
    read = MLXReader(StoredWeight(encode(Coded(codes, scale, zero), rule, target, torch.float32), target))
    assert read.grid("layer.weight")[0] == rule
    back, _ = read.codes("layer.weight")
    assert torch.equal(back.codes.float(), codes.float()) and torch.equal(back.scale, scale)
    assert zero is None or torch.equal(back.zero, zero)
    uniform, weight = read.uniform("layer.weight"), read.weight("layer.weight")
    assert (uniform is None) == (rule.kind == "float" and rule.bits == 8)
    if uniform is not None:
        tiled = uniform.codes.float().unflatten(1, (-1, rule.group_size))
        shift = torch.zeros(groups) if uniform.zero is None else uniform.zero
        torch.testing.assert_close(((tiled - shift[..., None]) * uniform.scale[..., None]).flatten(1), weight)


def test_groups_as_mx_quantize_has_them_are_on_no_other_grid():
    """Negative scales, and biases between two codes, as ``mx.quantize`` stores bfloat16."""
    rule, codes = MLXRule(AFFINE, 4, 32), torch.arange(64).view(2, 32) % 16
    scale, bias = torch.tensor([[-0.191406], [0.236328]]), torch.tensor([[1.53125], [-1.89062]])
    tensors = affine(codes, scale.bfloat16(), bias.bfloat16(), 4)
    read = MLXReader(StoredWeight(tensors, rule))
    read.check("layer.weight")
    assert read.grid("layer.weight") is None and read.codes("layer.weight") is None
    wanted = codes * scale.bfloat16().float() + bias.bfloat16().float()
    assert torch.equal(read.weight("layer.weight"), wanted)
    uniform = read.uniform("layer.weight")
    torch.testing.assert_close((uniform.codes - uniform.zero) * uniform.scale, wanted)
    none = MLXReader(StoredWeight({**tensors, "scales": torch.zeros_like(tensors["scales"])}, rule))
    assert none.uniform("layer.weight") is None and none.grid("layer.weight") is None


def test_a_global_scale_of_experts_multiplies():
    """``mx.quantize(..., global_scale=g)``: an e2m1 of 6 under a scale of 448 stands for g."""
    rule = float_rule("nvfp4")
    tensors = encode(Coded(torch.full((1, 32), 7), torch.full((1, 2), 448.0)), None, rule, torch.float32)
    read = MLXReader(StoredWeight({**tensors, "global_scale": torch.tensor(2.5)}, rule))
    torch.testing.assert_close(read.weight("layer.weight"), torch.full((1, 32), 2.5))
    torch.testing.assert_close(read.codes("layer.weight")[0].global_scale, torch.tensor([2688 / 2.5]))


def test_scales_that_are_bytes_tell_the_mode_where_the_config_does_not():
    tensors = encode(
        Coded(torch.full((1, 64), 3), torch.full((1, 2), 0.5)), None, float_rule("mxfp4"), torch.float32
    )
    stored = StoredWeight(tensors, MLXRule(AFFINE, 8, 64))
    assert torch.equal(MLXReader(stored).weight("layer.weight"), torch.full((1, 64), 0.75))


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
