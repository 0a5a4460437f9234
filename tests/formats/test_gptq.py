"""GPTQ's layout: hand-computed words, a decoder of loops over bit strings, configs old and new."""

import re

import pytest
import torch

from attar.checkpoint.tensors import stored_dtype
from attar.errors import CheckpointError, ModelError, NumericsError
from attar.formats.coded import Coded
from attar.formats.dense_pack import dense_pack, dense_unpack
from attar.formats.gptq import (
    V1,
    V2,
    GPTQReader,
    decode,
    encode,
    layout,
    quantization_config,
    unpack,
    version_for,
)
from attar.formats.readers import Decoded, quant_method, reader
from attar.formats.rules import WeightRule
from attar.patterns import RegexError
from tests.decoded import dequantize_state
from tests.formats.integer_weights import equal, field, folder, half, random_coded, rule, words

MODULE = "model.layers.0.mlp.down_proj"


def by_loops(tensors, bits, shape, version):
    """Each weight by the description, from the bit strings of its column and its group's row."""
    weight = torch.zeros(shape, dtype=torch.float16)
    for n in range(shape[0]):
        for k in range(shape[1]):
            group = int(tensors["g_idx"][k])
            code = field(tensors["qweight"][:, n], k, bits)
            zero = field(tensors["qzeros"][group], n, bits) + (version == V1)
            weight[n, k] = half(float(tensors["scales"][group, n]) * (code - zero))
    return weight


RULES = [
    *(rule(bits, size, symmetric=sym) for bits in (2, 3, 4, 8) for size in (16, 0) for sym in (True, False)),
    *(rule(bits, 16, symmetric=sym, ordered=True) for bits in (3, 4) for sym in (True, False)),
    rule(4, 40),  # the last group is smaller
]


@pytest.mark.few(3)
@pytest.mark.parametrize("version", [None, V1, V2])
@pytest.mark.parametrize("made", RULES, ids=str)
def test_decoding_agrees_with_loops_over_the_description(made, version):
    shape = (16, 96)
    weight = random_coded(made, shape)
    tensors = encode(weight, made, version)
    version = version or (V1 if made.symmetric else V2)
    got = decode(tensors, made, version)
    assert got.dtype == torch.float16
    assert torch.equal(got, by_loops(tensors, made.bits, shape, version))
    assert equal(unpack(tensors, made, version), weight)
    assert layout(shape, made) == {
        name: (stored_dtype(value.dtype), tuple(value.shape)) for name, value in tensors.items()
    }


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("shape", [(7, 33), (33, 7), (1, 5)])
def test_shapes_that_fill_no_words(bits, shape):
    weight_rule = rule(bits, 5, symmetric=False)
    weight = random_coded(weight_rule, shape)
    tensors = encode(weight, weight_rule)
    assert torch.equal(decode(tensors, weight_rule), by_loops(tensors, bits, shape, V2))
    assert equal(unpack(tensors, weight_rule, V2), weight)


def test_hand_computed_words():
    codes = torch.arange(-8, 8, dtype=torch.int8)[None].repeat(8, 1)
    weight = Coded(codes, torch.full((8, 1), 0.5))
    first, second = (encode(weight, rule(4, 0), version) for version in (V1, V2))
    assert words(first["qweight"][:, 0]) == [0x76543210, 0xFEDCBA98]
    assert words(first["qzeros"]) == [0x77777777] and words(second["qzeros"]) == [0x88888888]
    assert torch.equal(first["qweight"], second["qweight"])
    assert first["scales"].tolist() == [[0.5] * 8] and first["g_idx"].tolist() == [0] * 16
    assert decode(first, rule(4, 0))[3].tolist() == [code / 2 for code in range(-8, 8)]


