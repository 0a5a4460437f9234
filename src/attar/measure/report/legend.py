"""Legends: what a colour or a kind of line stands for, as HTML above a picture or as a part of an SVG."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from attar.measure.report.labels import text_width
from attar.measure.report.markup import Markup, el, join
from attar.measure.report.svg import line, text

FONT = 12.0
SWATCH = 26.0  # pixels that a line and the gap after it take
LONGEST = 320.0


class LegendEntry(NamedTuple):
    """An entry of a legend.

    Attributes:
        class_: classes of its line: a colour, then ``dashed`` or ``spot`` where it is one; "" for no line.
        words: what it stands for.
    """

    class_: str
    words: str


def html_legend(keys: Sequence[LegendEntry]) -> Markup:
    """A paragraph of keys; the page breaks it."""
    items = [
        el("span", el("i", class_=f"swatch {key.class_}") if key.class_ else None, key.words, class_="key")
        for key in keys
    ]
    return el("p", items, class_="legend")


def svg_legend(
    keys: Sequence[LegendEntry], width: float, y: float, margin: float = 16.0
) -> tuple[Markup, float]:
    """Keys in lines that fit the width; returns also where the picture below may begin.

    Args:
        keys: none wider than the width.
        y: base line of the first line.
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
    """Words without their beginning where they are wider than so many pixels: names differ at their end."""
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
