"""Elements of the pictures: axes with round ticks, text, lines, arrows, and the two widths of a picture.

Colours and fonts come from ``picture.css`` through classes, for light and dark screens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files

from attar.measure.numbers import significant
from attar.measure.report.markup import Child, Markup, el, join

PixelPoint = tuple[float, float]
VERBS = ("original", "distill", "prune", "recover", "quantize", "merge", "export", "train-head")
LOG_STEPS = ((1, 1.5, 2, 3, 4, 5, 7), (1, 2, 3, 5), (1, 2, 5), (1, 3), (1,))


@dataclass(frozen=True)
class Axis:
    """Maps values ``low`` to ``high`` to pixels ``start`` to ``end``; start > end inverts the axis."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """The pixel of a value."""
        low, high, value = (math.log(x) if self.log else x for x in (self.low, self.high, value))
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self, most: int = 7) -> list[float]:
        """At most ``most`` round values within the axis."""
        wide = self.log and self.high / self.low > 4  # on less, a logarithmic axis is nearly linear
        choices = _log_ticks(self.low, self.high) if wide else _linear_ticks(self.low, self.high)
        return next((ticks for ticks in choices if len(ticks) <= most), [])


def fit(
    values: Iterable[float], start: float, end: float, *, log: bool = False, margin: float = 0.08
) -> Axis:
    """An axis around the values with a margin on both sides, as a fraction of its length.

    A single value, or equal ones, sit in the middle. A logarithmic axis takes positive values only.
    """
    known = list(values) or [1.0]
    low, high = (math.log(x) if log else x for x in (min(known), max(known)))
    if math.isclose(low, high, abs_tol=1e-12):
        half = math.log(2) if log else abs(high) / 2 or 1.0
        low, high = low - half, high + half
    space = (high - low) * margin / (1 - 2 * margin)
    low, high = low - space, high + space
    return Axis(*((math.exp(low), math.exp(high)) if log else (low, high)), start, end, log)


def from_zero(values: Iterable[float], start: float, end: float, margin: float = 0.08) -> Axis:
    """A linear axis from zero to a little above the largest value."""
    high = max((value for value in values), default=0.0) or 1.0
    return Axis(0.0, high * (1 + margin), start, end)


def _log_ticks(low: float, high: float) -> list[list[float]]:
    """Ticks at 1-1.5-2-3-4-5-7, at 1-2-3-5, at 1-2-5, at powers of ten, at every other power ... the densest
    first."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    sets = [[m * 10.0**e for e in range(first, last + 1) for m in steps] for steps in LOG_STEPS]
    sets += [
        [10.0**e for e in range(first, last + 1) if e % stride == 0] for stride in range(2, last - first + 2)
    ]
    return [_inside(ticks, low, high) for ticks in sets]


def _linear_ticks(low: float, high: float) -> list[list[float]]:
    unit = 10.0 ** math.floor(math.log10(high - low)) / 10
    steps = [unit * factor for factor in (1, 2, 2.5, 5, 10, 20, 25, 50, 100)]
    return [
        [step * n for n in range(math.ceil(low / step), math.floor(high / step + 1e-9) + 1)] for step in steps
    ]


def _inside(ticks: list[float], low: float, high: float) -> list[float]:
    return [tick for tick in ticks if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]


def style(name: str) -> Markup:
    """A style sheet of this folder: ``picture`` (colours and SVG) or ``page``."""
    return Markup(files("attar.measure.report").joinpath(f"{name}.css").read_text(encoding="utf-8"))


def verb_class(verb: str) -> str:
    """The class that colours a stage by its verb."""
    return f"v-{verb if verb in VERBS else 'other'}"


def picture(width: float, height: float, what: str, *children: Child, class_: str | None = None) -> Markup:
    """An SVG that shrinks with the page; ``what`` is its label for screen readers."""
    return el(
        "svg",
        *children,
        viewBox=f"0 0 {width:.0f} {height:.0f}",
        width=width,
        height=height,
        role="img",
        aria_label=what,
        class_=class_,
        xmlns="http://www.w3.org/2000/svg",
    )


def both_widths(wide: Markup, narrow: Markup) -> Markup:
    """The same picture for a screen and for a phone; the style sheet shows one of them."""
    return join(el("div", wide, class_="wide"), el("div", narrow, class_="narrow"))


def text(x: float, y: float, words: str, *, anchor: str = "start", class_: str | None = None) -> Markup:
    """Words at a point; ``anchor`` is start, middle or end."""
    return el("text", words, x=x, y=y, text_anchor=None if anchor == "start" else anchor, class_=class_)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    """A straight line."""
    return el("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def point(title: str, x: float, y: float, radius: float = 3.0, class_: str = "point") -> Markup:
    """A circle with a tooltip."""
    return el("circle", el("title", title), cx=x, cy=y, r=radius, class_=class_)


def svg_file(width: float, height: float, what: str, *children: Child, corner: float = 10.0) -> str:
    """A picture as a file: on a card, with its style sheet."""
    card = el("rect", x=0.5, y=0.5, width=width - 1, height=height - 1, rx=corner, class_="card")
    return picture(width, height, what, el("style", style("picture")), card, *children) + "\n"


def polyline(points: Sequence[PixelPoint], class_: str) -> Markup:
    """A line through points."""
    return el("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points), class_=class_)


def arrow(start: PixelPoint, end: PixelPoint, radius: float) -> tuple[Markup, list[PixelPoint]]:
    """An arrow between two marks of a radius, and the points it runs through; empty where they touch."""
    (x0, y0), (x1, y1) = start, end
    length = math.hypot(x1 - x0, y1 - y0)
    if length < 2 * radius + 10:
        return Markup(), []
    ux, uy = (x1 - x0) / length, (y1 - y0) / length
    tail = (x0 + ux * (radius + 3), y0 + uy * (radius + 3))
    tip = (x1 - ux * (radius + 3), y1 - uy * (radius + 3))
    back = (tip[0] - ux * 8, tip[1] - uy * 8)
    corners = [tip, (back[0] - uy * 3.5, back[1] + ux * 3.5), (back[0] + uy * 3.5, back[1] - ux * 3.5)]
    head = el("polygon", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in corners), class_="arrowhead")
    return join(line(*tail, *back, class_="arrow"), head), [tail, tip]


def tick_text(value: float) -> str:
    """A tick's value without trailing zeros: 0.5, 1, 20, 1e-6."""
    if value and abs(value) < 1e-4:
        return f"{value:.0e}".replace("e-0", "e-")
    words = significant(value, 3)
    return words.rstrip("0").rstrip(".") if "." in words else words


def left_axis(axis: Axis, left: float, right: float, most: int = 7) -> Markup:
    """Horizontal grid lines with their values on the left."""
    parts: list[Markup] = []
    for tick in axis.ticks(most):
        parts.append(line(left, axis(tick), right, axis(tick), class_="grid"))
        parts.append(text(left - 8, axis(tick) + 4, tick_text(tick), anchor="end", class_="tick"))
    return join(parts)


def bottom_axis(axis: Axis, top: float, bottom: float, most: int = 7, *, grid: bool = True) -> Markup:
    """Values under the picture, with vertical grid lines where wanted."""
    parts: list[Markup] = []
    for tick in axis.ticks(most):
        if grid:
            parts.append(line(axis(tick), top, axis(tick), bottom, class_="grid"))
        parts.append(text(axis(tick), bottom + 18, tick_text(tick), anchor="middle", class_="tick"))
    return join(parts)
