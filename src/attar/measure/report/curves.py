"""Training curves: the loss of every stage that trained, step by step, and what it measured on held-out
text on the way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from attar.measure.numbers import significant
from attar.measure.report.axis import fit
from attar.measure.report.labels import PixelPoint
from attar.measure.report.markup import Markup, el
from attar.measure.report.svg import bottom_axis, left_axis, picture, polyline, text
from attar.measure.run_folder import RunRecord, StageRecord

WIDTH, HEIGHT = 430.0, 240.0
MOST = 300  # points drawn; longer curves are averaged in buckets
LOSS = "loss"


def curve_pictures(run: RunRecord) -> Markup | None:
    """One picture per stage that trained; None where none did."""
    drawn = [_curve(stage) for stage in run.stages if len(_points(stage.rows("curve"), LOSS)) > 1]
    return el("div", drawn, class_="curves") if drawn else None


def held_out_key(rows: list[Mapping[str, Any]]) -> str | None:
    """The name under which a curve holds its held-out loss, if any row does."""
    keys = dict.fromkeys(key for row in rows for key in row)
    return next(
        (key for key in keys if key != LOSS and ("eval" in key or "held" in key or "valid" in key)), None
    )


def smooth(points: list[PixelPoint]) -> list[PixelPoint]:
    """A running mean over a fortieth of the points on both sides."""
    reach = max(1, len(points) // 40)
    windows = (points[max(0, i - reach) : i + reach + 1] for i in range(len(points)))
    return [
        (point[0], sum(y for _, y in window) / len(window))
        for point, window in zip(points, windows, strict=True)
    ]


def thin(points: list[PixelPoint], most: int = MOST) -> list[PixelPoint]:
    """At most ``most`` points: the mean of each bucket of neighbours."""
    size = -(-len(points) // most)
    buckets = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(x for x, _ in each) / len(each), sum(y for _, y in each) / len(each)) for each in buckets]


def _curve(stage: StageRecord) -> Markup:
    rows = stage.rows("curve")
    key = held_out_key(rows)
    loss = thin(_points(rows, LOSS))
    held_out = _points(rows, key) if key else []
    left, right, top, bottom = 48.0, WIDTH - 12.0, 30.0, HEIGHT - 28.0
    x = fit([step for step, _ in (*loss, *held_out)], left, right, margin=0.01)
    y = fit([value for _, value in (*smooth(loss), *held_out)], bottom, top, margin=0.1)

    def drawn(points: list[PixelPoint]) -> list[PixelPoint]:
        return [(x(step), min(max(y(value), top), bottom)) for step, value in points]

    dots = [
        el(
            "circle",
            el("title", f"step {step:.0f}: {significant(value)}"),
            cx=px,
            cy=py,
            r=3.0,
            class_="point",
        )
        for (step, value), (px, py) in zip(held_out, drawn(held_out), strict=True)
    ]
    chart = picture(
        WIDTH,
        HEIGHT,
        f"loss of {stage.name} by step",
        left_axis(y, left, right, 5),
        bottom_axis(x, top, bottom, 6, grid=False),
        text(0, 14, f"{stage.name}: loss by step", class_="panel-title"),
        el(
            "g",
            polyline(drawn(loss), class_="raw"),
            polyline(drawn(smooth(loss)), class_="series"),
            class_="s0",
        ),
        el("g", polyline(drawn(held_out), class_="series"), dots, class_="s1") if held_out else None,
        class_="picture curve",
    )
    legend = el("p", _key(0, "training"), _key(1, "held-out") if held_out else None, class_="legend")
    return el("figure", chart, legend)


def _key(colour: int, words: str) -> Markup:
    return el("span", el("i", class_=f"swatch s{colour}"), words, class_="key")


def _points(rows: list[Mapping[str, Any]], key: str) -> list[PixelPoint]:
    found = []
    for row in rows:
        step, value = row.get("step"), row.get(key)
        if isinstance(step, (int, float)) and isinstance(value, (int, float)) and math.isfinite(value):
            found.append((float(step), float(value)))
    return found
