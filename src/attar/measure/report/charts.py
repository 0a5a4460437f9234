"""Line charts: training loss by step; relative output error, and fraction of zeros, by layer.

Stages that quantized or pruned the same parent share a panel per kind of layer. A quantizing sweep also
reports the error of round-to-nearest on the same inputs, which is drawn too. Where only weight errors are
known (round-to-nearest and magnitude read no data), those are drawn. All panels have one scale, from zero.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from attar.measure.numbers import significant
from attar.measure.report.labels import LegendEntry, html_legend
from attar.measure.report.markup import Markup, el, join
from attar.measure.report.svg import (
    Axis,
    PixelPoint,
    bottom_axis,
    fit,
    from_zero,
    left_axis,
    picture,
    point,
    polyline,
    text,
)
from attar.measure.run_folder import RunRecord, StageRecord

CURVE_WIDTH, CURVE_HEIGHT = 430.0, 240.0
MAX_POINTS = 300  # longer curves are averaged in buckets
LOSS = "loss"
PANEL_WIDTH, PANEL_HEIGHT = 236.0, 168.0
EVEN = 0.001  # fractions of zeros that differ by less are the same
SERIES = 4  # colours in the style sheet


def curve_pictures(run: RunRecord) -> Markup | None:
    """A picture for every stage that trained; None without any."""
    drawn = [_curve(stage) for stage in run.stages if len(_points(stage.rows("curve"), LOSS)) > 1]
    return el("div", drawn, class_="curves") if drawn else None


def held_out_key(rows: list[Mapping[str, Any]]) -> str | None:
    """The key of the held-out loss in a curve's rows, if there is one."""
    keys = dict.fromkeys(key for row in rows for key in row)
    return next(
        (key for key in keys if key != LOSS and ("eval" in key or "held" in key or "valid" in key)), None
    )


