"""The packed layout: shapes announced, round trips, an independent decoder written with plain loops."""

import pytest
import torch

from attar.checkpoint import Checkpoint
from attar.checkpoint.tensors import stored_dtype
from attar.errors import CheckpointError
from attar.formats.compressed_tensors import (
    Integers,
    decode,
    dense_tensor,
    encode,
    encoded_layout,
    quantization_config,
)
from attar.quantization.grids import IntGrid
from attar.quantization.rtn import rtn


def by_loops(tensors, bits):
    """Decode one weight element by element from the format's description."""
    rows, columns = tensors["weight_shape"].tolist()
    scale, offset = tensors["weight_scale"], 2 ** (bits - 1)
    group = columns // scale.shape[1]

    def field(words, index):
        number = sum((int(word) & 0xFFFFFFFF) << (32 * place) for place, word in enumerate(words))
        return number >> (index * bits) & (2**bits - 1)

    weight = torch.zeros(rows, columns)
    for n in range(rows):
        for k in range(columns):
            code = field(tensors["weight_packed"][n], k) - offset
            if "weight_zero_point" in tensors:
                code -= field(tensors["weight_zero_point"][:, k // group], n) - offset
            weight[n, k] = code * float(scale[n, k // group])
    return weight.to(scale.dtype)


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [0, 16])
def test_agrees_with_a_decoder_made_of_loops(bits, symmetric, group):
    weight = torch.randn(6, 48, generator=torch.Generator().manual_seed(bits))
    made = rtn(weight, IntGrid(bits, group, symmetric, torch.bfloat16))
    tensors = encode(Integers(made.codes, made.parameters.scale, made.parameters.zero, bits), torch.bfloat16)
    assert torch.equal(decode(tensors, bits), by_loops(tensors, bits))
    assert torch.equal(decode(tensors, bits).float(), made.dequantize())
    announced = encoded_layout((6, 48), made.grid.groups(48), bits, "BF16", zero=not symmetric)
    assert announced == {
        name: (stored_dtype(value.dtype), tuple(value.shape)) for name, value in tensors.items()
    }


def test_tied_int8_heads_are_targets_and_not_ignored():
    config = quantization_config(
        bits=4, group_size=32, ignore=["lm_head"], embedding=True, tied_head="lm_head"
    )
    assert config["ignore"] == [] and config["format"] == "mixed-precision"
    assert config["config_groups"]["group_1"]["targets"] == ["Embedding", r"re:.*lm_head$"]
    untied = quantization_config(bits=4, group_size=32, ignore=["lm_head"], embedding=True)
    assert untied["ignore"] == ["lm_head"]


def test_a_missing_scale_is_named(tmp_path):
    config = {"quantization_config": quantization_config(bits=4, group_size=32, ignore=[])}
    half = Checkpoint(tmp_path, "half", config, None, dict.fromkeys(["a.weight_packed", "a.weight_shape"]))
    with pytest.raises(CheckpointError, match=r"a.weight_scale is missing"):
        dense_tensor(half, "a.weight_packed")
