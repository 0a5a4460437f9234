"""llama.cpp's block formats as grids: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 (a scale for 32 weights), the k-quants
Q2_K to Q6_K (scales of 16 or 32 weights, themselves codes under a scale for 256), and the same two kinds of
scales over uneven levels: IQ4_NL and IQ4_XS.

Gerganov, Kawrakow and others, ggml, ``ggml-common.h``. There is no paper.

    w' = s * (q - h) - m ,    s = d * (c - k) ,   m = d_m * c_m        (k-quants)
                              s = d ,             m = -(stored min)     (Q4_0 to Q8_0)
    w' = s * T[q] ,           s = d * (c - k)  or  d                    (IQ4_XS, IQ4_NL)

Letters: q code, h the code of zero; s, m scale and minimum of a tile of 16 or 32 weights; c, c_m their codes
(4, 6 or 8 bits), k the code of zero among c; d, d_m float16, of a block of 32 or 256 weights; T sixteen
levels, none of them 0: a weight of 0 decodes to s.

How s and m are chosen is in ggml_search.py; the byte layout belongs to the file format.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from attar.errors import SettingsError
from attar.kernels import ggml_search as kernel
from attar.kernels.columns import CodeBook
from attar.quantization.grids.ggml_search import GGMLLayout, clipped, search, weights
from attar.quantization.grids.grid import Grid, QuantizedTensor, TileParameters

CHUNK = 1 << 18  # weights searched at a time: they stay in the cache

IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

LAYOUTS = {
    "Q4_0": GGMLLayout(18, 32, 32, 0, 15, 8, False),
    "Q4_1": GGMLLayout(20, 32, 32, 0, 15, 0, True),
    "Q5_0": GGMLLayout(22, 32, 32, 0, 31, 16, False),
    "Q5_1": GGMLLayout(24, 32, 32, 0, 31, 0, True),
    "Q8_0": GGMLLayout(34, 32, 32, -127, 127, 0, False),
    "Q2_K": GGMLLayout(84, 256, 16, 0, 3, 0, True, (0, 15)),
    "Q3_K": GGMLLayout(110, 256, 16, 0, 7, 4, False, (-32, 31), 32),
    "Q4_K": GGMLLayout(144, 256, 32, 0, 15, 0, True, (0, 63)),
    "Q5_K": GGMLLayout(176, 256, 32, 0, 31, 0, True, (0, 63)),
    "Q6_K": GGMLLayout(210, 256, 16, 0, 63, 32, False, (-128, 127)),
    "IQ4_NL": GGMLLayout(18, 32, 32, 0, 15, 0, False, levels=IQ4_LEVELS),
    "IQ4_XS": GGMLLayout(136, 256, 32, 0, 15, 0, False, (-32, 31), 32, IQ4_LEVELS),
}


@dataclass(frozen=True)
class GGMLGrid(Grid):
    """A block format of llama.cpp. A tile is a row's 16 or 32 inputs.

    ``TileParameters.stored`` holds what the file does: "d" float16 (N, K / block); with a minimum "dmin"
    (k-quants) or "m" (Q4_1, Q5_1), float16 of the same shape; for k-quants and IQ4_XS "scale_codes" (N, G),
    int8 for Q6_K and uint8 for the others, and with a minimum "minimum_codes" uint8 (N, G).

    Attributes:
        kind: a name of :data:`LAYOUTS`.
        storage: the type in which a reader gets the decoded weight; no scale is stored in it.

    Raises:
        SettingsError: no such kind.
    """

    searches = True

    kind: str
    storage: torch.dtype = torch.float32
    group_size: int = field(init=False)
    rows: int = field(default=1, init=False)

    def __post_init__(self) -> None:
        if self.kind not in LAYOUTS:
            raise SettingsError("kind", self.kind, " or ".join(LAYOUTS))
        object.__setattr__(self, "group_size", self.layout.tile)

    @property
    def layout(self) -> GGMLLayout:
        """What the format stores."""
        return LAYOUTS[self.kind]

    @property
    def code_dtype(self) -> torch.dtype:
        """Unsigned bytes; signed ones for Q8_0."""
        return torch.int8 if self.layout.low < 0 else torch.uint8

    def code_book(self) -> CodeBook:
        """Integers around h, or uneven levels."""
        return CodeBook(self.layout.low, self.layout.high, self.layout.zero, self.layout.levels or ())

    def bits_per_weight(self, shape: tuple[int, int]) -> float:
        """Stored bits of a weight: the bytes of its block."""
        return self.layout.size * 8 / self.layout.block

    def nearest(self, values: Tensor) -> Tensor:
        """Rounded half to even, kept within the codes; half way between two uneven levels to the upper."""
        if self.layout.levels:
            return _nearest_level(values, self.layout.levels)
        return (values + self.layout.zero).round_().clamp_(self.layout.low, self.layout.high)

    def level(self, codes: Tensor) -> Tensor:
        """q - h, or T[q]."""
        if self.layout.levels:
            table = torch.tensor(self.layout.levels, dtype=torch.float32, device=codes.device)
            return table.index_select(0, codes.flatten().int()).view(codes.shape)
        return codes.float() - self.layout.zero

    def choose(
        self, weight: Tensor, shrink: float | Tensor = 1.0, importance: Tensor | None = None
    ) -> TileParameters:
        """Scales and minimums of least error, weighted by ``importance``. ``shrink`` clips the weights of
        each tile to that part of their range before the search.

        Raises:
            SettingsError: K is no multiple of the block.
        """
        return self.parameters(self._search(weight, shrink, importance, codes=False).stored)

    def search(self, weight: Tensor, importance: Tensor | None = None) -> QuantizedTensor:
        """The same scales and every weight's nearest code, in one pass where there is a compiled kernel. Does
        not modify its inputs."""
        block_scales = self._search(weight, 1.0, importance, codes=True)
        parameters = self.parameters(block_scales.stored)
        if block_scales.codes is None:
            return self.quantize(weight, parameters)
        return QuantizedTensor(self, block_scales.codes, parameters)

    def _search(
        self, weight: Tensor, shrink: float | Tensor, importance: Tensor | None, *, codes: bool
    ) -> kernel.BlockScales:
        """The search by the compiled kernel, or in torch a few rows at a time."""
        rows, columns = weight.shape
        block, tile = self.layout.block, self.layout.tile
        if columns % block:
            raise SettingsError(
                "kind", self.kind, f"one whose block divides K: {columns} is not a multiple of {block}"
            )
        v = weights(importance, columns, weight.device)
        clips = isinstance(shrink, Tensor) or shrink != 1.0
        shrink = torch.as_tensor(shrink, dtype=torch.float32, device=weight.device)
        shrink = shrink.expand(rows, columns // tile)
        block_scales = kernel.search(
            self.kind, self.layout, weight, v, shrink=shrink if clips else None, codes=codes
        )
        if block_scales is not None:
            return block_scales
        v = v.reshape(1, -1, block // tile, tile)
        step = max(1, CHUNK // columns)
        parts = []
        for start in range(0, rows, step):
            x = weight[start : start + step].float().reshape(-1, columns // block, block // tile, tile)
            parts.append(search(self, self.layout, clipped(x, shrink[start : start + step]), v))
        stored = {name: torch.cat([part[name] for part in parts]).reshape(rows, -1) for name in parts[0]}
        return kernel.BlockScales(stored, None)

    def parameters(self, stored: dict[str, Tensor]) -> TileParameters:
        """Scale and minimum of each tile as a reader computes them."""
        if self.layout.codes is None:
            minimum = -stored["m"].float() if self.layout.minimum else None
            return TileParameters(stored["d"].float(), minimum=minimum, stored=stored)
        tiles = self.layout.block // self.layout.tile
        codes = stored["scale_codes"].float() - self.layout.bias
        scale = stored["d"].float().repeat_interleave(tiles, 1) * codes
        if not self.layout.minimum:
            return TileParameters(scale, stored=stored)
        minimum_scale = stored["dmin"].float().repeat_interleave(tiles, 1)
        return TileParameters(scale, minimum=minimum_scale * stored["minimum_codes"].float(), stored=stored)


def _nearest_level(values: Tensor, levels: tuple[int, ...]) -> Tensor:
    """Codes, float32. The levels are integers, so floor(2 x) decides on which side of each midpoint x is."""
    low, high = 2 * levels[0], 2 * levels[-1]
    middles = torch.tensor([a + b for a, b in pairwise(levels)], device=values.device)
    table = torch.bucketize(torch.arange(low, high + 1, device=values.device), middles, right=True).float()
    at = (values * 2).floor_().clamp_(low, high).sub_(low).int().clamp_(min=0)  # NaN becomes code 0
    return table.index_select(0, at.flatten()).view(values.shape)


GGML = {kind: GGMLGrid(kind) for kind in LAYOUTS}
"""Every format by name, decoded in float32."""