def smooth(points: list[PixelPoint]) -> list[PixelPoint]:
    """A running mean over a fortieth of the points on both sides."""
    reach = max(1, len(points) // 40)
    windows = (points[max(0, i - reach) : i + reach + 1] for i in range(len(points)))
    return [
        (x, sum(y for _, y in window) / len(window)) for (x, _), window in zip(points, windows, strict=True)
    ]


def thin(points: list[PixelPoint], most: int = MAX_POINTS) -> list[PixelPoint]:
    """At most ``most`` points: the mean of each bucket of neighbours."""
    size = -(-len(points) // most)
    buckets = [points[i : i + size] for i in range(0, len(points), size)]
    return [
        (sum(x for x, _ in bucket) / len(bucket), sum(y for _, y in bucket) / len(bucket))
        for bucket in buckets
    ]


def _curve(stage: StageRecord) -> Markup:
    rows = stage.rows("curve")
    key = held_out_key(rows)
    loss = thin(_points(rows, LOSS))
    held_out = _points(rows, key) if key else []
    left, right, top, bottom = 48.0, CURVE_WIDTH - 12.0, 30.0, CURVE_HEIGHT - 28.0
    x = fit([step for step, _ in (*loss, *held_out)], left, right, margin=0.01)
    y = fit([value for _, value in (*smooth(loss), *held_out)], bottom, top, margin=0.1)

    def drawn(points: list[PixelPoint]) -> list[PixelPoint]:
        return [(x(step), min(max(y(value), top), bottom)) for step, value in points]

    dots = [
        point(f"step {step:.0f}: {significant(value)}", *pixel)
        for (step, value), pixel in zip(held_out, drawn(held_out), strict=True)
    ]
    chart = picture(
        CURVE_WIDTH,
        CURVE_HEIGHT,
        f"loss of {stage.name} by step",
        left_axis(y, left, right, 5),
        bottom_axis(x, top, bottom, 6, grid=False),
        text(0, 14, f"{stage.name}: loss by step", class_="panel-title"),
        el("g", polyline(drawn(loss), "raw"), polyline(drawn(smooth(loss)), "series"), class_="s0"),
        el("g", polyline(drawn(held_out), class_="series"), dots, class_="s1") if held_out else None,
        class_="picture curve",
    )
    keys = [LegendEntry("s0", "training"), LegendEntry("s1", "held-out")]
    return el("figure", chart, html_legend(keys if held_out else keys[:1]))


def _points(rows: list[Mapping[str, Any]], key: str) -> list[PixelPoint]:
    points = []
    for row in rows:
        step, value = row.get("step"), row.get(key)
        if isinstance(step, (int, float)) and isinstance(value, (int, float)) and math.isfinite(value):
            points.append((float(step), float(value)))
    return points


@dataclass(frozen=True)
class Series:
    """A number of each layer by its name, such as the relative output error, of one stage."""

    label: str
    values: Mapping[str, float]


def layer_pictures(run: RunRecord) -> Markup | None:
    """Panels for every parent whose quantization or pruning reported errors of layers; None without any."""
    return _panels(run, series_of, "relative output error")


def zeros_pictures(run: RunRecord) -> Markup | None:
    """Panels for every parent whose pruning set zeros, not as many in each layer; None without any."""
    return _panels(run, uneven_zeros, "fraction of zeros")


def _panels(run: RunRecord, choose: Callable[[list[StageRecord]], list[Series]], what: str) -> Markup | None:
    groups: dict[str, list[StageRecord]] = {}
    for stage in run.stages:
        groups.setdefault(stage.parents[0] if stage.parents else "", []).append(stage)
    known = {parent: series for parent, stages in groups.items() if (series := choose(stages))}
    drawn = [_group(parent, series, len(known) > 1, what) for parent, series in known.items()]
    return join(drawn) if drawn else None


def uneven_zeros(stages: list[StageRecord]) -> list[Series]:
    """Fractions of zeros of the stages with one parent in which layers differ."""
    series = [Series(stage.name, _numbers(stage, "sparsity")) for stage in stages]
    return [
        curve
        for curve in series
        if curve.values and max(curve.values.values()) - min(curve.values.values()) > EVEN
    ]


def series_of(stages: list[StageRecord]) -> list[Series]:
    """Series of stages with one parent: output errors, with round-to-nearest's once; else weight errors; else
    none.

    The largest come first, so that the better ones are drawn above them.
    """
    series = [Series(stage.name, _numbers(stage, "error")) for stage in stages]
    rounded = (errors for stage in stages if (errors := _numbers(stage, "rtn_error")))
    series.append(Series("round to nearest", next(rounded, {})))
    if not any(curve.values for curve in series):
        series = [
            Series(f"{stage.name} (error of the weights)", _numbers(stage, "weight_error"))
            for stage in stages
        ]
    known = [curve for curve in series if curve.values]
    return sorted(known, key=lambda curve: -sum(curve.values.values()) / len(curve.values))


def _numbers(stage: StageRecord, key: str) -> dict[str, float]:
    values = {}
    for row in stage.rows("layers"):
        name, value = row.get("name"), row.get(key)
        if isinstance(name, str) and isinstance(value, (int, float)):
            values[name] = float(value)
    return values


def split_name(name: str) -> tuple[int | None, str]:
    """Block number and kind of a layer: ``model.layers.3.mlp.up_proj`` is (3, "mlp.up_proj")."""
    match = re.search(r"(?:^|\.)(\d+)\.(.+)$", name)
    return (int(match[1]), match[2]) if match else (None, name)


def _group(parent: str, series: list[Series], several: bool, what: str) -> Markup:
    kinds: dict[str, None] = {}
    for curve in series:
        kinds.update(dict.fromkeys(split_name(name)[1] for name in curve.values))
    high = max(error for curve in series for error in curve.values.values())
    panels = [_panel(kind, series, high, what) for kind in kinds]
    heading = el("h3", f"from {parent}") if several else None
    legend = html_legend(
        [LegendEntry(f"s{number % SERIES}", curve.label) for number, curve in enumerate(series)]
    )
    return join(heading, legend, el("div", panels, class_="panels"))


def _panel(kind: str, series: list[Series], high: float, what: str) -> Markup:
    tables = [_by_block(curve, kind) for curve in series]
    blocks = sorted({block for table in tables for block in table})
    left, right, top, bottom = 42.0, PANEL_WIDTH - 8.0, 30.0, PANEL_HEIGHT - 26.0
    y = from_zero([high], bottom, top)
    x = fit([float(block) for block in blocks], left, right, margin=0.07)
    lines = [
        _series_line(curve.label, table, x, y, number % SERIES)
        for number, (curve, table) in enumerate(zip(series, tables, strict=True))
        if table
    ]
    numbers = [
        text(x(block), bottom + 17, str(block), anchor="middle", class_="tick") for block in _sparse(blocks)
    ]
    return picture(
        PANEL_WIDTH,
        PANEL_HEIGHT,
        f"{what} of {kind}, block by block",
        text(0, 14, kind, class_="panel-title"),
        left_axis(y, left, right, 4),
        numbers,
        lines,
        class_="picture panel",
    )


def _by_block(series: Series, kind: str) -> dict[int, float]:
    parts = ((split_name(name), error) for name, error in series.values.items())
    return {block or 0: error for (block, part), error in parts if part == kind}


def _series_line(label: str, table: dict[int, float], x: Axis, y: Axis, colour: int) -> Markup:
    points = [(x(block), y(error)) for block, error in sorted(table.items())]
    dots = [
        point(f"{label}, block {block}: {significant(table[block])}", *pixel)
        for block, pixel in zip(sorted(table), points, strict=True)
    ]
    return el("g", polyline(points, class_="series"), dots, class_=f"s{colour}")


def _sparse(blocks: list[int], most: int = 9) -> list[int]:
    """At most ``most`` evenly spread block numbers."""
    return blocks[:: -(-len(blocks) // most)]
