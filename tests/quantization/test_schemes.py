"""Presets: what each name means, and the grid it stands for."""

import subprocess
import sys

import pytest
import torch

from attar.formats.rules import ActivationRule
from attar.quantization.grids import IntGrid
from attar.quantization.grids.float8 import Float8Grid, MXFP8Grid
from attar.quantization.grids.fp4 import MXFP4Grid, NVFP4Grid
from attar.quantization.grids.nf4 import NF4Grid
from attar.quantization.schemes import KV_CACHES, SCHEMES

F = torch.float16
GRIDS = {
    **{f"W{bits}A16": IntGrid(bits, 128, True, F) for bits in (2, 3, 4, 5, 6, 8)},
    "W4A16_ASYM": IntGrid(4, 128, False, F),
    "W8A8": IntGrid(8, 0, True, F),
    "INT8": IntGrid(8, 0, True, F),
    "W8A8_STATIC": IntGrid(8, 0, True, F),
    "W4A8": IntGrid(4, 128, True, F),
    "W4AFP8": IntGrid(4, 128, True, F),
    "FP8": Float8Grid("e4m3fn", 0, 0, F),
    "FP8_DYNAMIC": Float8Grid("e4m3fn", 0, 1, F),
    "FP8_BLOCK": Float8Grid("e4m3fn", 128, 128, F),
    **dict.fromkeys(("NVFP4", "NVFP4A16"), NVFP4Grid(torch.bfloat16)),
    **dict.fromkeys(("MXFP4", "MXFP4A16"), MXFP4Grid(torch.bfloat16)),
    "MXFP8": MXFP8Grid(storage=torch.bfloat16),
    "NF4": NF4Grid(64, False, F),
}


@pytest.mark.parametrize("name", SCHEMES)
def test_grids(name):
    assert SCHEMES[name].grid(F) == GRIDS[name]
    assert type(SCHEMES[name].grid(F)) is type(GRIDS[name])


@pytest.mark.parametrize("name", SCHEMES)
def test_grids_and_rules_agree_on_the_tiles(name):
    for shape in ((256, 384), (200, 128)):
        assert SCHEMES[name].grid(F).tiles(shape) == SCHEMES[name].weights.tiles(shape)


def test_group_sizes_are_a_setting_of_integer_groups_alone():
    assert SCHEMES["W4A16"].grid(F, 32) == IntGrid(4, 32, True, F)
    assert SCHEMES["W4A16"].grid(F, 0) == IntGrid(4, 0, True, F)
    assert SCHEMES["W4A16"].sized(0).weights.strategy == "channel"
    for name in ("W8A8", "FP8_BLOCK", "NVFP4A16", "MXFP4A16", "NF4"):
        assert SCHEMES[name].sized(32) is SCHEMES[name]


def test_activations():
    assert SCHEMES["W4A16"].activations is None
    assert SCHEMES["W8A8"].activations == ActivationRule("int", 8, "token")
    assert SCHEMES["W8A8_STATIC"].activations == ActivationRule("int", 8, "tensor", dynamic=False)
    assert SCHEMES["FP8_BLOCK"].activations == ActivationRule("float", 8, "group", group_size=128)
    assert [name for name, scheme in SCHEMES.items() if scheme.activations and scheme.activations.static] == [
        "W8A8_STATIC",
        "FP8",
        "NVFP4",
    ]
    assert KV_CACHES["none"] is None and not KV_CACHES["fp8"].dynamic and KV_CACHES["int8"].dynamic


def test_names_need_no_torch():
    code = "import sys, attar.quantization.schemes; print('torch' in sys.modules)"
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert got.strip() == "False"
