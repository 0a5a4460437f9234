"""Every key of a ``quantization_config`` that attar writes is read: another value makes another weight, or is
refused. Keys that it passes over stand here, with the reason. And how other writers spell the same."""

import copy
import json

import pytest
import torch

from attar.checkpoint import open_checkpoint
from attar.errors import AttarError
from attar.formats import awq, compressed_tensors, gptq, layouts, modelopt
from attar.formats.compressed_tensors import ConfigGroup
from attar.formats.readers import Decoded, reader
from attar.formats.rules import INT, PACK, ActivationRule
from tests.formats.integer_weights import folder, random_coded, rule

MODULE = "model.layers.0.self_attn.q_proj"
WEIGHT = f"{MODULE}.weight"
PLAIN, ASYMMETRIC = rule(4, 16), rule(4, 16, symmetric=False)
ROWS = rule(8, 0)
GROUP = ConfigGroup(("Linear",), PLAIN, None, PACK)
INPUTS = ActivationRule("int", 8, "token")


def of_compressed(weights, form=PACK, inputs=None):
    group = ConfigGroup(("Linear",), weights, inputs, form)
    config = compressed_tensors.quantization_config([group], ignore=["lm_head"])
    return config, layouts.encode(random_coded(weights), weights, form, torch.bfloat16)


FORMATS = {
    "gptq": lambda: (gptq.quantization_config({MODULE: PLAIN}), gptq.encode(random_coded(PLAIN), PLAIN)),
    "gptq_v2": lambda: (
        gptq.quantization_config({MODULE: ASYMMETRIC, "other": rule(8, 16)}, ignore=["lm_head", "third"]),
        gptq.encode(random_coded(ASYMMETRIC), ASYMMETRIC, "gptq_v2"),
    ),
    "awq": lambda: (
        awq.quantization_config({MODULE: ASYMMETRIC}, ignore=["lm_head", "third"]),
        awq.encode(random_coded(ASYMMETRIC), ASYMMETRIC),
    ),
    "pack": lambda: of_compressed(PLAIN),
    "pack asymmetric": lambda: of_compressed(ASYMMETRIC),
    "int": lambda: of_compressed(ROWS, INT, INPUTS),
}
PASSED_OVER = {
    "desc_act": "g_idx has the groups",
    "sym": "zero points are stored",
    "lm_head": "the head's tensors are codes, or not",
    "symmetric": "older files of symmetric weights have zero points, too; asymmetric ones need them",
    "zero_point": "zero points are stored",
    "modules_to_not_convert": "a module's tensors are codes, or not",
    "modules_in_block_to_quantize": "a module's tensors are codes, or not",
    "dynamic": "of another module",
    "ignore": "a module's tensors are codes, or not",
    "targets": "the only group is taken where its layout fits",
    "quantization_status": "the tensors are codes, or not",
    "dequantize": "how transformers loads it",
    "dynamic of weights": "weights are stored, so their scales are",
    "format": "of the whole file; the group's own is read",
}