@pytest.mark.parametrize(
    ("bits", "first", "second"),
    [
        (2, [0x55555555] * 2, [0xAAAAAAAA] * 2),
        (3, [0xDB6DB6DB, 0xB6DB6DB6, 0x6DB6DB6D], [0x24924924, 0x49249249, 0x92492492]),
        (4, [0x77777777] * 4, [0x88888888] * 4),
        (8, [0x7F7F7F7F] * 8, [0x80808080] * 8),
    ],
)
def test_zero_points_of_symmetric_weights(bits, first, second):
    weight = Coded(torch.zeros(32, 32, dtype=torch.int8), torch.ones(32, 1))
    assert words(encode(weight, rule(bits, 0), V1)["qzeros"]) == first
    assert words(encode(weight, rule(bits, 0), V2)["qzeros"]) == second


def test_three_bit_fields_straddle_words():
    """Code 10 has two bits in word 0 and one in word 1; code 21 one in word 1 and two in word 2."""
    codes = torch.full((1, 32), -4, dtype=torch.int8)
    codes[0, 10], codes[0, 21] = 1, 2  # 5 = 101b, 6 = 110b
    tensors = encode(Coded(codes, torch.ones(1, 1)), rule(3, 0))
    assert words(tensors["qweight"]) == [0b01 << 30, 1 | 0b0 << 31, 0b11]


def test_the_versions_differ_by_one_and_agree():
    weight_rule = rule(3, 16, symmetric=False)
    weight = random_coded(weight_rule)
    first, second = encode(weight, weight_rule, V1), encode(weight, weight_rule, V2)
    assert not torch.equal(first["qzeros"], second["qzeros"])
    assert torch.equal(decode(first, weight_rule, V1), decode(second, weight_rule, V2))
    assert not torch.equal(decode(second, weight_rule, V1), decode(second, weight_rule, V2))


def test_the_first_version_has_no_zero_point_of_0():
    weight_rule = rule(4, 16, symmetric=False)
    weight = random_coded(weight_rule)
    weight.zero[2, 1] = -8
    with pytest.raises(NumericsError, match="first version"):
        encode(weight, weight_rule, V1)
    assert equal(unpack(encode(weight, weight_rule, V2), weight_rule, V2), weight)
    assert version_for({"a": rule(), "b": weight_rule}) == V2 and version_for({"a": rule()}) == V1


def test_a_borrow_between_zero_points_is_undone():
    """A writer that takes 0x11111111 from whole words, zero points of 0 or not, is read back exactly."""
    weight_rule = rule(4, 16, symmetric=False)
    weight = random_coded(weight_rule)
    weight.zero[:, 1] = torch.tensor([-8.0, 3, -8, -8, 7, -8, 0, -8])
    tensors = encode(weight, weight_rule, V2)
    less = (tensors["qzeros"].to(torch.int64) & 0xFFFFFFFF) - 0x11111111
    tensors["qzeros"] = torch.tensor([w - 2**32 if w >= 2**31 else w for w in (less % 2**32).flatten()])
    tensors["qzeros"] = tensors["qzeros"].reshape(less.shape).to(torch.int32)
    assert equal(unpack(tensors, weight_rule, V1), weight)


def test_a_zero_point_of_0_that_went_round_in_three_bits():
    """Fields straddle words there, so that a writer took 1 from each field: 0 became 7."""
    weight_rule = rule(3, 16, symmetric=False)
    weight = random_coded(weight_rule, (32, 64))
    weight.zero[5] = -4
    tensors = encode(weight, weight_rule, V2)
    fields = dense_unpack(tensors["qzeros"], 3, 32)
    assert (fields == 0).any()
    tensors["qzeros"] = dense_pack((fields - 1) & 7, 3)
    assert equal(unpack(tensors, weight_rule, V1), weight)


def test_rounds_once():
    """float16 scale times whole number, to the nearest float16: no rounding of s z in between."""
    scale = torch.tensor([[0.033721923828125]])  # a float16 number
    assert scale.half().float() == scale
    weight_rule = rule(8, 0, symmetric=False)
    codes = torch.arange(-128, 128, dtype=torch.int16).to(torch.int8)[None]
    weight = Coded(codes, scale, torch.tensor([[-77.0]]))
    got = decode(encode(weight, weight_rule), weight_rule)
    exact = (codes.double() + 77) * scale.double()
    assert torch.equal(got, exact.half())
    twice = (codes.half() * scale.half() + (77 * scale).half()).half()
    assert not torch.equal(got, twice)


