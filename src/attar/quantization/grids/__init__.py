"""Grids: the values of a code, and how scale and zero are chosen. One file for each family of number formats,
independent of the rounding."""

from attar.quantization.grids.float8 import Float8Grid, MXFP8Grid
from attar.quantization.grids.fp4 import MXFP4Grid, NVFP4Grid
from attar.quantization.grids.ggml import GGML, GGMLGrid
from attar.quantization.grids.grid import Grid, QuantizedTensor, TileParameters
from attar.quantization.grids.integer import IntGrid
from attar.quantization.grids.nf4 import NF4Grid
from attar.quantization.grids.scales import choose_scales

__all__ = [
    "GGML",
    "Float8Grid",
    "GGMLGrid",
    "Grid",
    "IntGrid",
    "MXFP4Grid",
    "MXFP8Grid",
    "NF4Grid",
    "NVFP4Grid",
    "QuantizedTensor",
    "TileParameters",
    "choose_scales",
]