def paths(value, path=()):
    """The path of every value in a config."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from paths(item, (*path, key))
    else:
        yield path


def changed(config, path, value):
    result = copy.deepcopy(config)
    inner = result
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return result


def others(value):
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [2 * value, value + 1, 0.5, "many"]
    return ["other"] if isinstance(value, str | type(None)) else [[]]


def stored(path, config, tensors):
    folder(path, {f"{MODULE}.{leaf}": value for leaf, value in tensors.items()}, config)
    return path


def weight(path):
    """What is read of a folder: the weight, and how its inputs are rounded."""
    checkpoint = open_checkpoint(path)
    scheme = getattr(reader(checkpoint), "scheme", None)
    inputs = [group.activations for group in scheme.groups] if scheme else None
    return Decoded(checkpoint).load(WEIGHT).float(), inputs


def same(one, other):
    return torch.equal(one[0], other[0]) and one[1] == other[1]


def differs(before, path, config, tensors):
    """Whether a config makes another weight, or is refused in one line."""
    try:
        return not same(before, weight(stored(path, config, tensors)))
    except AttarError as error:
        assert "\n" not in error.message
        return True


@pytest.mark.parametrize("form", FORMATS)
def test_every_key_is_read(form, tmp_path):
    config, tensors = FORMATS[form]()
    before = weight(stored(tmp_path, config, tensors))
    silent = set()
    for path in paths(config):
        value = config
        for key in path:
            value = value[key]
        name = path[-1] if path[-2:-1] != ("weights",) or path[-1] != "dynamic" else "dynamic of weights"
        name = path[0] if path[0] == "dynamic" else name
        if not any(
            differs(before, tmp_path, changed(config, path, other), tensors) for other in others(value)
        ):
            silent.add(name)
    assert silent <= PASSED_OVER.keys()


SPELLINGS = [
    ("gptq", {"bits": "4", "group_size": "16"}),
    ("gptq", {"bits": 4.0, "group_size": 16.0}),
    ("gptq", {"bits": None, "w_bit": 4, "group_size": None, "q_group_size": 16}),
    ("gptq", {"bits": None, "wbits": 4, "group_size": None, "groupsize": 16}),
    ("gptq", {"checkpoint_format": None, "sym": None}),
    ("gptq", {"checkpoint_format": "GPTQ", "pack_dtype": "torch.int32", "desc_act": None}),
    ("gptq", {"dynamic": {"+:.*q_proj": {"bits": "4"}, "-:.*k_proj": {}}}),
    ("awq", {"version": "GEMM", "bits": None, "w_bit": 4}),
    ("awq", {"version": None, "group_size": None, "q_group_size": "16", "zero_point": None}),
    ("pack", {"sparsity_config": {}, "kv_cache_scheme": None, "transform_config": {}, "version": "0.12"}),
    ("pack", {"ignore": ["re:.*lm_head", "re:vision.*"], "global_compression_ratio": 1.5}),
]


@pytest.mark.parametrize(("form", "changes"), SPELLINGS)
def test_spellings_of_other_writers(form, changes, tmp_path):
    config, tensors = FORMATS[form]()
    before = weight(stored(tmp_path / "a", config, tensors))
    assert same(before, weight(stored(tmp_path / "b", {**config, **changes}, tensors)))


@pytest.mark.parametrize(
    ("form", "changes", "key"),
    [
        ("gptq", {"bits": "four"}, "bits is 'four'"),
        ("gptq", {"bits": True}, "bits is True"),
        ("gptq", {"pack_dtype": "int64"}, "pack_dtype is 'int64'"),
        ("gptq", {"dynamic": ["x"]}, "dynamic is"),
        ("gptq", {"dynamic": {"+:.*": 4}}, "dynamic of"),
        ("awq", {"version": "gemv"}, "layout 'gemv'"),
        ("awq", {"group_size": None}, "group_size is None"),
        ("pack", {"config_groups": [1]}, "config_groups is"),
        ("pack", {"ignore": "lm_head"}, "ignore is 'lm_head'"),
        ("pack", {"kv_cache_scheme": "fp8"}, "kv_cache_scheme is 'fp8'"),
        ("pack", {"quant_method": None}, "quant_method"),
    ],
)
def test_what_makes_no_sense_is_refused_by_key(form, changes, key, tmp_path):
    config, tensors = FORMATS[form]()
    with pytest.raises(AttarError) as error:
        weight(stored(tmp_path, {**config, **changes}, tensors))
    assert key in error.value.message and "\n" not in error.value.message


def test_modelopts_own_file_alone(tmp_path):
    tensors = {"weight": torch.randn(16, 16).to(torch.float8_e4m3fn), "weight_scale": torch.tensor(0.5)}
    older = modelopt.hf_quant_config({MODULE: "FP8"}, ["lm_head"], kv_cache=False)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(older))
    stored(tmp_path, None, tensors)
    decoded = Decoded(open_checkpoint(tmp_path)).load(WEIGHT)
    assert torch.equal(decoded.float(), tensors["weight"].float() * 0.5)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": "FP8"}))
    with pytest.raises(AttarError, match=r"hf_quant_config.json: quantization is 'FP8'"):
        Decoded(open_checkpoint(tmp_path))