def test_nothing_is_modified():
    weight_rule = rule(4, 16, symmetric=False, ordered=True)
    weight, again = random_coded(weight_rule), random_coded(weight_rule)
    tensors = encode(weight, weight_rule)
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    decode(tensors, weight_rule)
    assert equal(weight, again) and all(torch.equal(kept[name], tensors[name]) for name in kept)


# configs


def test_config_of_one_rule():
    rules = {f"model.layers.{n}.mlp.up_proj": rule(4, 128) for n in range(2)}
    assert quantization_config(rules, ignore=["lm_head"]) == {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "sym": True,
        "desc_act": False,
        "checkpoint_format": "gptq",
        "pack_dtype": "int32",
        "lm_head": False,
    }
    whole = quantization_config({"a": rule(3, 0, symmetric=False)})
    assert (whole["group_size"], whole["sym"], whole["checkpoint_format"]) == (-1, False, "gptq_v2")
    assert quantization_config({"a": rule(ordered=True)})["desc_act"] is True
    assert quantization_config({"a": rule(), "lm_head": rule()})["lm_head"] is True


def test_config_of_several_rules_names_exactly_the_modules_that_differ():
    rules = {f"model.layers.{n}.mlp.{leaf}": rule(4, 32) for n in range(12) for leaf in ("gate_proj", "c")}
    rules["model.layers.1.mlp.gate_proj"] = rule(8, 32)
    rules["model.layers.1.mlp.c"] = rule(4, 0, symmetric=False)
    config = quantization_config(rules, ignore=["model.layers.11.mlp.d", "lm_head"])
    assert (config["bits"], config["group_size"], config["sym"]) == (4, 32, True)
    assert config["checkpoint_format"] == "gptq_v2"
    dense, wide, odd = config["dynamic"].items()
    assert dense[1] == {} and wide[1] == {"bits": 8} and odd[1] == {"group_size": -1, "sym": False}
    assert dense[0].startswith("-:") and wide[0].startswith("+:")

    def matched(key):
        names = [*rules, "model.layers.1.mlp.gate_up_proj", "model.layers.11.mlp.d", "model.layers.1.mlp.cc"]
        return [name for name in names if re.match(key[2:], name)]

    assert matched(dense[0]) == ["model.layers.11.mlp.d"]
    assert matched(wide[0]) == ["model.layers.1.mlp.gate_proj", "model.layers.1.mlp.gate_up_proj"]
    assert matched(odd[0]) == ["model.layers.1.mlp.c"]
    assert config["modules_in_block_to_quantize"] == [list(rules)]


# checkpoints


def stored(made=None, shape=(8, 64), version=None, name=MODULE, seed=0):
    made = made or rule()
    return {f"{name}.{leaf}": t for leaf, t in encode(random_coded(made, shape, seed), made, version).items()}


def test_a_checkpoint_is_read_tensor_by_tensor(tmp_path):
    weight_rule = rule(4, 16, symmetric=False)
    dense, bias = torch.randn(4, 8).half(), torch.randn(8).half()
    tensors = {**stored(weight_rule), "model.norm.weight": dense, f"{MODULE}.bias": bias}
    checkpoint = folder(tmp_path, tensors, quantization_config({MODULE: weight_rule}))
    assert quant_method(checkpoint) == "gptq"
    read = reader(checkpoint)
    assert isinstance(read, GPTQReader) and read.version == V2
    slots = [read.header(info) for info in checkpoint.tensors.values()]
    assert sorted(slot for slot in slots if slot) == [
        (f"{MODULE}.bias", "F16", (8,)),
        (f"{MODULE}.weight", "F16", (8, 64)),
        ("model.norm.weight", "F16", (4, 8)),
    ]
    weight = random_coded(weight_rule)
    assert torch.equal(read.decode(f"{MODULE}.qweight"), decode(encode(weight, weight_rule), weight_rule))
    assert torch.equal(read.decode(f"{MODULE}.bias"), bias) and torch.equal(
        read.decode("model.norm.weight"), dense
    )
    assert all(read.decode(f"{MODULE}.{leaf}") is None for leaf in ("qzeros", "scales", "g_idx"))
    actual = read.codes(f"{MODULE}.qweight")
    assert equal(actual[0], weight) and actual[1] == weight_rule
    assert read.codes(f"{MODULE}.scales") is None and read.codes("model.norm.weight") is None
    read.check(f"{MODULE}.qweight")
    read.check("model.norm.weight")
    state = dequantize_state(checkpoint)
    assert sorted(state) == sorted(slot[0] for slot in slots if slot)
    view = Decoded(checkpoint)
    assert torch.equal(view.load(f"{MODULE}.weight"), state[f"{MODULE}.weight"])
    assert "quantization_config" not in view.config


