"""ModelOpt's FP8 and NVFP4: announced shapes, a decoder made of loops, conversion both ways, refusals."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from attar.checkpoint import open_checkpoint
from attar.checkpoint.shards import ShardWriter
from attar.checkpoint.tensors import stored_dtype
from attar.errors import CheckpointError, ModelError, NumericsError
from attar.formats import modelopt
from attar.formats.coded import Coded
from attar.formats.modelopt import unpack
from attar.formats.modelopt_conversion import FromCompressedTensors, ToCompressedTensors
from attar.formats.readers import reader
from attar.formats.rules import ActivationRule, WeightRule
from attar.models.loading.load import load_model
from attar.quantization.schemes import SCHEMES
from tests.quantization.packing import pack, save

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
WEIGHTS = [name for name in modelopt.ALGORITHMS if name != "NVFP4"]


def encoded_tensors(name, shape=(128, 256), seed=0):
    """Random codes of an algorithm."""
    rule = modelopt.ALGORITHMS[name][0]
    g = torch.Generator().manual_seed(seed)
    if rule.bits == 4:
        codes = torch.randint(0, 16, shape, generator=g, dtype=torch.uint8)
        local = (torch.rand(rule.tiles(shape), generator=g) * 400 + 1).to(torch.float8_e4m3fn)
        above = torch.tensor([2688 / 0.7])
        return Coded(codes, local.float() / above, global_scale=above), rule
    codes = torch.randn(shape, generator=g).to(torch.float8_e4m3fn)
    return Coded(codes, torch.rand(rule.tiles(shape), generator=g) + 0.01), rule


def float8(byte):
    """e4m3fn by its definition."""
    sign, exponent, fraction = byte >> 7, byte >> 3 & 15, byte & 7
    value = fraction / 8 * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7)
    return -value if sign else value


def by_loops(tensors):
    """The weight in float64, element by element from the bytes."""
    stored = tensors["weight"].view(torch.uint8).tolist()
    rows, columns = len(stored), len(stored[0])
    if "weight_scale_2" in tensors:
        scales = tensors["weight_scale"].view(torch.uint8).tolist()
        above = float(tensors["weight_scale_2"])
        weight = torch.zeros(rows, 2 * columns, dtype=torch.float64)
        for n in range(rows):
            for k in range(2 * columns):
                nibble = stored[n][k // 2] >> (4 * (k % 2)) & 15
                value = -FP4[nibble & 7] if nibble & 8 else FP4[nibble]
                weight[n, k] = value * float8(scales[n][k // 16]) * above
        return weight
    scale = tensors["weight_scale"]
    weight = torch.zeros(rows, columns, dtype=torch.float64)
    for n in range(rows):
        for k in range(columns):
            if scale.dim() == 4:
                factor = scale[n // 128, 0, k // 128, 0]
            else:
                factor = scale[n] if scale.dim() else scale
            weight[n, k] = float8(stored[n][k]) * float(factor)
    return weight


@pytest.mark.few(2)
@pytest.mark.parametrize("name", WEIGHTS)
def test_decoding_agrees_with_loops_over_the_description(name):
    shape = (128, 256) if name == "fp8_pb_wo" else (6, 32)
    weight, rule = encoded_tensors(name, shape)
    tensors = modelopt.encode(weight, rule, input_scale=0.25)
    got = modelopt.decode(tensors, torch.float32)
    wanted = by_loops(tensors)
    assert torch.allclose(got.double(), wanted, rtol=3e-7, atol=0)
    assert torch.equal(modelopt.decode(tensors, torch.bfloat16), got.bfloat16())
    assert modelopt.layout(shape, rule, static=True) == {
        leaf: (stored_dtype(value.dtype), tuple(value.shape)) for leaf, value in tensors.items()
    }
    again = unpack(tensors)
    assert torch.equal(again.codes.view(torch.uint8), weight.codes.view(torch.uint8))
    assert torch.allclose(again.scale, weight.scale, rtol=3e-7, atol=0)


def test_the_second_scale_multiplies():
    """Hand-computed: two weights of 6 and -1.5 under the scale 448 and the global scale 2688 / 12."""
    codes = torch.zeros(1, 16, dtype=torch.uint8)
    codes[0, 0], codes[0, 1] = 7, 11
    above = torch.tensor([2688.0 / 12.0])
    weight = Coded(codes, torch.tensor([[448.0]]) / above, global_scale=above)
    tensors = modelopt.encode(weight, modelopt.ALGORITHMS["NVFP4"][0])
    assert tensors["weight"][0, 0] == 0xB7
    assert float(tensors["weight_scale"].float()) == 448.0
    assert float(tensors["weight_scale_2"]) == pytest.approx(12.0 / (6 * 448), rel=1e-6)
    assert modelopt.decode(tensors, torch.float32)[0, :3].tolist() == pytest.approx([12.0, -3.0, 0.0])


def test_algorithms_by_their_rules():
    for name, (weights, activations) in modelopt.ALGORITHMS.items():
        assert modelopt.algorithm(weights, activations) == name
    for scheme, name in (
        ("FP8", "FP8"),
        ("FP8_DYNAMIC", "FP8_PER_CHANNEL_PER_TOKEN"),
        ("FP8_BLOCK", "fp8_pb_wo"),
        ("NVFP4A16", "W4A16_NVFP4"),
        ("NVFP4", "NVFP4"),
    ):
        assert modelopt.algorithm(SCHEMES[scheme].weights, SCHEMES[scheme].activations) == name
    with pytest.raises(ModelError, match="no algorithm for weights in int4 by group"):
        modelopt.algorithm(WeightRule("int", 4, "group", 128), None)
    with pytest.raises(ModelError, match="inputs in float8 by token"):
        modelopt.algorithm(WeightRule("float", 8, "tensor"), ActivationRule("float", 8, "token"))
    with pytest.raises(ModelError, match="do not divide a weight of 96 x 128"):
        modelopt.layout((96, 128), modelopt.ALGORITHMS["fp8_pb_wo"][0])


def test_configs_say_what_readers_ask_for():
    layers = {"a.q_proj": "NVFP4", "a.k_proj": "NVFP4"}
    config = modelopt.quantization_config(layers, ["lm_head"], kv_cache=True)
    assert config["quant_method"] == "modelopt" and config["quant_algo"] == "NVFP4"
    assert config["config_groups"]["group_0"] == {
        "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
        "input_activations": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
        "targets": ["Linear"],
    }
    assert config["kv_cache_scheme"] == {"dynamic": False, "num_bits": 8, "type": "float"}
    older = modelopt.hf_quant_config(layers, ["lm_head"], kv_cache=True)
    assert older["producer"]["name"] == "modelopt"  # vLLM and SGLang ask for it
    assert older["quantization"] == {
        "quant_algo": "NVFP4",
        "group_size": 16,
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": ["lm_head"],
    }
    mixed = {"a.q_proj": "FP8", "a.k_proj": "W4A16_NVFP4"}
    config, older = modelopt.quantization_config(mixed, []), modelopt.hf_quant_config(mixed, [])
    assert config["quant_algo"] == older["quantization"]["quant_algo"] == "MIXED_PRECISION"
    assert config["quantized_layers"] == older["quantization"]["quantized_layers"]
    assert config["quantized_layers"]["a.k_proj"] == {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    assert [group["targets"] for group in config["config_groups"].values()] == [["a.q_proj"], ["a.k_proj"]]
    with pytest.raises(ModelError, match="FP8_PER_CHANNEL_PER_TOKEN in a separate checkpoint"):
        modelopt.quantization_config({**mixed, "a.v_proj": "FP8_PER_CHANNEL_PER_TOKEN"}, [])


def convert(source, conversion, folder):
    """Write what a conversion makes of a checkpoint."""
    folder.mkdir()
    change = conversion(source)
    slots = [slot for info in source.tensors.values() for slot in change.headers(info)]
    writer = ShardWriter(folder, slots)
    for name in source.tensors:
        for key, tensor in change.tensors(name).items():
            writer.add(key, tensor)
    writer.finish()
    (folder / "config.json").write_text(json.dumps(change.config))
    return change, open_checkpoint(folder)


NAME = "model.layers.1.mlp.down_proj"


@pytest.mark.few(1)
@pytest.mark.parametrize("scheme", ["FP8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4A16", "NVFP4"])
def test_there_and_back_without_touching_a_code(scheme, tmp_path):
    kv = "fp8" if scheme == "FP8" else "none"
    folder = save(tmp_path / "dense", num_key_value_heads=8, num_hidden_layers=2)
    _, source = pack(folder, tmp_path / "ct", scheme=scheme, kv_cache=kv)
    change, there = convert(source, FromCompressedTensors, tmp_path / "mo")
    name = modelopt.algorithm(SCHEMES[scheme].weights, SCHEMES[scheme].activations)
    assert list(change.layers.values()) == [name] * 14
    assert "lm_head" in there.config["quantization_config"]["ignore"]
    read, before = reader(there), reader(source)
    slots = {slot[0]: info.name for info in source.tensors.values() if (slot := before.header(info))}
    for info in there.tensors.values():
        slot = read.header(info)
        if slot is None:
            continue
        got, wanted = read.decode(info.name), before.decode(slots[slot[0]])
        read.check(info.name)
        assert (stored_dtype(got.dtype), tuple(got.shape)) == slot[1:]
        if SCHEMES[scheme].weights.bits == 4 and read.is_coded(info.name):
            base = info.name.removesuffix("weight")
            local = source.load(f"{base}weight_scale").float()
            scale = local / source.load(f"{base}weight_global_scale")
            assert torch.allclose(read.codes(info.name)[0].scale, scale, rtol=3e-7, atol=0)
            # one divides, the other multiplies by the rounded reciprocal: a tie may fall to the other side
            assert torch.allclose(got.float(), wanted.float(), rtol=2**-7, atol=0)
        else:
            assert torch.equal(got, wanted), info.name
    codes = "weight_packed" if SCHEMES[scheme].weights.bits == 4 else "weight"
    one, other = source.load(f"{NAME}.{codes}"), there.load(f"{NAME}.weight")
    assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    state = load_model(there).state_dict()
    assert torch.equal(state[f"{NAME}.weight"], read.decode(f"{NAME}.weight"))

    _, again = convert(there, ToCompressedTensors, tmp_path / "again")
    assert again.tensors.keys() == source.tensors.keys()
    for stored, info in source.tensors.items():
        first, last = source.load(stored), again.load(stored)
        if info.dtype in ("U8", "F8_E4M3"):
            assert torch.equal(first.view(torch.uint8), last.view(torch.uint8)), stored
        else:
            assert torch.allclose(first.float(), last.float(), rtol=1.3e-7, atol=0), stored
            assert first.shape == last.shape, stored
    assert reader(again).decode(f"{NAME}.{codes}").shape == state[f"{NAME}.weight"].shape


def test_scales_of_keys_and_values_move_to_their_projections(tmp_path):
    _, source = pack(
        save(tmp_path / "dense", num_hidden_layers=2), tmp_path / "ct", scheme="FP8", kv_cache="fp8"
    )
    change, there = convert(source, FromCompressedTensors, tmp_path / "mo")
    for leaf, neighbour in (("k_scale", "k_proj"), ("v_scale", "v_proj")):
        stored = there.load(f"model.layers.0.self_attn.{neighbour}.{leaf}")
        assert stored.shape == () and stored.dtype == torch.float32
        assert float(stored) == float(source.load(f"model.layers.0.self_attn.{leaf}"))
    assert change.hf_quant_config["quantization"]["kv_cache_quant_algo"] == "FP8"
    assert there.config["quantization_config"]["kv_cache_scheme"]["num_bits"] == 8
    back = ToCompressedTensors(there).config["quantization_config"]
    assert back["kv_cache_scheme"] == source.config["quantization_config"]["kv_cache_scheme"]


def test_static_inputs_of_nvfp4_are_reciprocals_and_round_the_same(tmp_path):
    folder = save(tmp_path / "dense", num_hidden_layers=2, dtype=torch.float32)
    _, source = pack(folder, tmp_path / "ct", scheme="NVFP4")
    _, there = convert(source, FromCompressedTensors, tmp_path / "mo")
    above = source.load(f"{NAME}.input_global_scale")
    assert above.shape == (1,) and float(there.load(f"{NAME}.input_scale")) == pytest.approx(
        1.0 / float(above)
    )
    modules = [load_model(one, dtype=torch.float32).get_submodule(NAME) for one in (source, there)]
    x = torch.randn(2, 8, 256, generator=torch.Generator().manual_seed(3))
    ours, theirs = (module(x).detach() for module in modules)
    assert torch.allclose(ours, theirs, rtol=0.02, atol=0.02 * float(ours.std()))
    dense = torch.nn.functional.linear(x, modules[0].weight).detach()
    assert (ours - dense).norm() > 0.05 * dense.norm()


@pytest.mark.slow
def test_what_has_no_place_is_refused(tmp_path):
    dense = save(tmp_path / "dense", num_hidden_layers=2)
    _, integers = pack(dense, tmp_path / "int", scheme="W4A16")
    with pytest.raises(ModelError, match="integer codes"):
        FromCompressedTensors(integers)
    _, cached = pack(dense, tmp_path / "kv", scheme="FP8_DYNAMIC", kv_cache="int8")
    with pytest.raises(ModelError, match="KV cache is FP8"):
        FromCompressedTensors(cached)
    _, embedded = pack(dense, tmp_path / "embedding", scheme="FP8_DYNAMIC", embedding_bits=8)
    with pytest.raises(ModelError, match=r"embed_tokens\.weight holds integer codes"):
        FromCompressedTensors(embedded)
    _, turned = pack(save(tmp_path / "gpt2", "gpt2"), tmp_path / "turned", scheme="FP8_DYNAMIC")
    with pytest.raises(ModelError, match="no transposed Linears"):
        FromCompressedTensors(turned)
    _, blocks = pack(dense, tmp_path / "blocks", scheme="FP8_BLOCK")
    with pytest.raises(ModelError, match="128 x 128 do not divide a weight of 64 x 128"):
        FromCompressedTensors(blocks)


def change_file(folder, alter):
    tensors = load_file(folder / "model.safetensors")
    alter(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return reader(open_checkpoint(folder))


@pytest.mark.few(1)
@pytest.mark.parametrize("scheme", ["FP8", "NVFP4A16"])
def test_damage_is_named(scheme, tmp_path):
    _, source = pack(save(tmp_path / "dense", num_hidden_layers=2), tmp_path / "ct", scheme=scheme)
    folder = tmp_path / "mo"
    convert(source, FromCompressedTensors, folder)
    before = load_file(folder / "model.safetensors")
    weight, scale = f"{NAME}.weight", f"{NAME}.weight_scale"
    cases = [
        (lambda tensors: tensors.pop(scale), "weight_scale is missing"),
        (lambda tensors: tensors.update({scale: torch.ones(3)}), "do not fit together"),
        (
            lambda tensors: tensors.update({weight: tensors[weight][:, :-8].contiguous()}),
            "do not fit together",
        ),
    ]
    if scheme == "FP8":
        cases[2] = (
            lambda tensors: tensors.update({weight: torch.ones(4, 4, dtype=torch.int8)}),
            "do not fit",
        )
    else:  # INT4 AWQ: bytes without a second scale
        cases.append((lambda tensors: tensors.pop(f"{NAME}.weight_scale_2"), "weight_scale_2 is missing"))
    for alter, match in cases:
        with pytest.raises(CheckpointError, match=match):
            change_file(folder, alter).decode(weight)
        save_file(before, folder / "model.safetensors", metadata={"format": "pt"})
    last = scale if scheme == "FP8" else f"{NAME}.weight_scale_2"
    with pytest.raises(NumericsError, match="infinite scales"):
        change_file(folder, lambda tensors: tensors[last].fill_(float("inf"))).check(weight)
    save_file(before, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(NumericsError, match="the same"):
        change_file(folder, lambda tensors: tensors[weight].view(torch.uint8).fill_(0x38)).check(weight)
