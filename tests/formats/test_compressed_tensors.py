"""The config of a packed checkpoint, and reading it tensor by tensor."""

import json
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import save_file

from attar.checkpoint import open_checkpoint
from attar.errors import CheckpointError, NumericsError
from attar.formats.coded import Coded
from attar.formats.compressed_tensors import (
    EMBEDDING,
    TRANSPOSED,
    CompressedTensorsConfig,
    CompressedTensorsReader,
    ConfigGroup,
    quantization_config,
)
from attar.formats.layouts import encode
from attar.formats.rules import FLOAT, INT, NAIVE, PACK, ActivationRule, WeightRule
from tests.decoded import dequantize_state

W4 = WeightRule("int", 4, "group", 16)
W8 = WeightRule("int", 8, "channel")
FP8 = WeightRule("float", 8, "tensor")
TOKEN = ActivationRule("int", 8, "token")
STATIC = ActivationRule("float", 8, "tensor", dynamic=False)


def packed(folder, groups, weights, *, aside=None, **config):
    """A folder with these weights; ``weights`` maps module names to (rule, form)."""
    folder.mkdir(exist_ok=True)
    tensors = dict(aside or {})
    for number, (name, (rule, form)) in enumerate(weights.items()):
        g = torch.Generator().manual_seed(number)
        shape = (8, 32)
        if rule.kind == "float":
            codes = torch.randn(shape, generator=g).to(torch.float8_e4m3fn)
        else:
            half = 2 ** (rule.bits - 1)
            codes = torch.randint(-half, half, shape, generator=g).to(torch.int8)
        scale = torch.rand(rule.tiles(shape), generator=g) + 0.1
        result = encode(Coded(codes, scale), rule, form, torch.float32)
        tensors |= {f"{name}.{leaf}": value.contiguous() for leaf, value in result.items()}
    save_file(tensors, folder / "model.safetensors")
    message = quantization_config(groups, ignore=[], **config) if isinstance(groups, list) else groups
    whole = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "quantization_config": message}
    (folder / "config.json").write_text(json.dumps(whole))
    return open_checkpoint(folder)


def test_one_layout_names_itself_and_several_are_mixed():
    one = quantization_config([ConfigGroup(("Linear",), W4)], ignore=["lm_head"])
    assert one["format"] == PACK and one["ignore"] == ["lm_head"] and "kv_cache_scheme" not in one
    same = quantization_config([ConfigGroup(("Linear",), W4), ConfigGroup(("a.b",), W8)], ignore=[])
    assert same["format"] == PACK
    mixed = quantization_config(
        [ConfigGroup(("Linear",), W4), ConfigGroup(("a.b",), FP8, STATIC, FLOAT)], ignore=[], kv_cache=STATIC
    )
    assert mixed["format"] == "mixed-precision"
    assert [group["format"] for group in mixed["config_groups"].values()] == [PACK, FLOAT]
    assert mixed["kv_cache_scheme"]["type"] == "float"


def test_transposed_checkpoints_are_refused_by_name_but_for_the_embedding():
    groups = [ConfigGroup(("Linear",), W4), ConfigGroup(("transformer.wte",), EMBEDDING, None, NAIVE)]
    config = quantization_config(groups, ignore=[], transposed=True)
    assert config["format"] == TRANSPOSED
    assert [group["format"] for group in config["config_groups"].values()] == [TRANSPOSED, NAIVE]
    read = CompressedTensorsConfig(config)
    assert read.transposed and [group.form for group in read.groups] == [PACK, NAIVE]


def test_the_more_exact_name_decides():
    groups = [
        ConfigGroup(("Linear",), W4),
        ConfigGroup(("re:.*down_proj$",), W8, TOKEN, INT),
        ConfigGroup(("model.layers.1.mlp.down_proj",), FP8, STATIC, FLOAT),
    ]
    scheme = CompressedTensorsConfig(quantization_config(groups, ignore=["lm_head", "re:.*gate$"]))
    assert scheme.group("model.layers.0.mlp.up_proj", "Linear") == groups[0]
    assert scheme.group("model.layers.0.mlp.down_proj", "Linear") == groups[1]
    assert scheme.group("model.layers.1.mlp.down_proj", "Linear") == groups[2]
    assert scheme.group("model.layers.11.mlp.down_proj", "Linear") == groups[1]
    assert scheme.named("layers.1.mlp.down_proj") == groups[2]  # stored without the prefix
    assert scheme.group("lm_head", "Linear") is None
    assert scheme.group("model.layers.0.mlp.gate", "Linear") is None
    assert scheme.group("model.embed_tokens", "Embedding") is None


def test_groups_that_leave_out_their_format():
    config = quantization_config([ConfigGroup(("Linear",), FP8, STATIC, FLOAT)], ignore=[])
    del config["config_groups"]["group_0"]["format"]
    assert CompressedTensorsConfig(config).groups[0].form == FLOAT
    config["format"] = "mixed-precision"
    assert CompressedTensorsConfig(config).groups[0].form == FLOAT


def test_reading_each_layout_next_to_the_others(tmp_path):
    groups = [
        ConfigGroup(("Linear",), W4),
        ConfigGroup(("b.x",), W8, TOKEN, INT),
        ConfigGroup(("c.x",), FP8, STATIC, FLOAT),
    ]
    weights = {"a.x": (W4, PACK), "b.x": (W8, INT), "c.x": (FP8, FLOAT)}
    aside = {"c.x.input_scale": torch.ones(1), "c.k_scale": torch.ones(1), "norm.weight": torch.ones(8)}
    checkpoint = packed(tmp_path / "a", groups, weights, aside=aside)
    state = dequantize_state(checkpoint)
    assert sorted(state) == ["a.x.weight", "b.x.weight", "c.x.weight", "norm.weight"]
    assert all(state[f"{name}.x.weight"].shape == (8, 32) for name in "abc")
    scale = checkpoint.load("c.x.weight_scale")
    assert torch.equal(state["c.x.weight"], checkpoint.load("c.x.weight").float() * scale)
    reader = CompressedTensorsReader(checkpoint)
    slots = [reader.header(info) for info in checkpoint.tensors.values()]
    assert {slot[0]: slot[1:] for slot in slots if slot} == {
        name: ("F32", tuple(tensor.shape)) for name, tensor in state.items()
    }


