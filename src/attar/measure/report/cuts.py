"""Pictures of a pruning scan: quality against amount, and what each layer costs when it is cut alone.

The rows are those of a card's ``scan`` (attar.pruning.planning.scan): KL of the whole model to the one
cut, in nats a token, ``share`` of the parameters that go. ``plans`` are those measured as a whole, ``plan``
the one that was cut. Invalid rows are left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from attar.measure.numbers import percent, significant
from attar.measure.report.labels import LegendEntry, html_legend
from attar.measure.report.markup import Markup, el
from attar.measure.report.svg import (
    Axis,
    PixelPoint,
    bottom_axis,
    fit,
    left_axis,
    picture,
    point,
    polyline,
    text,
)
from attar.measure.run_folder import RunRecord, StageRecord

WIDTH, HEIGHT = 430.0, 280.0
NAMES = {"heads": "head groups", "neurons": "neurons", "hidden": "channels", "layers": "layers"}
FLOOR = 1e-4  # nats a token: smaller KLs are drawn there
LABEL = 104.0  # pixels of a row's name
DARKEST = 0.92  # opacity of the largest KL

CutRow = Mapping[str, Any]


def scan_pictures(run: RunRecord) -> Markup | None:
    """Both pictures of every stage with a scan; None without any."""
    drawn = [picture for stage in run.stages for picture in _pictures(stage)]
    return el("div", drawn, class_="curves") if drawn else None


def _pictures(stage: StageRecord) -> list[Markup]:
    rows = [row for row in stage.rows("scan") if _is_cut(row)]
    even = [row for row in rows if row.get("layer") is None and _is_drawn(row)]
    alone = [row for row in rows if isinstance(row.get("layer"), int)]
    figures = []
    if even:
        figures.append(_amounts(stage, even))
    if alone:
        figures.append(_layers(stage, alone))
    return figures


def _amounts(stage: StageRecord, rows: Sequence[CutRow]) -> Markup:
    """KL against the share of the parameters that go, a line for each structure; plans are points."""
    plans = [
        row for row in stage.rows("plans") if _kl(row) is not None and _number(row.get("share")) is not None
    ]
    left, right, top, bottom = 52.0, WIDTH - 12.0, 30.0, HEIGHT - 44.0
    everything = [*rows, *plans]
    x = Axis(0.0, 100 * max(float(row["share"]) for row in everything) * 1.05, left, right)
    y = fit([_drawn(row) for row in everything], bottom, top, log=True)
    lines, legend = [], []
    for number, (name, noun) in enumerate(NAMES.items()):
        points = sorted((float(row["share"]), _drawn(row), row) for row in rows if row["structure"] == name)
        if points:
            lines.append(_line(noun, points, x, y, f"s{number}"))
            legend.append(LegendEntry(f"s{number}", noun))
    marks = [
        point(f"{row.get('plan')}: KL {significant(_kl(row))}", x(100 * float(row["share"])), y(_drawn(row)))
        for row in plans
    ]
    chosen = stage.details.get("plan")
    ring = None
    if isinstance(chosen, Mapping) and _kl(chosen) is not None and _number(chosen.get("share")) is not None:
        centre = x(100 * float(chosen["share"])), y(_drawn(chosen))
        ring = el(
            "circle", el("title", str(chosen.get("plan"))), cx=centre[0], cy=centre[1], r=7.0, class_="ring"
        )
    if marks:
        legend.append(LegendEntry("s4 spot", "plans measured as a whole; the ring: the one that was cut"))
    chart = picture(
        WIDTH,
        HEIGHT,
        f"{stage.name}: KL against the share of the parameters that a cut removes",
        left_axis(y, left, right, 6),
        bottom_axis(x, top, bottom, 6, grid=False),
        text(0, 14, f"{stage.name}: KL by amount of uniform cuts", class_="panel-title"),
        text(right, HEIGHT - 6, "parameters removed, %", anchor="end", class_="axis-title"),
        lines,
        el("g", marks, class_="s4") if marks else None,
        ring,
        class_="picture curve",
    )
    return el("figure", chart, html_legend(legend))


def _line(noun: str, points: Sequence[tuple[float, float, CutRow]], x: Axis, y: Axis, colour: str) -> Markup:
    pixels: list[PixelPoint] = [(x(100 * share), y(kl)) for share, kl, _ in points]
    dots = [
        point(
            f"{row['kept']} of {row['of']} {noun}, {percent(share)} % removed: KL {significant(_kl(row))}",
            *pixel,
        )
        for (share, _, row), pixel in zip(points, pixels, strict=True)
    ]
    return el("g", polyline(pixels, "series"), dots, class_=colour)


def _layers(stage: StageRecord, rows: Sequence[CutRow]) -> Markup:
    """A row for each amount, a column for each layer: the darker, the larger the KL of that cut alone."""
    amounts = list(dict.fromkeys((row["structure"], row["kept"], row["of"]) for row in rows))
    amounts.sort(key=lambda amount: (list(NAMES).index(amount[0]), -amount[1]))
    layers = sorted({int(row["layer"]) for row in rows})
    cell = min((WIDTH - LABEL - 8) / len(layers), 30.0)
    high, top = 18.0, 26.0
    shade = fit([_drawn(row) for row in rows], 0.04, DARKEST, log=True, margin=0.0)
    cells = []
    for row in rows:
        left = LABEL + layers.index(int(row["layer"])) * cell
        down = top + amounts.index((row["structure"], row["kept"], row["of"])) * high
        words = f"layer {row['layer']}, {_amount(row)}: KL {significant(_kl(row))}"
        opacity = round(min(max(shade(_drawn(row)), 0.04), DARKEST), 2)
        size = {"width": cell - 1, "height": high - 1}
        cells.append(
            el("rect", el("title", words), x=left, y=down, **size, class_="point", fill_opacity=opacity)
        )
    names = [
        text(LABEL - 8, top + (number + 0.7) * high, _amount_words(*amount), anchor="end", class_="tick")
        for number, amount in enumerate(amounts)
    ]
    bottom = top + len(amounts) * high
    every = -(-len(layers) // 12)
    numbers = [
        text(LABEL + (index + 0.5) * cell, bottom + 14, str(layer), anchor="middle", class_="tick")
        for index, layer in enumerate(layers)
        if index % every == 0
    ]
    chart = picture(
        WIDTH,
        bottom + 22,
        f"{stage.name}: KL of cutting one layer alone",
        text(0, 14, f"{stage.name}: KL of one layer cut alone", class_="panel-title"),
        names,
        el("g", cells, class_="s4"),
        numbers,
        class_="picture curve",
    )
    kls = [_kl(row) or 0.0 for row in rows]
    scale = f"light {significant(min(kls), 2)} to dark {significant(max(kls), 2)} nats a token, logarithmic"
    return el("figure", chart, html_legend([LegendEntry("s4 spot", scale)]))


def _amount(row: CutRow) -> str:
    return _amount_words(row["structure"], row["kept"], row["of"])


def _amount_words(structure: str, kept: int, of: int) -> str:
    return "left out" if structure == "layers" else f"{NAMES[structure]} {kept}/{of}"


def _drawn(row: CutRow) -> float:
    """The KL at which a row is drawn."""
    return max(_kl(row) or 0.0, FLOOR)


def _kl(row: CutRow) -> float | None:
    return _number(row.get("kl"))


def _is_cut(row: CutRow) -> bool:
    counts = isinstance(row.get("kept"), int) and isinstance(row.get("of"), int)
    return row.get("structure") in NAMES and counts and _kl(row) is not None


def _is_drawn(row: CutRow) -> bool:
    return _kl(row) is not None and _number(row.get("share")) is not None


def _number(value: Any) -> float | None:
    """A finite number, or None."""
    known = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if known else None
