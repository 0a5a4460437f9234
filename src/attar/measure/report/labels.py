"""Legends, and placement of labels: they cover neither each other nor the points, and stay in the picture.

A label tries positions around its point. It starts at the one with the lowest cost by itself, and then moves
to the one with the lowest cost given all other labels, four times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from attar.measure.report.markup import Markup, el, join
from attar.measure.report.svg import PixelPoint, line, text

WIDE = "mwMW@%"
NARROW = "iljtfrI.,:;'|!()[] "
PixelLine = Sequence[PixelPoint]
FONT = 12.0
SWATCH = 26.0  # pixels that a line and the gap after it take
LONGEST = 320.0


@dataclass(frozen=True)
class LabelBox:
    """A rectangle in pixels: left, top, right, bottom."""

    left: float
    top: float
    right: float
    bottom: float

    def overlap(self, other: LabelBox) -> float:
        """Area of the intersection."""
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.bottom, other.bottom) - max(self.top, other.top)
        return max(width, 0.0) * max(height, 0.0)

    def within(self, other: LabelBox) -> bool:
        """Whether it lies inside the other."""
        return (
            self.left >= other.left
            and self.top >= other.top
            and self.right <= other.right
            and self.bottom <= other.bottom
        )


def text_width(text: str, font_size: float) -> float:
    """Upper estimate of the width of a text in a sans-serif font, in pixels."""
    units = sum(0.95 if char in WIDE else 0.4 if char in NARROW else 0.64 for char in text)
    return units * font_size


def place_labels(
    points: Sequence[PixelPoint],
    sizes: Sequence[PixelPoint],
    bounds: LabelBox,
    lines: Sequence[PixelLine] = (),
    radius: float = 8.0,
) -> list[LabelBox]:
    """A box for each point's label.

    Args:
        points: centres of the marks (x, y).
        sizes: width and height of each label.
        bounds: labels stay within.
        lines: polylines that labels should not cover.
        radius: of a mark and its margin.
    """
    marks = [LabelBox(x - radius, y - radius, x + radius, y + radius) for x, y in points]
    dots = [dot for line in lines for dot in _dots(line)]
    candidates = [
        [(rank + _cost(box, marks, dots), box) for rank, box in _candidates(point, size, bounds, radius)]
        for point, size in zip(points, sizes, strict=True)
    ]
    chosen = [min(boxes, key=lambda candidate: candidate[0])[1] for boxes in candidates]
    for _ in range(4):
        for index, boxes in enumerate(candidates):
            others = chosen[:index] + chosen[index + 1 :]
            chosen[index] = min(boxes, key=lambda candidate: candidate[0] + _crowding(candidate[1], others))[
                1
            ]
    return chosen


def _cost(box: LabelBox, marks: list[LabelBox], dots: list[PixelPoint]) -> float:
    """Cost of a box by itself: points and lines that it covers."""
    points = sum(400.0 + area for mark in marks if (area := box.overlap(mark)) > 0)
    left, top, right, bottom = box.left - 3, box.top - 2, box.right + 3, box.bottom + 2
    return points + 12.0 * sum(left <= x <= right and top <= y <= bottom for x, y in dots)


def _crowding(box: LabelBox, others: list[LabelBox]) -> float:
    """Cost of a box given the other labels: those that it covers."""
    return sum(1000.0 + area for other in others if (area := box.overlap(other)) > 0)


def _candidates(
    point: PixelPoint, size: PixelPoint, bounds: LabelBox, radius: float
) -> list[tuple[float, LabelBox]]:
    """Boxes around a point with their costs: near and readable positions cost least."""
    (x, y), (width, height) = point, size
    boxes: list[tuple[float, LabelBox]] = []
    for ring in range(6):
        gap = radius + 2 + 14 * ring
        for turn, angle in enumerate((0, 180, 90, 270, 45, 315, 135, 225)):
            dx, dy = math.cos(math.radians(angle)), math.sin(math.radians(angle))
            centre = (x + dx * gap + _sign(dx) * width / 2, y + dy * gap + _sign(dy) * height / 2)
            box = LabelBox(
                centre[0] - width / 2, centre[1] - height / 2, centre[0] + width / 2, centre[1] + height / 2
            )
            inside = _moved_inside(box, bounds)
            shifted = abs(inside.left - box.left) + abs(inside.top - box.top)
            boxes.append((turn + 30.0 * ring + shifted, inside))
    return boxes


def _moved_inside(box: LabelBox, bounds: LabelBox) -> LabelBox:
    right = max(bounds.left - box.left, 0.0) - max(box.right - bounds.right, 0.0)
    down = max(bounds.top - box.top, 0.0) - max(box.bottom - bounds.bottom, 0.0)
    return LabelBox(box.left + right, box.top + down, box.right + right, box.bottom + down)


def _dots(line: PixelLine) -> list[PixelPoint]:
    """Points along a polyline, about 6 pixels apart."""
    dots: list[PixelPoint] = []
    for (x0, y0), (x1, y1) in pairwise(line):
        count = max(1, round(math.hypot(x1 - x0, y1 - y0) / 6))
        dots.extend((x0 + (x1 - x0) * i / count, y0 + (y1 - y0) * i / count) for i in range(count + 1))
    return dots


def _sign(value: float) -> int:
    return 0 if abs(value) < 1e-9 else 1 if value > 0 else -1


class LegendEntry(NamedTuple):
    """An entry of a legend.

    Attributes:
        class_: CSS classes of its line: a colour, then ``dashed`` or ``spot``; "" for no line.
    """

    class_: str
    words: str


def html_legend(keys: Sequence[LegendEntry]) -> Markup:
    """The legend as a paragraph."""
    items = [
        el("span", el("i", class_=f"swatch {key.class_}") if key.class_ else None, key.words, class_="key")
        for key in keys
    ]
    return el("p", items, class_="legend")


def svg_legend(
    keys: Sequence[LegendEntry], width: float, y: float, margin: float = 16.0
) -> tuple[Markup, float]:
    """The legend in lines that fit the width, and the y at which the picture below may begin.

    Args:
        y: baseline of the first line.
        margin: on both sides.
    """
    x, drawn = margin, []
    for key in keys:
        start = SWATCH if key.class_ else 0.0
        wide = start + text_width(key.words, FONT)
        if x > margin and x + wide > width - margin:
            x, y = margin, y + 20
        drawn.append(_swatch(key.class_, x, y - 4) if key.class_ else None)
        drawn.append(text(x + start, y, key.words))
        x += wide + 18
    return join(drawn), y + 22


def cut(words: str, width: float = LONGEST) -> str:
    """Words without their beginning where they are wider than ``width`` pixels: names differ at their end."""
    if text_width(words, FONT) <= width:
        return words
    kept = next(at for at in range(len(words)) if text_width("…" + words[at:], FONT) <= width)
    return "…" + words[kept:]


def _swatch(classes: str, x: float, y: float) -> Markup:
    colour, *kinds = classes.split()
    if "spot" in kinds:
        mark = el("circle", cx=x + 9, cy=y, r=3.0, class_="point")
    else:
        mark = line(x, y, x + 18, y, class_="series dashed" if "dashed" in kinds else "series")
    return el("g", mark, class_=colour)
