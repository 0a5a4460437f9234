"""NF4 files: announced shapes, a decoder made of loops, what is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from attar.checkpoint import open_checkpoint
from attar.checkpoint.tensors import stored_dtype
from attar.errors import CheckpointError, ModelError, NumericsError
from attar.formats.bitsandbytes import STATE, Reader, decode, encode, layout, read_state
from attar.formats.readers import reader
from attar.models.load import load_model
from attar.quantization.grids.nf4 import LEVELS, NF4Grid
from attar.quantization.rtn import rtn
from tests.quantization.packing import pack, save


def made(double, shape=(6, 128)):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    found = rtn(weight, NF4Grid(64, double, torch.bfloat16))
    nested = found.parameters.stored if double else None
    levels = torch.tensor(LEVELS)
    return found, encode(found.codes, found.parameters.scale, levels, torch.bfloat16, nested)


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
    found, tensors = made(double)
    assert torch.equal(decode(tensors), by_loops(tensors))
    assert torch.equal(decode(tensors).float(), found.dequantize())
    assert layout((6, 128), 64, torch.bfloat16, double) == {
        name: (stored_dtype(value.dtype), tuple(value.shape)) for name, value in tensors.items()
    }


@pytest.mark.parametrize("offset", [0.0, 1.0, 1e-7, 0.012345678359270096, 1.2345678e-05, 123456.789])
def test_the_state_has_the_announced_length_whatever_the_offset(offset):
    found, _ = made(True)
    nested = {**found.parameters.stored, "nested_offset": torch.tensor([offset])}
    tensors = encode(found.codes, found.parameters.scale, torch.tensor(LEVELS), torch.bfloat16, nested)
    assert tensors[STATE].shape == layout((6, 128), 64, torch.bfloat16, True)[STATE][1]
    assert read_state(tensors[STATE])["nested_offset"] == torch.tensor(offset).item()


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


@pytest.mark.parametrize(
    ("leaf", "value", "match"),
    [(".absmax", float("inf"), "infinite scales"), (".absmax", 0.0, "zero"), ("", 0x77, "the same")],
)
def test_degenerate_layers(leaf, value, match, tmp_path):
    _, good = pack(save(tmp_path / "dense"), tmp_path / "out", scheme="NF4")
    Reader(good).check(NAME)
    bad = change(good.path, lambda tensors: tensors[NAME + leaf].fill_(value))
    with pytest.raises(NumericsError, match=match):
        Reader(bad).check(NAME)


def test_other_layouts_are_refused(tmp_path):
    checkpoint = open_checkpoint(save(tmp_path / "dense"))
    checkpoint.config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    with pytest.raises(CheckpointError, match="NF4 alone"):
        reader(checkpoint)
    checkpoint.config["quantization_config"] = {"quant_method": "awq"}
    with pytest.raises(ModelError, match="quantized with 'awq'"):
        reader(checkpoint)