OLD = {"bits": 4, "group_size": 16, "desc_act": False, "sym": True, "quant_method": "gptq"}


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("expected", "version"),
    [
        ({}, V1),
        ({"checkpoint_format": "gptq"}, V1),
        ({"checkpoint_format": "gptq_v2"}, V2),
        ({"format": "gptq_v2", "method": "gptq"}, V2),
        ({"checkpoint_format": "GPTQ"}, V1),
    ],
)
def test_labels_old_and_new(tmp_path, expected, version, symmetric):
    weight_rule = rule(4, 16, symmetric=symmetric)
    checkpoint = folder(tmp_path, stored(weight_rule, version=version), {**OLD, "sym": symmetric, **expected})
    actual = GPTQReader(checkpoint).codes(f"{MODULE}.qweight")
    assert equal(actual[0], random_coded(weight_rule)) and actual[1] == weight_rule


def test_a_quantize_config_next_to_the_config(tmp_path):
    config = {key: value for key, value in OLD.items() if key != "quant_method"}
    checkpoint = folder(tmp_path, stored(), None, config_file=("quantize_config.json", config))
    assert quant_method(checkpoint) == "gptq"
    assert equal(reader(checkpoint).codes(f"{MODULE}.qweight")[0], random_coded(rule()))
    dense = folder(tmp_path, {"a.weight": torch.ones(2)}, None)
    assert quant_method(dense) is None


def test_a_symmetric_file_with_the_wrong_label(tmp_path):
    """Kernels for symmetric weights do not look at zero points; neither does its meaning depend on them."""
    checkpoint = folder(tmp_path, stored(version=V2), OLD)
    assert equal(GPTQReader(checkpoint).codes(f"{MODULE}.qweight")[0], random_coded(rule()))
    asymmetric = folder(tmp_path, stored(version=V2), {**OLD, "sym": False})
    assert (GPTQReader(asymmetric).codes(f"{MODULE}.qweight")[0].zero == 1).all()


def test_a_file_that_says_symmetric_and_is_not(tmp_path):
    weight_rule = rule(4, 16, symmetric=False)
    checkpoint = folder(tmp_path, stored(weight_rule, version=V1), OLD)
    actual = GPTQReader(checkpoint).codes(f"{MODULE}.qweight")
    assert equal(actual[0], random_coded(weight_rule)) and not actual[1].symmetric


def test_overrides_and_skips(tmp_path):
    names = [f"model.layers.{n}.mlp.up_proj" for n in range(3)]
    rules = [rule(4, 16), rule(8, 16), rule(3, 0, symmetric=False)]
    tensors = {"lm_head.weight": torch.ones(2, 2)}
    for n, (name, result) in enumerate(zip(names, rules, strict=True)):
        tensors |= stored(result, (32, 64), V2, name, seed=n)
    config = {**OLD, "checkpoint_format": "gptq_v2"}
    dynamic = {
        r".*\.1\..*": {"bits": 8},  # no prefix: as +:
        r"+:.*\.[12]\..*": {"bits": 3, "group_size": -1, "sym": False},
        r"-:lm_head": {},
    }
    read = GPTQReader(folder(tmp_path, tensors, {**config, "dynamic": dynamic}))
    for n, (name, result) in enumerate(zip(names, rules, strict=True)):
        weight, actual = read.codes(f"{name}.qweight")
        assert actual == result and equal(weight, random_coded(result, (32, 64), n))
    assert torch.equal(read.decode("lm_head.weight"), torch.ones(2, 2))
    skipped = GPTQReader(folder(tmp_path, tensors, {**config, "dynamic": {**dynamic, r"-:.*\.1\..*": {}}}))
    with pytest.raises(CheckpointError, match=r"skips model\.layers\.1"):
        skipped.decode(f"{names[1]}.qweight")
    with pytest.raises(RegexError, match="regular expression"):
        GPTQReader(folder(tmp_path, tensors, {**config, "dynamic": {"+:(": {}}}))


