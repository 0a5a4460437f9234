"""Small parts that the pictures share: text, lines, arrows, axes, and the two widths of a picture.

Colours and fonts come from ``picture.css`` through classes, so that light and dark need nothing here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.resources import files

from attar.measure.numbers import significant
from attar.measure.report.axis import Axis
from attar.measure.report.labels import PixelPoint
from attar.measure.report.markup import Child, Markup, el, join

VERBS = ("original", "distill", "prune", "recover", "quantize", "merge", "export")


def style(name: str) -> Markup:
    """A style sheet of this folder: ``picture`` (colours and what SVG needs) or ``page``."""
    return Markup(files("attar.measure.report").joinpath(f"{name}.css").read_text(encoding="utf-8"))


def verb_class(verb: str) -> str:
    """The class that colours a stage by its verb."""
    return f"v-{verb if verb in VERBS else 'other'}"


def picture(width: float, height: float, what: str, *children: Child, class_: str | None = None) -> Markup:
    """An SVG that shrinks with the page; ``what`` is read aloud by screen readers."""
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
    """A picture drawn for a screen and again for a phone; the style sheet shows one of them."""
    return join(el("div", wide, class_="wide"), el("div", narrow, class_="narrow"))


def text(x: float, y: float, words: str, *, anchor: str = "start", class_: str | None = None) -> Markup:
    """Words at a point; ``anchor`` is start, middle or end."""
    return el("text", words, x=x, y=y, text_anchor=None if anchor == "start" else anchor, class_=class_)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    """A straight line."""
    return el("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


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
