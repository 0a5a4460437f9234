"""NF4 and INT8 files: announced shapes, decoders made of loops, what is refused."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from attar.checkpoint import open_checkpoint
from attar.checkpoint.tensors import stored_dtype
from attar.errors import CheckpointError, ModelError, NumericsError
from attar.formats import bitsandbytes
from attar.formats.bitsandbytes import (
    STATE,
    BitsAndBytesReader,
    decode_nf4,
    encode_nf4,
    layout_nf4,
    read_state,
)
from attar.formats.coded import Coded
from attar.formats.readers import reader
from attar.formats.rules import WeightRule
from attar.models.loading.load import load_model
from attar.quantization.grids import IntGrid
from attar.quantization.grids.nf4 import LEVELS, NF4Grid
from attar.quantization.methods.rtn import rtn
from tests.quantization.packing import pack, save


def encoded_codes(double, shape=(6, 128)):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    quantized = rtn(weight, NF4Grid(64, double, torch.bfloat16))
    nested = quantized.parameters.stored if double else None
    levels = torch.tensor(LEVELS)
    return quantized, encode_nf4(quantized.codes, quantized.parameters.scale, levels, torch.bfloat16, nested)


def by_loops(tensors):
    state = json.loads(bytes(tensors[STATE].tolist()))
    rows, columns = state["shape"]
    weight = torch.zeros(rows, columns)
    for index in range(rows * columns):
        byte = int(tensors["weight"][index // 2, 0])
        level = tensors["weight.quant_map"][byte >> 4 if index % 2 == 0 else byte & 15]
        block = index // state["blocksize"]
        scale = tensors["weight.absmax"][block]
        if "weight.nested_absmax" in tensors:
            above = tensors["weight.nested_absmax"][block // state["nested_blocksize"]]
            scale = tensors["weight.nested_quant_map"][int(scale)] * above + state["nested_offset"]
        weight[index // columns, index % columns] = level * scale
    return weight.to(getattr(torch, state["dtype"]))


@pytest.mark.parametrize("double", [False, True])
def test_decoding_agrees_with_loops_over_the_description(double):
    actual, tensors = encoded_codes(double)
    assert torch.equal(decode_nf4(tensors), by_loops(tensors))
    assert torch.equal(decode_nf4(tensors).float(), actual.dequantize())
    assert layout_nf4((6, 128), 64, torch.bfloat16, double) == {
        name: (stored_dtype(value.dtype), tuple(value.shape)) for name, value in tensors.items()
    }


@pytest.mark.parametrize("offset", [0.0, 1.0, 1e-7, 0.012345678359270096, 1.2345678e-05, 123456.789])
def test_the_state_has_the_announced_length_whatever_the_offset(offset):
    actual, _ = encoded_codes(True)
    nested = {**actual.parameters.stored, "nested_offset": torch.tensor([offset])}
    tensors = encode_nf4(actual.codes, actual.parameters.scale, torch.tensor(LEVELS), torch.bfloat16, nested)
    assert tensors[STATE].shape == layout_nf4((6, 128), 64, torch.bfloat16, True)[STATE][1]
    assert read_state(tensors[STATE])["nested_offset"] == torch.tensor(offset).item()


@pytest.mark.few(1)
@pytest.mark.parametrize("double", [False, True])
def test_checkpoints_are_read_without_the_library(double, tmp_path):
    chosen, checkpoint = pack(save(tmp_path / "dense"), tmp_path / "out", scheme="NF4", double_quant=double)
    assert checkpoint.config["quantization_config"]["bnb_4bit_use_double_quant"] is double
    assert "lm_head" in checkpoint.config["quantization_config"]["llm_int8_skip_modules"]
    weight = load_model(checkpoint).model.layers[0].mlp.up_proj.weight
    stored = {
        name.removeprefix("model.layers.0.mlp.up_proj."): checkpoint.load(name)
        for name in checkpoint.tensors
        if name.startswith("model.layers.0.mlp.up_proj.")
    }
    assert torch.equal(weight, by_loops(stored))
    assert len(chosen.sites) == 21


def change(folder, alter):
    tensors = load_file(folder / "model.safetensors")
    alter(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return open_checkpoint(folder)


NAME = "model.layers.1.mlp.down_proj.weight"


def test_damage_is_named(tmp_path):
    _, good = pack(save(tmp_path / "dense"), tmp_path / "out", scheme="NF4")
    state = f"{NAME}.quant_state.bitsandbytes__nf4"
    before = load_file(good.path / "model.safetensors")
    for alter, match in (
        (lambda tensors: tensors.pop(state), "quant_state.bitsandbytes__nf4 is missing"),
        (lambda tensors: tensors.pop(f"{NAME}.quant_map"), "do not fit together"),
        (lambda tensors: tensors.update({state: torch.zeros(8, dtype=torch.uint8)}), "is damaged"),
        (lambda tensors: tensors.update({f"{NAME}.absmax": torch.ones(3)}), "do not fit together"),
    ):
        with pytest.raises(CheckpointError, match=match):
            load_model(change(good.path, alter))
        save_file(before, good.path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("leaf", "value", "match"),
    [(".absmax", float("inf"), "infinite scales"), (".absmax", 0.0, "zero"), ("", 0x77, "the same")],
)
def test_degenerate_layers(leaf, value, match, tmp_path):
    _, good = pack(save(tmp_path / "dense"), tmp_path / "out", scheme="NF4")
    BitsAndBytesReader(good).check(NAME)
    bad = change(good.path, lambda tensors: tensors[NAME + leaf].fill_(value))
    with pytest.raises(NumericsError, match=match):
        BitsAndBytesReader(bad).check(NAME)


def test_other_layouts_are_refused(tmp_path):
    checkpoint = open_checkpoint(save(tmp_path / "dense"))
    checkpoint.config["quantization_config"] = {"quant_method": "bitsandbytes"}
    with pytest.raises(CheckpointError, match="neither load_in_4bit nor load_in_8bit"):
        reader(checkpoint)


def whole(shape=(6, 40), dtype=torch.bfloat16, seed=2):
    """A weight on the grid of W8A8."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    quantized = rtn(weight, IntGrid(8, 0, storage=dtype))
    return quantized, Coded(quantized.codes, quantized.parameters.scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_int8_decodes_to_what_the_codes_were_made_for(dtype):
    actual, coded = whole(dtype=dtype)
    tensors = bitsandbytes.encode_int8(coded)
    assert bitsandbytes.layout_int8((6, 40)) == {
        name: (stored_dtype(value.dtype), tuple(value.shape)) for name, value in tensors.items()
    }
    assert torch.equal(tensors["weight"], actual.codes)
    assert torch.equal(bitsandbytes.decode_int8(tensors, dtype).float(), actual.dequantize())
    for n in range(6):
        for k in range(40):
            wanted = int(tensors["weight"][n, k]) * (float(tensors["SCB"][n]) / 127)
            assert float(bitsandbytes.decode_int8(tensors, torch.float32)[n, k]) == pytest.approx(
                wanted, rel=1e-6
            )
    again = bitsandbytes.unpack_int8(tensors)
    assert torch.equal(again.scale, coded.scale) and torch.equal(again.codes, coded.codes)


def test_int8_of_one_scale_repeats_it():
    codes = torch.tensor([[-128, 127], [5, 0]], dtype=torch.int8)
    tensors = bitsandbytes.encode_int8(Coded(codes, torch.tensor([[0.5]])))
    assert tensors["SCB"].tolist() == [63.5, 63.5]
    assert bitsandbytes.decode_int8(tensors, torch.float32).tolist() == [[-64.0, 63.5], [2.5, 0.0]]


def test_int8_refuses_what_it_cannot_hold():
    _, coded = whole()
    for bad in (
        replace(coded, zero=torch.zeros_like(coded.scale)),
        replace(coded, scale=coded.scale.expand(6, 2)),
        replace(coded, g_idx=torch.zeros(40, dtype=torch.int64)),
        replace(coded, codes=coded.codes.to(torch.float8_e4m3fn)),
    ):
        with pytest.raises(ModelError, match="one scale for each output"):
            bitsandbytes.encode_int8(bad)
    for good in (WeightRule("int", 8, "channel"), WeightRule("int", 4, "channel"), bitsandbytes.INT8_RULE):
        bitsandbytes.refuse_int8(good)
    for rule in (
        WeightRule("int", 8, "channel", symmetric=False),
        WeightRule("int", 4, "group", 128),
        WeightRule("float", 8, "channel"),
        WeightRule("int", 8, "block", block=(128, 128)),
    ):
        with pytest.raises(ModelError, match="one scale for each output"):
            bitsandbytes.refuse_int8(rule)


def save_int8(folder, family="llama3"):
    """An INT8 checkpoint with the head left dense."""
    checkpoint = open_checkpoint(save(folder, family))
    linears = [name for name in checkpoint.tensors if "proj.weight" in name]
    tensors = {name: checkpoint.load(name) for name in checkpoint.tensors}
    dense = {}
    for name in linears:
        weight = tensors.pop(name)
        quantized = rtn(weight, IntGrid(8, 0, storage=torch.bfloat16))
        dense[name] = quantized.dequantize().bfloat16()
        encoded_codes = bitsandbytes.encode_int8(Coded(quantized.codes, quantized.parameters.scale))
        tensors |= {f"{name.removesuffix('weight')}{leaf}": value for leaf, value in encoded_codes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {**checkpoint.config, "quantization_config": bitsandbytes.int8_config(["lm_head"])}
    (folder / "config.json").write_text(json.dumps(config))
    return open_checkpoint(folder), dense


def test_int8_checkpoints_are_read_without_the_library(tmp_path):
    checkpoint, dense = save_int8(tmp_path / "int8")
    read = reader(checkpoint)
    assert read.header(checkpoint.tensors[NAME]) == (NAME, "BF16", tuple(dense[NAME].shape))
    assert read.header(checkpoint.tensors[NAME.replace("weight", "SCB")]) is None
    coded, rule = read.codes(NAME)
    assert rule == bitsandbytes.INT8_RULE and coded.codes.dtype == torch.int8
    assert read.codes("model.norm.weight") is None and read.codes("lm_head.weight") is None
    state = load_model(checkpoint).state_dict()
    for name, weight in dense.items():
        read.check(name)
        assert torch.equal(state[name], weight), name
    assert read.decode("lm_head.weight").dtype == torch.bfloat16


def test_damaged_int8_is_named(tmp_path):
    folder = tmp_path / "int8"
    save_int8(folder)
    before = load_file(folder / "model.safetensors")
    scale, form = NAME.replace("weight", "SCB"), NAME.replace("weight", "weight_format")
    for alter in (
        lambda tensors: tensors.pop(scale),
        lambda tensors: tensors.update({scale: torch.ones(3)}),
        lambda tensors: tensors.update({form: torch.tensor(1, dtype=torch.uint8)}),
    ):
        with pytest.raises(CheckpointError, match=f"{NAME} do not fit together"):
            BitsAndBytesReader(change(folder, alter)).decode(NAME)
        save_file(before, folder / "model.safetensors", metadata={"format": "pt"})
    for name, value, match in (
        (scale, float("inf"), "infinite scales"),
        (scale, -1.0, "negative"),
        (NAME, 7, "the same"),
    ):
        bad = change(folder, lambda tensors, name=name, value=value: tensors[name].fill_(value))
        with pytest.raises(NumericsError, match=match):
            BitsAndBytesReader(bad).check(NAME)
        save_file(before, folder / "model.safetensors", metadata={"format": "pt"})
