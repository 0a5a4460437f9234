"""Eight-bit floating point: e4m3fn (largest value 448) and e5m2 (57344), per tensor, channel, group or block.

Micikevicius, Stosic, Burgess and others 2022, "FP8 Formats for Deep Learning", arXiv 2209.05433, section 3.

    s = max|w| / F ,   q = float8(clamp(w / s, -F, F)) ,   w' = s * q

Letters: s scale of a tile; F the largest finite value of the format; q the code, kept as a torch float8.

MXFP8 has groups of 32 with powers of two as scales, as MXFP4 (fp4.py).

Differs from the paper: the cast saturates for both formats, as inference engines do.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from attar.errors import SettingsError
from attar.kernels.columns import CodeBook
from attar.quantization.grids.fp4 import MX_MAGNITUDE, mx_parameters
from attar.quantization.grids.grid import Grid, TileParameters, stored_scale

KINDS = {"e4m3fn": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@dataclass(frozen=True)
class Float8Grid(Grid):
    """w = s * q, q a float8.

    Attributes:
        kind: "e4m3fn" or "e5m2".
        group_size: inputs that share a scale; 0: the whole row.
        rows: outputs that share a scale; 0: all. (1, 0) a channel, (0, 0) the tensor, (128, 128) a block.
        storage: the type in which scales are stored, compressed-tensors' ``weight_scale``; they are rounded
            to it before any code is chosen.

    Raises:
        SettingsError: no such kind.
    """

    kind: str = "e4m3fn"
    group_size: int = 0
    rows: int = 1
    storage: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise SettingsError("kind", self.kind, " or ".join(KINDS))

    @property
    def code_dtype(self) -> torch.dtype:
        """The float8 type."""
        return KINDS[self.kind]

    @property
    def largest(self) -> float:
        """F."""
        return float(torch.finfo(self.code_dtype).max)

    def code_book(self) -> CodeBook:
        """The float8 type."""
        return CodeBook(0, int(self.largest), numbers=self.kind)

    def bits_per_weight(self, shape: tuple[int, int]) -> float:
        """Stored bits of a weight: codes and scales."""
        tiles_down, tiles_across = self.tiles(shape)
        extra: int = self.storage.itemsize * 8 * tiles_down * tiles_across
        return 8 + extra / (shape[0] * shape[1])

    def choose(
        self, weight: Tensor, shrink: float | Tensor = 1.0, importance: Tensor | None = None
    ) -> TileParameters:
        """Scale of each tile from the largest magnitude of its weights."""
        top = self.tile(weight).abs().amax((1, 3)) * shrink
        return TileParameters(stored_scale(top / self.largest, self.storage))

    def rescaled(self, parameters: TileParameters, scale: Tensor) -> TileParameters | None:
        """Any positive scale, in the storage type."""
        return TileParameters(stored_scale(scale, self.storage), parameters.zero)

    def nearest(self, values: Tensor) -> Tensor:
        """torch's cast to the float8 type (half to even), saturating."""
        return values.clamp(-self.largest, self.largest).to(self.code_dtype).float()

    def level(self, codes: Tensor) -> Tensor:
        """The code itself."""
        return codes.float()


@dataclass(frozen=True)
class MXFP8Grid(Float8Grid):
    """w = 2^e * q, q an e4m3fn, groups of 32.

    ``TileParameters.stored`` holds "exponent", e + 127, uint8 (N, K / 32).

    Attributes:
        storage: the type in which a reader gets the decoded weight; no scale is stored in it.
    """

    kind: str = field(default="e4m3fn", init=False)
    group_size: int = field(default=32, init=False)
    rows: int = field(default=1, init=False)

    def bits_per_weight(self, shape: tuple[int, int]) -> float:
        """Stored bits of a weight: codes and exponents."""
        tiles_down, tiles_across = self.tiles(shape)
        return 8 + 8 * tiles_down * tiles_across / (shape[0] * shape[1])

    def choose(
        self, weight: Tensor, shrink: float | Tensor = 1.0, importance: Tensor | None = None
    ) -> TileParameters:
        """The exponent of each group from the largest magnitude of its weights."""
        return mx_parameters(self.tile(weight).abs().amax((1, 3)) * shrink, self.largest)

    @property
    def magnitude(self) -> float:
        """As of MXFP4."""
        return MX_MAGNITUDE

    def rescaled(self, parameters: TileParameters, scale: Tensor) -> TileParameters | None:
        """None: powers of two."""
        return None
