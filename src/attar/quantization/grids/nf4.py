"""NF4: Dettmers, Pagnoni, Holtzman, Zettlemoyer 2023, "QLoRA: Efficient Finetuning of Quantized LLMs", arXiv
2305.14314, section 3 (4-bit NormalFloat, double quantization), as bitsandbytes stores it.

    w' = s * T[q] ,   s = max|w|                        (plain)
                      s = D[c] * n + o                  (double)
    o = mean(max|w|) ,   n = max|max|w| - o| over 256 blocks

Letters: s scale of a block of weights w; T sixteen levels, quantiles of a normal distribution; q code; D the
256 values of the dynamic 8-bit map; c code of a scale; n scale of 256 scales in row-major order;
o offset of the whole weight.

Differs from the paper: a block lies within a row. bitsandbytes cuts the flattened weight into blocks, which
is the same when the group size divides K; otherwise its file format cannot hold these blocks. With double
quantization the codes are chosen with the scale that the reader recomputes (bitsandbytes: with max|w|), and
c is raised where s would not be positive.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attar.quantization.grids.grid import Grid, TileParameters, stored_scale

LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
RUN = 256  # scales with the same n


@dataclass(frozen=True)
class NF4Grid(Grid):
    """w = s * T[q].

    With ``double``, ``TileParameters.stored`` holds "absmax_codes", c, uint8 (N, G); "nested_absmax", n,
    float32, one for each 256 scales; "nested_offset", o, float32 (1,); "nested_map", D, float32 (256,).

    Attributes:
        group_size: inputs that share a scale; 0: the whole row.
        double: the scales are stored in 8 bits.
        storage: the type in which a reader gets the decoded weight; scales are stored in float32.
        rows: outputs that share a scale: 1 for bitsandbytes.
    """

    group_size: int = 64
    double: bool = False
    storage: torch.dtype = torch.float32
    rows: int = 1

    @property
    def code_dtype(self) -> torch.dtype:
        """Unsigned bytes."""
        return torch.uint8

    def bits_per_weight(self, shape: tuple[int, int]) -> float:
        """Stored bits of a weight: codes, scales, scales of scales and the offset. The levels T and D are
        constants and not counted."""
        tiles_down, tiles_across = self.tiles(shape)
        count = tiles_down * tiles_across
        extra = 8 * count + 32 * -(-count // RUN) + 32 if self.double else 32 * count
        return 4 + extra / (shape[0] * shape[1])

    def choose(
        self, weight: Tensor, shrink: float | Tensor = 1.0, importance: Tensor | None = None
    ) -> TileParameters:
        """Scale of each block from the largest magnitude of its weights."""
        top = self.tile(weight).abs().amax((1, 3)) * shrink
        return _nested(top) if self.double else TileParameters(stored_scale(top, torch.float32))

    def rescaled(self, parameters: TileParameters, scale: Tensor) -> TileParameters | None:
        """Any positive scale; None with double quantization."""
        return None if self.double else TileParameters(scale.clamp(min=torch.finfo(torch.float32).tiny))

    def encode(self, values: Tensor, parameters: TileParameters) -> Tensor:
        """Nearest codes, as float32; as in bitsandbytes, values are multiplied by the scale's reciprocal."""
        return self.nearest(values * (1.0 / parameters.scale))

    def nearest(self, values: Tensor) -> Tensor:
        """Codes 0 to 15; a value half way between two levels goes to the lower."""
        bounds = _middles(_levels(values.device))
        if values.is_cuda:
            return torch.bucketize(values, bounds, out_int32=True).float()
        codes = torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
        for bound in bounds.tolist():  # on a CPU four times faster than bucketize
            codes.add_(values > bound)
        return codes.float()

    def level(self, codes: Tensor) -> Tensor:
        """T[q]."""
        return _levels(codes.device).index_select(0, codes.flatten().int()).view(codes.shape)


def dynamic_map() -> Tensor:
    """D, float32 (256,), ascending: 0, 1, and for each exponent i of 0 to 6 the middles of 2^i equal steps
    from 0.1 to 1, times 10^(i - 6), with both signs (Dettmers 2015, arXiv 1511.04561)."""
    values = [torch.tensor([0.0, 1.0])]
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2**i + 1)
        middles = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (i - 6)
        values += [middles, -middles]
    return torch.cat(values).sort().values


def _levels(device: torch.device) -> Tensor:
    return torch.tensor(LEVELS, device=device)


def _middles(levels: Tensor) -> Tensor:
    """Where the nearest level changes."""
    return (levels[:-1] + levels[1:]) / 2


def _nested(top: Tensor) -> TileParameters:
    """Double quantization of the largest magnitudes (P, G)."""
    D = dynamic_map().to(top.device)
    flat = top.reshape(-1)
    offset = stored_scale(flat.mean(), torch.float32)
    runs = torch.nn.functional.pad(flat - offset, (0, -flat.numel() % RUN)).reshape(-1, RUN)
    peak = runs.abs().amax(1)
    scaled = runs * (1.0 / peak.clamp(min=1e-38))[:, None]
    codes = torch.bucketize(scaled, _middles(D), out_int32=True)
    wrong = D[codes] * peak[:, None] + offset <= 0
    least = torch.bucketize(-offset / peak.clamp(min=1e-38), D, right=True, out_int32=True)  # the first s > 0
    codes = torch.where(wrong, torch.maximum(codes, least[:, None]), codes)
    scale = (D[codes] * peak[:, None] + offset).reshape(-1)[: flat.numel()].reshape(top.shape)
    stored = {
        "absmax_codes": codes.reshape(-1)[: flat.numel()].reshape(top.shape).to(torch.uint8),
        "nested_absmax": peak,
        "nested_offset": offset.reshape(1),
        "nested_map": D,
    }
    return TileParameters(scale, stored=stored)
