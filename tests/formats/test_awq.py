"""AWQ's layout: hand-computed words, a decoder of loops over nibbles, configs old and new."""

import pytest
import torch

from attar.checkpoint.tensors import stored_dtype
from attar.errors import CheckpointError, ModelError, NumericsError
from attar.formats.awq import (
    NIBBLE_OUTPUTS,
    OUTPUT_NIBBLES,
    AWQReader,
    decode,
    encode,
    layout,
    quantization_config,
    unpack,
)
from attar.formats.coded import Coded
from attar.formats.readers import quant_method, reader
from tests.decoded import dequantize_state
from tests.formats.integer_weights import equal, folder, half, random_coded, rule, words

MODULE = "model.layers.0.mlp.down_proj"
CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}


def nibble(word, output):
    """Output 0 to 7 of a word: even ones in the low half, odd ones in the high half."""
    index = output // 2 if output % 2 == 0 else 4 + output // 2
    return (int(word) & 0xFFFFFFFF) >> (4 * index) & 15


def by_loops(tensors, shape, size):
    weight = torch.zeros(shape, dtype=torch.float16)
    for n in range(shape[0]):
        for k in range(shape[1]):
            code = nibble(tensors["qweight"][k, n // 8], n % 8)
            zero = nibble(tensors["qzeros"][k // size, n // 8], n % 8)
            weight[n, k] = half(float(tensors["scales"][k // size, n]) * (code - zero))
    return weight


@pytest.mark.few(3)
@pytest.mark.parametrize("size", [16, 32, 0])
@pytest.mark.parametrize("symmetric", [True, False])
def test_decoding_agrees_with_loops_over_the_description(size, symmetric):
    result, shape = rule(4, size, symmetric=symmetric), (24, 96)
    weight = random_coded(result, shape)
    tensors = encode(weight, result)
    got = decode(tensors, result)
    assert got.dtype == torch.float16
    assert torch.equal(got, by_loops(tensors, shape, size or 96))
    assert equal(unpack(tensors), weight)
    assert layout(shape, result) == {
        name: (stored_dtype(value.dtype), tuple(value.shape)) for name, value in tensors.items()
    }


def test_hand_computed_words():
    """Outputs 0 to 7 of one input have the stored codes 0 to 7: nibbles 0 2 4 6 1 3 5 7 from the lowest."""
    codes = torch.arange(-8, 0, dtype=torch.int8)[:, None].repeat(1, 2)
    tensors = encode(Coded(codes, torch.full((8, 1), 0.5)), rule(4, 0))
    assert words(tensors["qweight"]) == [0x75316420, 0x75316420]
    assert words(tensors["qzeros"]) == [0x88888888]
    zero = torch.arange(7.0, -1, -1)[:, None]
    shifted = encode(Coded(codes, torch.full((8, 1), 0.5), zero), rule(4, 0, symmetric=False))
    assert words(shifted["qzeros"]) == [0x8ACE9BDF]
    assert decode(shifted, rule(4, 0, symmetric=False))[:, 0].tolist() == [
        (code - zero) / 2 for code, zero in zip(range(-8, 0), range(7, -1, -1), strict=True)
    ]


def test_the_two_orders_are_inverses():
    outputs = [NIBBLE_OUTPUTS[nibble] for nibble in OUTPUT_NIBBLES]
    assert outputs == list(range(8)) == [OUTPUT_NIBBLES[output] for output in NIBBLE_OUTPUTS]


def test_nothing_is_modified():
    weight_rule = rule(4, 16, symmetric=False)
    weight = random_coded(weight_rule)
    tensors = encode(weight, weight_rule)
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    decode(tensors, weight_rule)
    assert equal(weight, random_coded(weight_rule)) and all(
        torch.equal(kept[name], tensors[name]) for name in kept
    )


def test_config():
    rules = {"a": rule(4, 128, symmetric=False), "b": rule(4, 128)}
    assert quantization_config(rules, ignore=["lm_head"]) == {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 128,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": ["lm_head"],
    }
    some = quantization_config({"a": rule()}, ignore=["lm_head", "model.b"])
    assert some["modules_to_not_convert"] == ["lm_head", "model.b"]
    assert some["dynamic"] == {r"-:^model\.b$": {}}
    assert quantization_config({"lm_head": rule()})["lm_head"] is True
    assert quantization_config({"a": rule(4, 0)})["group_size"] == -1
    assert quantization_config({"a": rule(4, 0)})["modules_to_not_convert"] is None
    with pytest.raises(ModelError, match="one group size"):
        quantization_config({"a": rule(4, 128), "b": rule(4, 64)})


def stored(made=None, shape=(8, 64)):
    made = made or rule(4, 16, symmetric=False)
    return {f"{MODULE}.{leaf}": tensor for leaf, tensor in encode(random_coded(made, shape), made).items()}


@pytest.mark.parametrize(
    ("config", "config_file"),
    [
        (CONFIG, None),
        ({**CONFIG, "version": "GEMM"}, None),
        ({key: value for key, value in CONFIG.items() if key != "version"}, None),
        (
            None,
            ("quant_config.json", {"zero_point": True, "q_group_size": 16, "w_bit": 4, "version": "GEMM"}),
        ),
    ],
)
def test_a_checkpoint_is_read_tensor_by_tensor(tmp_path, config, config_file):
    norm, bias = torch.randn(4).half(), torch.randn(8).half()
    tensors = {**stored(), "model.norm.weight": norm, f"{MODULE}.bias": bias}
    checkpoint = folder(tmp_path, tensors, config, config_file=config_file)
    assert quant_method(checkpoint) == "awq"
    read = reader(checkpoint)
    weight_rule = rule(4, 16, symmetric=False)
    weight = random_coded(weight_rule)
    actual = read.codes(f"{MODULE}.qweight")
    assert equal(actual[0], weight) and actual[1] == weight_rule
    state = dequantize_state(checkpoint)
    assert sorted(state) == [f"{MODULE}.bias", f"{MODULE}.weight", "model.norm.weight"]
    assert torch.equal(state[f"{MODULE}.weight"], decode(encode(weight, weight_rule), weight_rule))
    assert torch.equal(state["model.norm.weight"], norm) and torch.equal(state[f"{MODULE}.bias"], bias)
    slot = read.header(checkpoint.tensors[f"{MODULE}.qweight"])
    assert slot == (f"{MODULE}.weight", "F16", (8, 64))
    read.check(f"{MODULE}.qweight")


def test_zero_points_of_8_are_none(tmp_path):
    weight_rule = rule(4, 16)
    actual = AWQReader(folder(tmp_path, stored(weight_rule), CONFIG)).codes(f"{MODULE}.qweight")
    assert actual[1] == weight_rule and equal(actual[0], random_coded(weight_rule))


@pytest.mark.parametrize("version", ["gemv", "marlin"])
def test_other_layouts_are_refused_by_name(tmp_path, version):
    with pytest.raises(ModelError, match=f"AWQ in the layout '{version}'"):
        AWQReader(folder(tmp_path, stored(), {**CONFIG, "version": version}))


@pytest.mark.parametrize("changes", [{"group_size": None}, {"group_size": 0}, {"bits": 8}])
def test_numbers_that_make_no_sense(tmp_path, changes):
    with pytest.raises(CheckpointError, match="group_size"):
        AWQReader(folder(tmp_path, stored(), {**CONFIG, **changes})).decode(f"{MODULE}.qweight")


@pytest.mark.parametrize(
    ("leaf", "change", "error"),
    [
        ("qweight", lambda t: t[:32], "qzeros is I32"),
        ("qzeros", lambda t: t[:1], "qzeros is I32"),
        ("scales", lambda t: t[:, :4], "scales is F16"),
        ("qweight", lambda t: t.half(), "qweight is F16"),
        ("qweight", lambda t: t.flatten(), "1 axes"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, leaf, change, error):
    tensors = stored()
    tensors[f"{MODULE}.{leaf}"] = change(tensors[f"{MODULE}.{leaf}"])
    with pytest.raises(CheckpointError, match=error):
        AWQReader(folder(tmp_path, tensors, CONFIG)).decode(f"{MODULE}.qweight")


def test_scales_of_zero_are_named(tmp_path):
    tensors = stored()
    tensors[f"{MODULE}.scales"][0, 0] = 0
    with pytest.raises(NumericsError, match=r"down_proj\.scales"):
        AWQReader(folder(tmp_path, tensors, CONFIG)).check(f"{MODULE}.qweight")
