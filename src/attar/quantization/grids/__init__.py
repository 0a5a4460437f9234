"""Grids: which values a code can take, and how its scale and zero are chosen. One file per family of number
formats; none of them knows how weights are rounded."""

from attar.quantization.grids.grid import Grid, Parameters, Quantized
from attar.quantization.grids.integer import IntGrid

__all__ = ["Grid", "IntGrid", "Parameters", "Quantized"]
