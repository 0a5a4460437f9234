"""Four-bit floating point, e2m1: NVFP4 (groups of 16, e4m3 scales under a global scale) and MXFP4 (groups of
32, power-of-two scales).

Open Compute Project 2023, "OCP Microscaling Formats (MX) Specification v1.0", sections 5.2 to 6.3; NVIDIA
2025, "Pretraining Large Language Models with NVFP4", arXiv 2509.25149, section 2. Both as compressed-tensors
stores and reads them.

    NVFP4:  a = 448 * 6 / max|W| ,  t = e4m3(a * max|w| / d) ,  s = t / a ,  d = 6 or 4
    MXFP4:  e = floor(log2(1.001b rounding of max|w|)) - 2 ,    s = 2^e
    w' = s * F[q]

Letters: a global scale of the whole weight W; t stored scale of a group of weights w; s scale as the reader
computes it; d level of a group's largest magnitude; e exponent of a group; F the eight magnitudes 0 .5 1 1.5
2 3 4 6; q code 0 to 15: bit 3 the sign, bits 0 to 2 the index in F.

Of d = 6 and d = 4 a group takes the one of less squared error ("four over six", Cook, Guo, Xiao, Lin, Han
2025, arXiv 2512.02010): no level lies between 4 and 6, and under d = 4 no weight is there.

Differs from that paper: a is the same as without d = 4, so that every tool computes it alike, and the few
groups near max|W| keep d = 6; the paper takes 256 for 448.

Differs from the MX specification: the exponent is compressed-tensors' (formats/coded.mx_exponent). Halves
round to the even code. Where every weight of a group is zero its scale is 1 (MXFP4), and exponents stay in
-126 to 127.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from attar.formats.coded import MX_BIAS, level_fp4, mx_exponent, nearest_fp4
from attar.kernels.columns import CodeBook
from attar.quantization.grids.grid import Grid, TileParameters
from attar.quantization.grids.scales import squared_error

LARGEST = 6.0
FOUR = LARGEST / 4.0  # factor on a group's range under which its largest magnitude is 4
E4M3_LARGEST = 448.0
E4M3_SMALLEST = 2.0**-9


class _FP4Grid(Grid):
    """e2m1 codes, 0 to 15."""

    @property
    def code_dtype(self) -> torch.dtype:
        """Unsigned bytes."""
        return torch.uint8

    def code_book(self) -> CodeBook:
        """e2m1."""
        return CodeBook(0, 15, numbers="e2m1")

    def nearest(self, values: Tensor) -> Tensor:
        """Codes 0 to 15, halves to even."""
        return nearest_fp4(values)

    def level(self, codes: Tensor) -> Tensor:
        """e2m1 values."""
        return level_fp4(codes)


@dataclass(frozen=True)
class NVFP4Grid(_FP4Grid):
    """w = s * F[q], groups of 16; s = t / a with t in e4m3.

    ``TileParameters.stored`` holds "global_scale", a, float32 (1,), and "local_scale", t, float8_e4m3fn
    (N, K / 16).

    Attributes:
        storage: the type in which a reader gets the decoded weight; no scale is stored in it.
        peak: largest magnitude of all weights with the same global scale (engines fuse q, k, v and gate,
            up); 0: of this weight alone.
    """

    reach = 1.6  # beyond FOUR, which may be rounded up

    storage: torch.dtype = torch.float32
    peak: float = 0.0
    group_size: int = field(default=16, init=False)
    rows: int = field(default=1, init=False)

    def bits_per_weight(self, shape: tuple[int, int]) -> float:
        """Stored bits of a weight: codes, e4m3 scales and the global scale."""
        tiles_down, tiles_across = self.tiles(shape)
        return 4 + (8 * tiles_down * tiles_across + 32) / (shape[0] * shape[1])

    def choose(
        self, weight: Tensor, shrink: float | Tensor | None = None, importance: Tensor | None = None
    ) -> TileParameters:
        """The global scale from the largest magnitude, then each group's; ``shrink`` acts on the groups alone
        (None: :meth:`own_shrink`). A group of zeros gets t = 1/8."""
        if shrink is None:
            shrink = self.own_shrink(weight, importance)
        top = self.tile(weight).abs().amax((1, 3))
        peak = top.max() if self.peak == 0 else top.new_tensor(self.peak)
        global_scale = E4M3_LARGEST * LARGEST / peak.clamp(min=torch.finfo(torch.float32).tiny)
        global_scale = torch.nan_to_num(global_scale, nan=1.0, posinf=1.0).reshape(1)
        local = (global_scale * (top * shrink / LARGEST)).clamp(max=E4M3_LARGEST).to(torch.float8_e4m3fn)
        least = torch.where(top > 0, E4M3_SMALLEST, 0.125)  # a small group keeps what it can
        local = torch.where(local.float() == 0, least, local.float())
        stored = {"global_scale": global_scale, "local_scale": local.to(torch.float8_e4m3fn)}
        return TileParameters(local / global_scale, stored=stored)

    def own_shrink(self, weight: Tensor, importance: Tensor | None = None) -> Tensor:
        """1 for d = 6 and 1.5 for d = 4 (P, G), by squared error."""
        six, four = (
            squared_error(weight, self, self.choose(weight, shrink), importance) for shrink in (1.0, FOUR)
        )
        return torch.where(four < six, FOUR, 1.0)

    @property
    def magnitude(self) -> float:
        """The peak: beyond it scales end."""
        return self.peak or LARGEST

    def shared_with(self, parameters: TileParameters) -> NVFP4Grid:
        """With the peak of their global scale."""
        return replace(self, peak=E4M3_LARGEST * LARGEST / float(parameters.stored["global_scale"]))


@dataclass(frozen=True)
class MXFP4Grid(_FP4Grid):
    """w = 2^e * F[q], groups of 32.

    ``TileParameters.stored`` holds "exponent", e + 127, uint8 (N, K / 32).

    Attributes:
        storage: the type in which a reader gets the decoded weight; no scale is stored in it.
    """

    storage: torch.dtype = torch.float32
    group_size: int = field(default=32, init=False)
    rows: int = field(default=1, init=False)

    def bits_per_weight(self, shape: tuple[int, int]) -> float:
        """Stored bits of a weight: codes and exponents."""
        tiles_down, tiles_across = self.tiles(shape)
        return 4 + 8 * tiles_down * tiles_across / (shape[0] * shape[1])

    def choose(
        self, weight: Tensor, shrink: float | Tensor = 1.0, importance: Tensor | None = None
    ) -> TileParameters:
        """The exponent of each group from the largest magnitude of its weights."""
        return mx_parameters(self.tile(weight).abs().amax((1, 3)) * shrink, LARGEST)

    @property
    def magnitude(self) -> float:
        """Between 7/8 and 7/4, which end at other exponents."""
        return MX_MAGNITUDE


MX_MAGNITUDE = 1.25


def mx_parameters(top: Tensor, largest: float) -> TileParameters:
    """The scales 2^e of groups with these largest magnitudes (P, G), and e + 127 as "exponent".

    Args:
        largest: magnitude of a code.
    """
    exponent = mx_exponent(top, largest).clamp(min=1 - MX_BIAS)  # smaller scales are subnormal
    exponent = torch.where(top > 0, exponent, torch.zeros_like(exponent))
    stored = {"exponent": (exponent + MX_BIAS).to(torch.uint8)}
    return TileParameters(torch.exp2(exponent.float()), stored=stored)
