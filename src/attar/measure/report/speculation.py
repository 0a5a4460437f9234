"""The picture of ``attar bench --speculate``: speedup by set and method, and how many drafts are accepted.

Bars begin at 1, where plain decoding is; whiskers are the 95 % interval.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attar.measure.numbers import significant
from attar.measure.report.axis import Axis
from attar.measure.report.labels import text_width
from attar.measure.report.legend import Key, svg_legend
from attar.measure.report.markup import Markup, el, join
from attar.measure.report.svg import bottom_axis, left_axis, line, picture, style, text

WIDTH, PANEL, GAP = 860.0, 150.0, 36.0
BAR, BETWEEN = 15.0, 14.0  # pixels of a bar, and between sets
COLOURS = 6
ACROSS = 3  # histograms side by side

Rows = Sequence[Mapping[str, Any]]


def speculation_picture(found: Mapping[str, Any]) -> str:
    """A whole SVG file.

    Args:
        found: what ``Profile.to_dict`` gives, JSON or not.
    """
    rows = [row for row in found["rows"] if row["speedup"] is not None]
    methods = list(dict.fromkeys(row["method"] for row in rows))
    colour = {method: f"s{place % COLOURS}" for place, method in enumerate(methods)}
    keys = [Key(colour[method], method) for method in methods]
    legend, top = svg_legend(keys, WIDTH, 50)
    bars, bottom = _bars(rows, colour, top + 4)
    counts, end = _histograms(rows, methods, colour, bottom + GAP)
    title = f"{found['model']}: times as fast as plain decoding, greedy"
    if found["temperature"]:
        title = f"{found['model']}: times as fast as plain decoding, temperature {found['temperature']:g}"
    card = el("rect", x=0.5, y=0.5, width=WIDTH - 1, height=end - 1, rx=6.0, class_="card")
    head = text(16, 26, title, class_="label")
    return picture(WIDTH, end, title, el("style", style("picture")), card, head, legend, bars, counts) + "\n"


def _bars(rows: Rows, colour: Mapping[str, str], top: float) -> tuple[Markup, float]:
    """Horizontal bars by set and batch."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    several = len({row["batch"] for row in rows}) > 1
    for row in rows:
        groups.setdefault(f"{row['set']}, {row['batch']}" if several else row["set"], []).append(row)
    left = 28 + max((text_width(name, 12) for name in groups), default=0.0)
    right, height = WIDTH - 70, sum(len(each) * BAR + BETWEEN for each in groups.values())
    low = min([0.9, *(row["low"] for row in rows)])
    x = Axis(max(low - 0.05, 0.0), max([1.2, *(row["high"] for row in rows)]) * 1.02, left, right)
    bottom, y = top + height + 6, top + 10
    parts = [bottom_axis(x, top, bottom), line(x(1.0), top, x(1.0), bottom, "tick-mark")]
    for name, each in groups.items():
        parts.append(text(left - 10, y + len(each) * BAR / 2 + 3, name, anchor="end"))
        for row in each:
            parts.append(_bar(row, x, y, colour[row["method"]]))
            y += BAR
        y += BETWEEN
    return join(parts), bottom + 24


def _bar(row: Mapping[str, Any], x: Axis, y: float, colour: str) -> Markup:
    start, end = sorted((x(1.0), x(row["speedup"])))
    middle = y + BAR / 2 - 1
    words = f"{row['set']}, {row['method']}: {significant(row['speedup'], 3)}"
    reach = f" ({significant(row['low'], 3)} to {significant(row['high'], 3)})"
    return el(
        "g",
        el("title", words + reach),
        el("rect", x=start, y=y, width=max(end - start, 1.0), height=BAR - 3, class_="mark"),
        line(x(row["low"]), middle, x(row["high"]), middle, "leader"),
        text(x(max(row["high"], 1.0)) + 6, middle + 4, f"{row['speedup']:.2f}", class_="tick"),
        class_=colour,
    )


def _histograms(
    rows: Rows, methods: Sequence[str], colour: Mapping[str, str], top: float
) -> tuple[Markup, float]:
    """For each method the share of passes with n accepted drafts, all sets together."""
    wide = (WIDTH - 32 - (ACROSS - 1) * GAP) / ACROSS
    parts, end = [], top
    for place, method in enumerate(methods):
        x = 16 + place % ACROSS * (wide + GAP)
        y = top + place // ACROSS * (PANEL + GAP)
        counts = _summed([row["histogram"] for row in rows if row["method"] == method])
        parts.append(_histogram(method, counts, colour[method], x, y, wide))
        end = y + PANEL
    return join(parts), end + GAP


def _histogram(method: str, counts: Sequence[int], colour: str, x: float, y: float, wide: float) -> Markup:
    title = text(x, y, f"{method}: accepted drafts of a pass", class_="panel-title")
    total = sum(counts)
    if not total:
        return join(title, text(x, y + 24, "nothing was drafted", class_="note"))
    shares = [count / total for count in counts]
    left, right, low, high = x + 34, x + wide, y + PANEL - 24, y + 16
    axis = Axis(0.0, max(shares) * 1.05, low, high)
    step = (right - left) / len(shares)
    bars = [
        el(
            "rect",
            el("title", f"{place} accepted: {share:.1%}"),
            x=left + place * step + 1,
            y=axis(share),
            width=max(step - 2, 0.5),
            height=low - axis(share),
            class_="mark",
        )
        for place, share in enumerate(shares)
    ]
    every = -(-len(shares) // 8)
    marks = [
        text(left + (place + 0.5) * step, low + 16, str(place), anchor="middle", class_="tick")
        for place in range(0, len(shares), every)
    ]
    return join(title, left_axis(axis, left, right, 4), el("g", bars, class_=colour), marks)


def _summed(histograms: Sequence[Sequence[int]]) -> list[int]:
    longest = max(map(len, histograms), default=0)
    return [sum(each[place] for each in histograms if place < len(each)) for place in range(longest)]
