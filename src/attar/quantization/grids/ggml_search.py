"""The search for the scales of llama.cpp's block formats: least squared error, weighted by importance.

Kawrakow and others, ggml, ``ggml-quants.c``. There is no paper.

    w' = s * (q - h) - m ,    s = d * c ,   m = d_m * c_m        (k-quants)
    w' = s * T[q] ,           s = d * c  or  d                   (IQ4_XS, IQ4_NL)
    for t around 0:  q = round((w - min w) * (L + t) / (max w - min w)) , then the least-squares s and m of
    these q; the t of least error  e = sum v (w - w')^2  wins. No minimum:  q = round(w (H + t) / w_j) ,
    w_j the weight of largest magnitude, H an end of the codes; t in steps of the outermost levels.

Letters: w weights of a tile, q codes, h the code of zero, L the largest code; s, m scale and minimum of a
tile; T uneven levels; c, c_m integers (4, 6 or 8 bits); d, d_m float16, of a block; v importance of an
input's squared error.

Differs from the reference: v is the importance itself (1 without one), so that e is the squared error of
the layer's output under the diagonal of H; the reference multiplies by sqrt(mean w^2 + w^2),
and without importance by sqrt(mean w^2) + |w| or w^2. c, c_m, d and d_m are improved against e with the
codes that they give: c and c_m by one up and down, d and d_m by least squares; the reference rounds
them once. c is never 0, so no scale is zero (q = h gives the same value). Q4_0 to Q8_0 are searched
too. With uneven levels the largest weight goes to either end, up to a step beyond or before it; the
reference keeps within 7 of -127.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attar.quantization.grids.grid import Grid, TileParameters

ROUNDS = 2  # of improving the codes of scales and d in turn
HALF_LARGEST = 65504.0
HALF_SMALLEST = 2.0**-24


@dataclass(frozen=True)
class GGMLLayout:
    """What a format stores.

    Attributes:
        size: bytes of a block.
        block: weights of a block; they share d.
        high: L, largest code.
        zero: h, code of zero.
        minimum: tiles have a minimum.
        codes: (smallest, largest) c - k of a scale; None: the scale is d.
        bias: k.
        levels: T, ascending, where w' = s * T[q]; None: T[q] = q - h.
    """

    size: int
    block: int
    tile: int
    low: int
    high: int
    zero: int
    minimum: bool
    codes: tuple[int, int] | None = None
    bias: int = 0
    levels: tuple[int, ...] | None = None

    @property
    def ends(self) -> tuple[int, int]:
        """Smallest and largest level."""
        return (
            (self.levels[0], self.levels[-1])
            if self.levels
            else (self.low - self.zero, self.high - self.zero)
        )

    @property
    def step(self) -> int:
        """The distance of the first two levels."""
        return self.levels[1] - self.levels[0] if self.levels else 1


@dataclass
class Fit:
    """Scales of tiles while they are searched for; B blocks of S tiles of n weights.

    Attributes:
        scale: (..., S).
        minimum: (..., S); None: 0.
        stiffness: (..., S), how fast the error grows with the square of a change of the scale.
    """

    scale: Tensor
    minimum: Tensor | None
    stiffness: Tensor


def weights(importance: Tensor | None, columns: int, device: torch.device) -> Tensor:
    """v (K,), normalized to mean 1 and at least 1e-6."""
    if importance is None:
        return torch.ones(columns, device=device)
    v = importance.to(device=device, dtype=torch.float32)
    mean = v.mean()
    return (v / mean).clamp(min=1e-6) if mean > 0 else torch.ones_like(v)


def clipped(x: Tensor, shrink: Tensor) -> Tensor:
    """x (..., n) clipped to ``shrink`` times the range of each tile of n; as many factors as tiles."""
    shrink = shrink.reshape(x.shape[:-1])[..., None]
    high, low = x.amax(-1, True).clamp(min=0.0), x.amin(-1, True).clamp(max=0.0)
    return x.minimum(high * shrink).maximum(low * shrink)


def search(grid: Grid, layout: GGMLLayout, x: Tensor, v: Tensor) -> dict[str, Tensor]:
    """The stored tensors of x (R, B, S, n) under weights v (1, B, S, n)."""
    fit = _fit_minimum(x, v, layout) if layout.minimum else _fit_symmetric(x, v, grid, layout)
    if layout.codes is None:
        return _plain(fit)
    d, c = _two_levels(fit.scale, fit.stiffness, layout.codes)
    if fit.minimum is None:
        d, _, c, _ = _improve(x, v, grid, layout.codes, d, None, c, None)
        kept = torch.uint8 if layout.bias else torch.int8
        return {"d": d.half(), "scale_codes": (c + layout.bias).to(kept)}
    dmin, cmin = _two_levels(fit.minimum, v.sum(-1).expand_as(fit.minimum), layout.codes, least=0)
    d, dmin, c, cmin = _improve(x, v, grid, layout.codes, d, dmin, c, cmin)
    assert dmin is not None and cmin is not None
    return {
        "d": d.half(),
        "dmin": dmin.half(),
        "scale_codes": c.to(torch.uint8),
        "minimum_codes": cmin.to(torch.uint8),
    }


def _steps(largest: int, step: int = 1) -> list[float]:
    """Ranges tried for a tile of levels up to ``largest``, the last two a ``step`` apart: the number of codes
    that its range is spread over."""
    reach = step * min(1.0, 0.25 * largest)
    return [largest + reach * t / 10 for t in range(-10, 11)]


def _fit_minimum(x: Tensor, v: Tensor, layout: GGMLLayout) -> Fit:
    """Scale and minimum of each tile by the search of the module's docstring.

    With k-quants the minimum is at least 0 (a tile reaches up to zero or beyond); Q4_1 and Q5_1 have any.
    """
    free = layout.codes is None
    low, high = x.amin(-1), x.amax(-1)
    if not free:
        low = low.clamp(max=0.0)
    spread = (high - low).clamp(min=1e-30)
    V, vx = v.sum(-1), v * x
    X, XX = vx.sum(-1), (vx * x).sum(-1)
    best = torch.full_like(low, torch.inf)
    scale, base, stiffness = spread / layout.high, low, V.expand_as(low)
    for reach in _steps(layout.high):
        q = ((x - low[..., None]) * (reach / spread)[..., None]).round_().clamp_(0, layout.high)
        vq = v * q
        Q, QQ, QX = vq.sum(-1), (vq * q).sum(-1), (vq * x).sum(-1)
        det = V * QQ - Q * Q
        s, b = (V * QX - X * Q) / det, (QQ * X - Q * QX) / det
        if not free:
            s, b = torch.where(b > 0, QX / QQ, s), b.clamp(max=0.0)
        error = XX - s * QX - b * X
        better = (det > 0) & (s > 0) & (error < best)
        best = torch.where(better, error, best)
        scale, base = torch.where(better, s, scale), torch.where(better, b, base)
        stiffness = torch.where(better, QQ, stiffness)
    return Fit(scale, -base, stiffness)


def _fit_symmetric(x: Tensor, v: Tensor, grid: Grid, layout: GGMLLayout) -> Fit:
    """Scale of each tile, of either sign: its largest magnitude goes to one end of the codes or near it."""
    down, up = layout.ends
    peak = x.gather(-1, x.abs().argmax(-1, True))[..., 0]
    kept = torch.where(peak.abs() < 1e-30, torch.full_like(peak, 1e-30), peak)
    vx = v * x
    best = torch.zeros_like(peak)
    scale, stiffness = kept / down, torch.ones_like(peak)
    ends = [-reach for reach in _steps(-down, layout.step)]
    if down != -up:
        ends += _steps(up, layout.step)
    for end in ends:
        q = x * (end / kept)[..., None]
        q = grid.level(grid.nearest(q)) if layout.levels else q.round_().clamp_(down, up)
        QX, QQ = (vx * q).sum(-1), (v * q).mul_(q).sum(-1)
        gain = QX * QX / QQ  # what the error loses against w' = 0
        better = (QQ > 0) & (gain > best)
        best = torch.where(better, gain, best)
        scale, stiffness = torch.where(better, QX / QQ, scale), torch.where(better, QQ, stiffness)
    return Fit(scale, None, stiffness)


def _half(value: Tensor) -> Tensor:
    """Rounded to float16, never 0 and never infinite, as float32."""
    sign = torch.where(value < 0, -1.0, 1.0)
    return sign * value.abs().clamp(HALF_SMALLEST, HALF_LARGEST).half().float()


def _plain(fit: Fit) -> dict[str, Tensor]:
    """Formats of one level: d (and the minimum) rounded to float16."""
    d = _half(fit.scale)
    if fit.minimum is None:
        return {"d": d.half()}
    m = fit.minimum.clamp(-HALF_LARGEST, HALF_LARGEST).half()
    return {"d": d.half(), "m": -m}


def _two_levels(
    values: Tensor, stiffness: Tensor, span: tuple[int, int], least: int = 1
) -> tuple[Tensor, Tensor]:
    """d (..., 1), float16 as float32, and integer c (..., S) with values ~ d * c.

    The largest value is mapped to the longer end of the codes or near it; d is then fitted by least squares.
    |c| is at least ``least``.
    """
    down, up = span
    end = down if down < 0 else up
    peak = values.gather(-1, values.abs().argmax(-1, True))
    kept = torch.where(peak.abs() < 1e-30, torch.full_like(peak, 1e-30), peak)
    best = torch.full_like(peak, torch.inf)
    d, c = _half(kept / end), torch.full_like(values, float(least))
    side = torch.where((values < 0) != (kept * end < 0), -1.0, 1.0)
    ratios = [(end + 0.1 * t) / kept for t in range(-9, 10)]
    for ratio in [*ratios, 1.0 / d]:  # the last one where d is float16's least
        codes = (values * ratio).round_().clamp_(down, up)
        codes = _away_from_zero(codes, side, least)
        vc = stiffness * codes
        trial = _half((vc * values).sum(-1, True) / (vc * codes).sum(-1, True).clamp(min=1e-30))
        error = (stiffness * (values - trial * codes).square()).sum(-1, True)
        better = error < best
        best = torch.where(better, error, best)
        d, c = torch.where(better, trial, d), torch.where(better, codes, c)
    return d, c


def _away_from_zero(codes: Tensor, side: Tensor, least: int) -> Tensor:
    """Codes of 0 become ``least`` on the side whose sign is given."""
    return torch.where((codes == 0) & (least > 0), torch.where(side < 0, -1.0, 1.0), codes)


def _improve(
    x: Tensor,
    v: Tensor,
    grid: Grid,
    span: tuple[int, int],
    d: Tensor,
    dmin: Tensor | None,
    c: Tensor,
    cmin: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Codes of scales and minimums by one up and down, then d and d_m by least squares, in turn. The error,
    with the codes that these parameters give, never grows."""
    error = _error(x, v, grid, d * c, _product(dmin, cmin))
    for _ in range(ROUNDS):
        at, at_min, start = c, cmin, error
        for step in (-1, 0, 1):
            moved = (at + step).clamp(*span)
            moved = torch.where(moved == 0, at, moved)
            for step_min in (0,) if at_min is None else (-1, 0, 1):
                moved_min = None if at_min is None else (at_min + step_min).clamp(*span)
                trial = _error(x, v, grid, d * moved, _product(dmin, moved_min))
                better = trial < error
                error, c = torch.where(better, trial, error), torch.where(better, moved, c)
                if cmin is not None and moved_min is not None:
                    cmin = torch.where(better, moved_min, cmin)
        refit, refit_min = _refit(x, v, grid, d, dmin, c, cmin)
        trial = _error(x, v, grid, refit * c, _product(refit_min, cmin))
        better = trial.sum(-1, True) < error.sum(-1, True)
        error, d = torch.where(better, trial, error), torch.where(better, refit, d)
        if dmin is not None and refit_min is not None:
            dmin = torch.where(better, refit_min, dmin)
        if torch.equal(error, start):
            break
    return d, dmin, c, cmin


