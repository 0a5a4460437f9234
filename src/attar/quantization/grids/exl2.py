"""EXL2's number format as a grid: integer codes of 2 to 8 bits, chosen for each group, with two levels of
scales.

turboderp, ExLlamaV2, ``conversion/adaptivegptq.py``. There is no paper.

    w' = s * q ,   s = c^2 * h ,   q from -2^(b-1) to 2^(b-1) - 1            (s, w' and h float16)

Letters: q code, b bits of a group of inputs; s scale of an output in a group; c integer, 1 to 16; h of a
group, for all outputs of the layer; v importance of an input's squared error; e = sum v (w - w')^2.

The inputs are in the file's order. A tile is a row's 32 inputs; a group is one or more of them,
whose scale is repeated.

How s is chosen, group by group:
1. e of each row on a ladder of scales, from clipped to coarse;
2. for h on a fine ladder: each row takes the better of the two c around its best scale, e interpolated
   between the steps of 1; of the four h of least total error the best by measurement;
3. c one up or down, by the error itself with the codes that this scale gives.

Refitting h to these codes by least squares gained almost nothing on trained layers, and is left out.

Differs from the reference: the reference takes s from the largest magnitude and one factor for all rows of a
group, by the errors' power 3.5, with v = 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attar.errors import SettingsError
from attar.quantization.grids.ggml_search import clipped, weights
from attar.quantization.grids.grid import Grid, TileParameters

BITS = (2, 3, 4, 5, 6, 8)
TILE = 32
CODES = 16  # c
SMALLEST = 2.0**-24  # of h: the least float16 above 0
HIGHEST = 65504.0 / 256.0  # of h: 256 h is stored as float16
REACH = {2: (0.2, 3.0), 3: (0.25, 2.5), 4: (0.3, 2.2), 5: (0.45, 2.0), 6: (0.7, 1.7), 8: (0.9, 1.4)}
"""Ends of the ladder of scales by bits; with many bits clipping does not pay."""
STEPS = 20  # of that ladder
FINE = 64  # of the ladder of h
STARTS = 4  # of them whose error is measured
SAMPLE = 4096  # rows that h is chosen by


@dataclass(frozen=True)
class EXL2Grid(Grid):
    """Groups of several bits in one weight.

    ``TileParameters.stored`` holds what the file does: "scale_codes" uint8 (N, G), c; "scale_max" float16
    (G,), 256 h. ``TileParameters.top`` is the largest code of each tile.

    Attributes:
        sections: (bits, inputs) of each group, in the order of the columns; inputs are multiples of 32.
        storage: the type of the decoded weight and of its scales.

    Raises:
        SettingsError: no such bits, or a group that is no multiple of 32.
    """

    searches = True

    sections: tuple[tuple[int, int], ...]
    storage: torch.dtype = field(default=torch.float16, init=False)
    group_size: int = field(default=TILE, init=False)
    rows: int = field(default=1, init=False)

    def __post_init__(self) -> None:
        for bits, width in self.sections:
            if bits not in BITS or width < 1 or width % TILE:
                raise SettingsError(
                    "sections", (bits, width), f"bits of {BITS} and a multiple of {TILE} inputs"
                )

    @property
    def columns(self) -> int:
        """K."""
        return sum(width for _, width in self.sections)

    @property
    def most(self) -> int:
        """The largest b."""
        return max(bits for bits, _ in self.sections)

    def bits_per_weight(self, shape: tuple[int, int]) -> float:
        """Stored bits of a weight: codes, scales and the order of the inputs, outputs filled up to 32."""
        outputs, count = shape[0] + -shape[0] % TILE, len(self.sections)
        codes = sum(bits * width for bits, width in self.sections) * outputs
        return (codes + 4 * count * outputs + 48 * count + 32 * shape[1]) / (shape[0] * shape[1])

    def nearest(self, values: Tensor) -> Tensor:
        """Rounded half to even, kept within the codes of the group of most bits."""
        return values.round().clamp_(-(2.0 ** (self.most - 1)), 2.0 ** (self.most - 1) - 1.0)

    def level(self, codes: Tensor) -> Tensor:
        """The code itself."""
        return codes.float()

    def encode(self, values: Tensor, parameters: TileParameters) -> Tensor:
        """Nearest codes, each kept within the codes of its tile."""
        assert parameters.top is not None, "the tiles of an EXL2 grid have their largest code"
        return bounded(values / parameters.scale, parameters.top)

    def choose(
        self, weight: Tensor, shrink: float | Tensor = 1.0, importance: Tensor | None = None
    ) -> TileParameters:
        """Scales of least error, weighted by ``importance``. ``shrink`` clips the weights of each tile to
        that part of their range before the search.

        Raises:
            SettingsError: K is not the sum of the groups.
        """
        rows, columns = weight.shape
        if columns != self.columns:
            raise SettingsError("sections", self.columns, f"groups of {columns} inputs in all")
        fits, start = [], 0
        for bits, width in self.sections:
            x = weight[:, start : start + width].float()
            v = None if importance is None else importance[start : start + width]
            if not (isinstance(shrink, float) and shrink == 1.0):
                x = _clipped(x, shrink, rows, columns, start)
            fits.append(fit(x, v, bits))
            start += width
        return self.parameters([h for h, _ in fits], [c for _, c in fits])

    def parameters(self, steps: Sequence[Tensor], codes: Sequence[Tensor]) -> TileParameters:
        """Parameters as a reader of the file computes them.

        Args:
            steps: h of each group, float32 ().
            codes: c of each group, (N,).
        """
        repeats = torch.tensor([width // TILE for _, width in self.sections], device=codes[0].device)
        top = torch.tensor([2.0 ** (bits - 1) - 1.0 for bits, _ in self.sections], device=repeats.device)
        h, c = torch.stack(list(steps)), torch.stack(list(codes), 1)
        scale = scales(h, c).repeat_interleave(repeats, 1)
        stored = {"scale_codes": c.to(torch.uint8), "scale_max": (h * 256.0).half()}
        return TileParameters(scale, stored=stored, top=top.repeat_interleave(repeats).expand_as(scale))


def bounded(values: Tensor, top: Tensor) -> Tensor:
    """Rounded half to even, kept from -top - 1 to top."""
    return values.round().minimum(top).maximum(-1.0 - top)


def scales(h: Tensor, c: Tensor) -> Tensor:
    """s, float16 as float32."""
    return (c.float().square() * h).half().float()


def fit(x: Tensor, importance: Tensor | None, bits: int) -> tuple[Tensor, Tensor]:
    """h, float32 (), and c (N,), float32, of a group. Does not modify its inputs.

    Args:
        x: (N, n) float32.
        importance: v (n,), not negative; None: 1.
        bits: b.
    """
    v = weights(importance, x.shape[1], x.device)
    top = torch.tensor(2.0 ** (bits - 1) - 1.0, device=x.device)
    peak = x.abs().amax(1).clamp(min=1e-30)
    factors = _ladder(bits).to(x.device)
    unit = peak / (top + 1.0)
    errors = torch.stack([_error(x, v, unit * factor, top) for factor in factors.tolist()])
    started = []
    for h in _coarse(unit, errors, factors):
        c = _pick(h, unit, errors, factors)
        started.append((float(_error(x, v, scales(h, c), top).sum()), h, c))
    _, h, c = min(started, key=lambda start: start[0])
    return h, _improve(x, v, top, h, c)


def _ladder(bits: int) -> Tensor:
    """The scales tried, in units of the scale that maps the largest magnitude to the lowest code: from strong
    clipping to a step coarser than necessary."""
    low, high = REACH[bits]
    return low * (high / low) ** (torch.arange(STEPS) / (STEPS - 1.0))


def _error(x: Tensor, v: Tensor, scale: Tensor, top: Tensor) -> Tensor:
    """e of each row (N,) at scales (N,), with their nearest codes."""
    s = scale[:, None]
    lost = bounded(x / s, top).mul_(s).sub_(x)
    return lost.square_() @ v


def _at(scale: Tensor, unit: Tensor, errors: Tensor, factors: Tensor) -> Tensor:
    """e at scales (..., N), interpolated in the logarithm; beyond the ladder it grows with the square."""
    step = torch.log(factors[1] / factors[0])
    position = torch.log((scale / unit).clamp(min=1e-30) / factors[0]) / step
    left = position.floor().clamp(0, STEPS - 2)
    part = (position - left).clamp(0.0, 1.0)
    rows = torch.arange(errors.shape[1], device=errors.device).expand_as(left)
    low, high = errors[left.long(), rows], errors[left.long() + 1, rows]
    beyond = (position - (STEPS - 1)).clamp(min=0.0) + (-position).clamp(min=0.0)
    return (low + part * (high - low)) * torch.exp(2.0 * step * beyond)


def _coarse(unit: Tensor, errors: Tensor, factors: Tensor) -> Tensor:
    """The h of least total error on their ladder, for a sample of the rows, best first."""
    every = slice(None, None, -(-len(unit) // SAMPLE))
    unit, errors = unit[every], errors[:, every]
    best = unit * factors[errors.argmin(0)]
    highest = best.max() / CODES**2
    trials = highest * torch.logspace(-1.5, 1.0, FINE, base=2.0, device=unit.device)
    trials = trials.half().float().clamp(SMALLEST, HIGHEST)
    root = (best / trials[:, None]).sqrt()
    options = torch.stack([root.floor().clamp(1, CODES), root.ceil().clamp(1, CODES)])
    lost = _at(options.square() * trials[:, None], unit, errors, factors)
    return trials[lost.amin(0).sum(1).argsort(stable=True)[:STARTS]]


def _pick(h: Tensor, unit: Tensor, errors: Tensor, factors: Tensor) -> Tensor:
    """c of each row by the interpolated errors."""
    ladder = torch.arange(1.0, CODES + 1.0, device=unit.device)
    lost = _at((ladder.square() * h)[:, None].expand(-1, len(unit)), unit, errors, factors)
    return ladder[lost.argmin(0)]


def _improve(x: Tensor, v: Tensor, top: Tensor, h: Tensor, c: Tensor) -> Tensor:
    """c, one up or down where the error itself is less there."""
    error, at = _error(x, v, scales(h, c), top), c
    for step in (-1.0, 1.0):
        moved = (at + step).clamp(1.0, CODES)
        trial = _error(x, v, scales(h, moved), top)
        better = trial < error
        error, c = torch.where(better, trial, error), torch.where(better, moved, c)
    return c


def _clipped(x: Tensor, shrink: float | Tensor, rows: int, columns: int, start: int) -> Tensor:
    """x (N, n) kept within ``shrink`` times the range of each tile."""
    tiles = torch.as_tensor(shrink, dtype=torch.float32, device=x.device).expand(rows, columns // TILE)
    part = tiles[:, start // TILE : (start + x.shape[1]) // TILE]
    return clipped(x.reshape(len(x), -1, TILE), part).reshape(x.shape)