def test_what_we_write_is_read_back_with_its_overrides(tmp_path):
    rules = {"a.q_proj": rule(4, 16), "a.o_proj": rule(8, 0), "b.o_proj": rule(4, 16), "lm_head": rule(4, 16)}
    tensors = {}
    for n, (name, result) in enumerate(rules.items()):
        tensors |= stored(result, seed=n, name=name)
    read = GPTQReader(folder(tmp_path, tensors, quantization_config(rules, ignore=["b.q_proj"])))
    assert {name: read.codes(f"{name}.qweight")[1] for name in rules} == rules


def test_files_without_g_idx_and_of_other_scale_types(tmp_path):
    tensors = stored()
    del tensors[f"{MODULE}.g_idx"]
    wanted = decode(encode(random_coded(rule()), rule()), rule())
    assert torch.equal(GPTQReader(folder(tmp_path, tensors, OLD)).decode(f"{MODULE}.qweight"), wanted)
    tensors[f"{MODULE}.scales"] = tensors[f"{MODULE}.scales"].float()
    read = GPTQReader(folder(tmp_path, tensors, OLD))
    assert torch.equal(read.decode(f"{MODULE}.qweight"), wanted)
    assert read.header(read.checkpoint.tensors[f"{MODULE}.qweight"])[1] == "F16"
    tensors[f"{MODULE}.scales"] = tensors[f"{MODULE}.scales"].bfloat16()
    read = GPTQReader(folder(tmp_path, tensors, OLD))
    assert read.decode(f"{MODULE}.qweight").dtype == torch.bfloat16
    assert read.header(read.checkpoint.tensors[f"{MODULE}.qweight"])[1] == "BF16"


def test_biases_of_zeros_that_old_writers_added(tmp_path):
    tensors = {**stored(), f"{MODULE}.bias": torch.zeros(8).half(), "other.bias": torch.zeros(8).half()}
    read = GPTQReader(folder(tmp_path, tensors, OLD))
    assert (
        read.header(read.checkpoint.tensors[f"{MODULE}.bias"]) is None
        and read.decode(f"{MODULE}.bias") is None
    )
    assert read.decode("other.bias") is not None
    named = GPTQReader(folder(tmp_path, tensors, {**OLD, "checkpoint_format": "gptq"}))
    assert named.decode(f"{MODULE}.bias") is not None
    tensors[f"{MODULE}.bias"][3] = 1
    assert GPTQReader(folder(tmp_path, tensors, OLD)).decode(f"{MODULE}.bias") is not None


def test_act_order_comes_back_and_neighbours_are_no_order(tmp_path):
    weight_rule = rule(4, 16, ordered=True)
    checkpoint = folder(tmp_path, stored(weight_rule), quantization_config({MODULE: weight_rule}))
    weight, actual = GPTQReader(checkpoint).codes(f"{MODULE}.qweight")
    assert actual == weight_rule and equal(weight, random_coded(weight_rule))
    config = {**OLD, "desc_act": True}
    assert GPTQReader(folder(tmp_path, stored(), config)).codes(f"{MODULE}.qweight")[1] == rule()