def _product(d: Tensor | None, c: Tensor | None) -> Tensor | None:
    return None if d is None or c is None else d * c


def _error(x: Tensor, v: Tensor, grid: Grid, scale: Tensor, minimum: Tensor | None) -> Tensor:
    """e of each tile (R, B, S)."""
    parameters = TileParameters(scale[..., None], minimum=None if minimum is None else minimum[..., None])
    lost = grid.decode(grid.encode(x, parameters), parameters).sub_(x)
    return lost.square_().mul_(v).sum(-1)


def _refit(
    x: Tensor,
    v: Tensor,
    grid: Grid,
    d: Tensor,
    dmin: Tensor | None,
    c: Tensor,
    cmin: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """d and d_m (R, B, 1) of least squares for the codes that the present ones give."""
    minimum = _product(dmin, cmin)
    parameters = TileParameters((d * c)[..., None], minimum=None if minimum is None else minimum[..., None])
    a = grid.level(grid.encode(x, parameters)).mul_(c[..., None])
    va = v * a
    AA, AX = _total(va * a), _total(va * x)
    if cmin is None:
        return _half(torch.where(AA > 0, AX / AA, d)), None
    AM = (va.sum(-1) * cmin).sum(-1, True)
    MM, MX = (v.sum(-1) * cmin * cmin).sum(-1, True), ((v * x).sum(-1) * cmin).sum(-1, True)
    det = AA * MM - AM * AM
    refit = torch.where(det > 0, (AX * MM - MX * AM) / det, d)
    least = torch.where(det > 0, (AX * AM - MX * AA) / det, dmin)
    return _half(torch.where(refit > 0, refit, d)), _half(least.clamp(min=0.0))


def _total(values: Tensor) -> Tensor:
    """Sum over a block (R, B, S, n), as (R, B, 1)."""
    return values.sum((-2, -1))[..., None]
