"""Pictures of learned layer maps: which layers of the teacher each layer of a student came to follow.

A card's ``feature_map`` has ``weights``, a row for each student layer with a weight for each teacher layer
(attar.distillation.features.learned_map). What is no such matrix is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from attar.measure.numbers import percent
from attar.measure.report.labels import LegendEntry, html_legend
from attar.measure.report.markup import Markup, el
from attar.measure.report.svg import picture, text
from attar.measure.run_folder import RunRecord, StageRecord

WIDTH = 430.0
LABEL, TOP, LEAST_HEIGHT = 60.0, 26.0, 12.0  # pixels: of a row's name, above the first row, of a row
LIGHTEST = 0.04  # opacity of weight 0, so that every cell can be seen


def layer_map_pictures(run: RunRecord) -> Markup | None:
    """The map of every stage that learned one; None without any."""
    maps = [(stage, weights) for stage in run.stages if (weights := _weights(stage))]
    return el("div", [_map(stage, weights) for stage, weights in maps], class_="curves") if maps else None


def _weights(stage: StageRecord) -> list[list[float]]:
    """The matrix; empty where the card has none."""
    record = stage.details.get("feature_map")
    rows = record.get("weights") if isinstance(record, Mapping) else None
    if not isinstance(rows, list) or not all(_is_row(row, rows[0]) for row in rows):
        return []
    return [[float(weight) for weight in row] for row in rows]


def _is_row(row: Any, first: Any) -> bool:
    """Weights between 0 and 1, as many as in the first row."""
    if not isinstance(row, list) or not row or len(row) != len(first):
        return False
    return all(isinstance(x, int | float) and math.isfinite(x) and 0 <= x <= 1 for x in row)


def _map(stage: StageRecord, weights: Sequence[Sequence[float]]) -> Markup:
    """A row for each layer of the student, a column for each of the teacher: the darker, the more weight."""
    columns = len(weights[0])
    wide = min((WIDTH - LABEL - 8) / columns, 30.0)
    high = max(min(wide, 18.0), LEAST_HEIGHT)
    cells, names = [], []
    for row, line in enumerate(weights):
        down = TOP + row * high
        heaviest = max(range(columns), key=line.__getitem__)
        for column, weight in enumerate(line):
            words = f"student layer {row}, teacher layer {column}: {percent(weight)} %"
            size = {"x": LABEL + column * wide, "y": down, "width": wide - 1, "height": high - 1}
            marked = "point ring" if column == heaviest else "point"
            opacity = round(max(weight, LIGHTEST), 2)
            cells.append(el("rect", el("title", words), **size, class_=marked, fill_opacity=opacity))
        names.append(text(LABEL - 8, down + 0.75 * high, str(row), anchor="end", class_="tick"))
    bottom = TOP + len(weights) * high
    every = -(-columns // 12)
    numbers = [
        text(LABEL + (column + 0.5) * wide, bottom + 14, str(column), anchor="middle", class_="tick")
        for column in range(0, columns, every)
    ]
    chart = picture(
        WIDTH,
        bottom + 36,
        f"{stage.name}: weights of the teacher's layers for each layer of the student",
        text(0, 14, f"{stage.name}: student layer by teacher layer", class_="panel-title"),
        names,
        el("g", cells, class_="s1"),
        numbers,
        text(LABEL + columns * wide / 2, bottom + 32, "teacher layer", anchor="middle", class_="axis-title"),
        class_="picture curve",
    )
    note = "light 0 to dark 100 % of a row; framed: its heaviest, the map that it comes down to"
    return el("figure", chart, html_legend([LegendEntry("s1 spot", note)]))