def test_conv1d_weights_are_turned(tmp_path):
    read = GPTQReader(folder(tmp_path, stored(), OLD, family="gpt2"))
    assert read.header(read.checkpoint.tensors[f"{MODULE}.qweight"])[2] == (64, 8)
    wanted = decode(encode(random_coded(rule()), rule()), rule())
    assert torch.equal(read.decode(f"{MODULE}.qweight"), wanted.T)
    assert read.codes(f"{MODULE}.qweight")[0].codes.shape == (8, 64)
    head = GPTQReader(folder(tmp_path, stored(name="lm_head"), OLD, family="gpt2"))
    assert torch.equal(head.decode("lm_head.qweight"), wanted)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"checkpoint_format": "gptq_p"}, "gptq_p"),
        ({"is_marlin_format": True}, "marlin"),
        ({"checkpoint_format": "marlin"}, "marlin"),
    ],
)
def test_other_formats_are_refused_by_name(tmp_path, changes, error):
    with pytest.raises(ModelError, match=error):
        GPTQReader(folder(tmp_path, stored(), {**OLD, **changes}))


@pytest.mark.parametrize("changes", [{"bits": 5}, {"bits": None}, {"group_size": 0}, {"group_size": "all"}])
def test_configs_that_make_no_sense(tmp_path, changes):
    with pytest.raises(CheckpointError, match=r"GPTQ with bits|bits is None|group_size is 'all'"):
        GPTQReader(folder(tmp_path, stored(), {**OLD, **changes})).decode(f"{MODULE}.qweight")


def damaged(leaf, change):
    tensors = stored()
    name = f"{MODULE}.{leaf}"
    tensors[name] = change(tensors[name])
    return tensors


@pytest.mark.parametrize(
    ("tensors", "expected", "error"),
    [
        (damaged("scales", lambda t: t[:2]), OLD, "scales is F16"),
        (damaged("qzeros", lambda t: t.repeat(1, 2)), OLD, "qzeros is I32"),
        (damaged("qweight", lambda t: t.float()), OLD, "qweight is F32"),
        (damaged("qweight", lambda t: t[0]), OLD, "1 axes"),
        (stored(), {**OLD, "bits": 8}, "different versions"),
        (stored(), {**OLD, "group_size": 32}, "different versions"),
        (damaged("g_idx", lambda t: t + 1), OLD, "does not have"),
        (damaged("g_idx", lambda t: t - 1), OLD, "does not have"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, tensors, expected, error):
    read = GPTQReader(folder(tmp_path, tensors, expected))
    with pytest.raises(CheckpointError, match=error) as raised:
        read.decode(f"{MODULE}.qweight")
    assert MODULE in str(raised.value)


@pytest.mark.parametrize("leaf", ["scales", "qzeros"])
def test_missing_tensors_are_named(tmp_path, leaf):
    tensors = stored()
    del tensors[f"{MODULE}.{leaf}"]
    read = GPTQReader(folder(tmp_path, tensors, OLD))
    with pytest.raises(CheckpointError, match=rf"down_proj\.{leaf} is missing"):
        read.header(read.checkpoint.tensors[f"{MODULE}.qweight"])


@pytest.mark.parametrize("bad", [0.0, float("inf"), float("nan")])
def test_scales_that_cannot_be_right(tmp_path, bad):
    tensors = stored()
    tensors[f"{MODULE}.scales"][1, 2] = bad
    with pytest.raises(NumericsError, match="scales"):
        GPTQReader(folder(tmp_path, tensors, OLD)).check(f"{MODULE}.qweight")


def test_scales_may_be_negative_and_constant_codes_may_not(tmp_path):
    tensors = stored(shape=(32, 64))
    tensors[f"{MODULE}.scales"] = -tensors[f"{MODULE}.scales"]
    GPTQReader(folder(tmp_path, tensors, OLD)).check(f"{MODULE}.qweight")
    tensors[f"{MODULE}.qweight"].fill_(-2004318072)
    with pytest.raises(NumericsError, match="nearly all codes"):
        GPTQReader(folder(tmp_path, tensors, OLD)).check(f"{MODULE}.qweight")


def test_an_unknown_rule_is_not_written():
    with pytest.raises(AssertionError):
        quantization_config({})
    assert WeightRule("int", 4, "channel") == rule(4, 0)