def test_class_names_are_distinguished_by_their_tensors(tmp_path):
    groups = [ConfigGroup(("Linear",), W4, TOKEN, INT), ConfigGroup(("Embedding",), W8, None, NAIVE)]
    checkpoint = packed(tmp_path / "a", groups, {"embed": (W8, NAIVE), "a.x": (W4, INT)})
    codes, scale = checkpoint.load("embed.weight").float(), checkpoint.load("embed.weight_scale")
    assert torch.equal(dequantize_state(checkpoint)["embed.weight"], codes * scale)
    assert dequantize_state(checkpoint)["a.x.weight"].shape == (8, 32)


@pytest.mark.parametrize("leaf", ["weight_scale", "weight_shape"])
def test_a_missing_tensor_is_named(leaf, tmp_path):
    checkpoint = packed(tmp_path / "a", [ConfigGroup(("Linear",), W4)], {"a.x": (W4, PACK)})
    del checkpoint.tensors[f"a.x.{leaf}"]
    with pytest.raises(CheckpointError, match=rf"a.x.{leaf} is missing"):
        dequantize_state(checkpoint)


@pytest.mark.parametrize("rule", [WeightRule("int", 8, "group", 16), WeightRule("int", 4, "group", 32)])
def test_a_config_that_does_not_fit_its_tensors_is_refused(rule, tmp_path):
    checkpoint = packed(tmp_path / "a", [ConfigGroup(("Linear",), rule)], {"a.x": (W4, PACK)})
    with pytest.raises(CheckpointError, match=r"tensors of a.x do not fit"):
        dequantize_state(checkpoint)


def test_groups_without_weights_are_refused(tmp_path):
    config = quantization_config([ConfigGroup(("Linear",), W4)], ignore=[])
    config["config_groups"]["group_0"]["weights"] = None
    with pytest.raises(CheckpointError, match="quantizes no weights"):
        CompressedTensorsReader(packed(tmp_path / "a", config, {"a.x": (W4, PACK)}))


@pytest.mark.parametrize("leaf", ["weight_scale", "input_scale"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_scales_that_cannot_be_right(leaf, value, tmp_path):
    aside = {"a.x.input_scale": torch.ones(1)}
    groups = [ConfigGroup(("Linear",), FP8, STATIC, FLOAT)]
    checkpoint = packed(tmp_path / "a", groups, {"a.x": (FP8, FLOAT)}, aside=aside)
    CompressedTensorsReader(checkpoint).check("a.x.weight")
    from safetensors.torch import load_file

    tensors = load_file(checkpoint.path / "model.safetensors")
    tensors[f"a.x.{leaf}"].fill_(value)
    save_file(tensors, checkpoint.path / "model.safetensors")
    with pytest.raises(NumericsError, match="zero, negative or infinite"):
        CompressedTensorsReader(open_checkpoint(checkpoint.path)).check("a.x.weight")


@pytest.mark.parametrize(("value", "allowed"), [(-0.5, True), (0.0, False), (float("nan"), False)])
def test_scales_of_packed_codes_may_be_negative(value, allowed, tmp_path):
    checkpoint = packed(tmp_path / "a", [ConfigGroup(("Linear",), W4, None, PACK)], {"a.x": (W4, PACK)})
    from safetensors.torch import load_file

    tensors = load_file(checkpoint.path / "model.safetensors")
    tensors["a.x.weight_scale"].fill_(value)
    save_file(tensors, checkpoint.path / "model.safetensors")
    with nullcontext() if allowed else pytest.raises(NumericsError, match="zero, negative or infinite"):
        CompressedTensorsReader(open_checkpoint(checkpoint.path)).check("a.x.weight_packed")


@pytest.mark.parametrize(("rule", "form"), [(W4, PACK), (W8, INT), (FP8, FLOAT)])
def test_constant_codes_are_refused(rule, form, tmp_path):
    groups = [ConfigGroup(("Linear",), rule, None, form)]
    checkpoint = packed(tmp_path / "a", groups, {"a.x": (rule, form)})
    name = "a.x.weight_packed" if form == PACK else "a.x.weight"
    CompressedTensorsReader(checkpoint).check(name)
    from safetensors.torch import load_file

    tensors = load_file(checkpoint.path / "model.safetensors")
    wide = torch.ones_like(tensors[name].view(torch.uint8).repeat(1, 4)).view(tensors[name].dtype)
    tensors[name] = wide
    if form == PACK:
        tensors["a.x.weight_shape"] = torch.tensor([8, 128])
        tensors["a.x.weight_scale"] = tensors["a.x.weight_scale"].repeat(1, 4)
    save_file(tensors, checkpoint.path / "model.safetensors")
    with pytest.raises(NumericsError, match=r"a.x: nearly all codes are the same"):
        CompressedTensorsReader(open_checkpoint(checkpoint.path)).check(name)
    tensors["a.x.weight_scale"] = torch.ones_like(tensors["a.x.weight_scale"])  # a weight that is all zero
    save_file(tensors, checkpoint.path / "model.safetensors")
    CompressedTensorsReader(open_checkpoint(checkpoint.path)).check(name)
