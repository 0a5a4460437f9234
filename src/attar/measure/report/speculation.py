"""The picture of ``attar bench --speculate``: speedup by set and method, and how many drafts are accepted.

Bars begin at 1, the speed of plain decoding; whiskers are the 95 % interval, cut where the scale
ends. The scale is logarithmic: twice and half as fast are equally far from 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attar.measure.numbers import significant
from attar.measure.report.labels import FONT, cut, text_width
from attar.measure.report.markup import Markup, el, join
from attar.measure.report.svg import Axis, bottom_axis, left_axis, line, svg_file, text

WIDTH, PANEL, GAP, MARGIN = 860.0, 150.0, 36.0, 16.0
HEAD, BAR, BETWEEN = 20.0, 15.0, 12.0  # pixels of a set's name, of a bar, and between sets
NAMES, RESULTS = 220.0, 170.0  # of the longest name of a method, and of the figures on the right
COLOURS = 6
ACROSS = 3  # histograms side by side

ProfileRows = Sequence[Mapping[str, Any]]


def speculation_picture(profile: Mapping[str, Any]) -> str:
    """An SVG file of ``Profile.to_dict()``."""
    rows = [row for row in profile["rows"] if row["speedup"] is not None]
    methods = list(dict.fromkeys(row["method"] for row in rows))
    colour = {method: f"s{index % COLOURS}" for index, method in enumerate(methods)}
    bars, bottom = _bars(rows, colour, 44)
    counts, end = _histograms(rows, methods, colour, bottom + GAP)
    how = f"temperature {profile['temperature']:g}" if profile["temperature"] else "greedy"
    title = f"{cut(profile['model'])}: times as fast as plain decoding, {how}"
    head = text(MARGIN, 26, title, class_="label")
    return svg_file(WIDTH, end, title, head, bars, counts, corner=6.0)


def _bars(rows: ProfileRows, colour: Mapping[str, str], top: float) -> tuple[Markup, float]:
    """Horizontal bars by set and batch, each with its method on the left and its figures on the right."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    several = len({row["batch"] for row in rows}) > 1
    for row in rows:
        name = f"{row['set']}, {row['batch']} at a time" if several else row["set"]
        groups.setdefault(name, []).append(row)
    left = MARGIN + 10 + max((text_width(cut(method, NAMES), FONT) for method in colour), default=0.0)
    x = _axis(rows, left, WIDTH - MARGIN - RESULTS)
    bottom = top + sum(HEAD + len(group) * BAR + BETWEEN for group in groups.values())
    parts, y = [bottom_axis(x, top, bottom), line(x(1.0), top, x(1.0), bottom, "tick-mark")], top
    for name, group in groups.items():
        parts.append(text(MARGIN, y + HEAD - 6, cut(name, left - MARGIN), class_="panel-title"))
        y += HEAD
        for row in group:
            parts.append(_bar(row, x, y, colour[row["method"]]))
            y += BAR
        y += BETWEEN
    return join(parts), bottom + 24


def _axis(rows: ProfileRows, left: float, right: float) -> Axis:
    """A scale for all speedups; intervals are cut at twice the range."""
    values = [1.0, *(row["speedup"] for row in rows)]
    low = max(min([0.9, *(row["low"] for row in rows)]), min(values) / 2)
    high = min(max([1.1, *(row["high"] for row in rows)]), max(values) * 2)
    return Axis(low / 1.04, high * 1.04, left, right, log=True)


def _bar(row: Mapping[str, Any], x: Axis, y: float, colour: str) -> Markup:
    start, end = sorted((x(1.0), x(row["speedup"])))
    low, high = (x(min(max(row[key], x.low), x.high)) for key in ("low", "high"))
    middle = y + BAR / 2 - 1
    value, *bounds = (significant(row[key], 3) for key in ("speedup", "low", "high"))
    interval = f" ({bounds[0]} to {bounds[1]})" if row["low"] < row["high"] else ""
    return el(
        "g",
        el("title", f"{row['set']}, {row['method']}: {value}{interval}"),
        text(x.start - 10, middle + 4, cut(row["method"], NAMES), anchor="end", class_="tick"),
        el("rect", x=start, y=y, width=max(end - start, 1.0), height=BAR - 3, class_="point"),
        line(low, middle, high, middle, "arrow") if interval else None,
        text(x.end + 12, middle + 4, value + interval, class_="tick"),
        class_=colour,
    )


def _histograms(
    rows: ProfileRows, methods: Sequence[str], colour: Mapping[str, str], top: float
) -> tuple[Markup, float]:
    """For each method the share of passes with n accepted drafts, all sets together."""
    wide = (WIDTH - 2 * MARGIN - (ACROSS - 1) * GAP) / ACROSS
    title = "share of the passes with drafts by how many were accepted, all sets"
    parts, end = [text(MARGIN, top, title, class_="label")], top
    for index, method in enumerate(methods):
        x = MARGIN + index % ACROSS * (wide + GAP)
        y = top + 26 + index // ACROSS * (PANEL + GAP)
        counts = _summed([row["histogram"] for row in rows if row["method"] == method])
        parts.append(_histogram(method, counts, colour[method], x, y, wide))
        end = y + PANEL
    return join(parts), end + MARGIN


def _histogram(method: str, counts: Sequence[int], colour: str, x: float, y: float, wide: float) -> Markup:
    title = text(x, y, cut(method, wide), class_="panel-title")
    total = sum(counts)
    if not total:
        return join(title, text(x, y + 24, "nothing was drafted", class_="note"))
    shares = [count / total for count in counts]
    left, right, low, high = x + 34, x + wide, y + PANEL - 24, y + 16
    axis = Axis(0.0, max(shares), low, high)
    step = (right - left) / len(shares)
    bars = [
        el(
            "rect",
            el("title", f"{accepted} accepted: {share:.1%}"),
            x=left + accepted * step + 1,
            y=axis(share),
            width=max(step - 2, 0.5),
            height=low - axis(share),
            class_="point",
        )
        for accepted, share in enumerate(shares)
        if share
    ]
    every = -(-len(shares) // 8)
    marks = [
        text(left + (accepted + 0.5) * step, low + 16, str(accepted), anchor="middle", class_="tick")
        for accepted in range(0, len(shares), every)
    ]
    return join(title, left_axis(axis, left, right, 4), el("g", bars, class_=colour), marks)


def _summed(histograms: Sequence[Sequence[int]]) -> list[int]:
    longest = max(map(len, histograms), default=0)
    return [sum(counts[n] for counts in histograms if n < len(counts)) for n in range(longest)]
