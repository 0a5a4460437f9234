"""The picture of size against quality: every stage, with arrows from parent to child.

x: bytes, logarithmic. y: KL to the original, logarithmic, lower is better, over four decades at most: smaller
ones (the original's, which is the noise of float32) have a line of their own below. Without KL, y is the
perplexity.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from attar.checkpoint.atomic import write_bytes
from attar.measure.numbers import NOISE, megabytes, nats, percent
from attar.measure.report.labels import LabelBox, place_labels, text_width
from attar.measure.report.markup import Markup, el, join
from attar.measure.report.svg import (
    Axis,
    PixelPoint,
    arrow,
    bottom_axis,
    fit,
    left_axis,
    line,
    picture,
    polyline,
    style,
    text,
    tick_text,
    verb_class,
)
from attar.measure.run_folder import RunRecord, StageRecord

RADIUS = 6.0
ZERO_BAND = 44.0  # pixels between the lowest KL on the axis and the line of those below it
DECADES = 4  # of KL on the axis at most
NAME, NOTE = 13.0, 11.0  # font sizes of a label's two lines


@dataclass(frozen=True)
class Frame:
    """The plot's rectangle and its axes; ``zero`` is the pixel row of KLs up to ``floor``, None without."""

    left: float
    top: float
    right: float
    bottom: float
    x: Axis
    y: Axis
    zero: float | None
    floor: float

    def at(self, stage: StageRecord, key: str) -> PixelPoint:
        """The pixel of a stage."""
        value = stage.number(key) or 0.0
        row = self.zero if value <= self.floor and self.zero is not None else self.y(value)
        return self.x((stage.number("bytes") or 0.0) / 1e6), row


def quality_picture(run: RunRecord, width: float, height: float, front: Sequence[str] = ()) -> Markup | None:
    """The picture as an ``svg`` element; None for fewer than two measured stages.

    Args:
        front: names of the stages on the Pareto front, which a line joins.
    """
    key = "kl_mean" if any(stage.number("kl_mean") for stage in run.stages) else "perplexity"
    shown = [stage for stage in run.stages if stage.number("bytes") and stage.number(key) is not None]
    if len(shown) < 2:
        return None
    frame = _frame(shown, key, width, height)
    points = {stage.name: frame.at(stage, key) for stage in shown}
    arrows = []
    for stage in shown:
        parent = run.parent(stage)
        if parent is not None and parent.name in points:
            arrows.append(arrow(points[parent.name], points[stage.name], RADIUS))
    joined = [points[name] for name in front if name in points]
    return picture(
        width,
        height,
        "size against quality of every stage",
        _axes(run, frame, key, height),
        [drawn for drawn, _ in arrows],
        el("g", polyline(joined, "series"), class_="s1") if len(joined) > 1 else None,
        [_mark(run, stage, points[stage.name], front) for stage in shown],
        _labels(
            run,
            shown,
            points,
            frame,
            [path for _, path in arrows if path] + _zero_line(frame) + ([joined] if joined else []),
            narrow=width < 600,
        ),
        class_="picture quality",
    )


def write_quality_svg(
    run: RunRecord, path: str | Path, width: float = 880, height: float = 460, front: Sequence[str] = ()
) -> Path:
    """Write the picture as an SVG file with its style sheet.

    Raises:
        OutputError: the file cannot be written.
    """
    write_bytes(Path(path), quality_svg(run, width, height, front).encode())
    return Path(path)


def quality_svg(run: RunRecord, width: float = 880, height: float = 460, front: Sequence[str] = ()) -> str:
    """The picture with its style sheet, as the text of an SVG file."""
    drawn = quality_picture(run, width, height, front) or picture(
        width, 60, "nothing to show", text(16, 34, "fewer than two stages were measured")
    )
    card = el("rect", x=0.5, y=0.5, width=width - 1, height=height - 1, rx=10, class_="card")
    cut = drawn.index(">") + 1
    return drawn[:cut] + el("style", style("picture")) + card + drawn[cut:] + "\n"


def _frame(shown: list[StageRecord], key: str, width: float, height: float) -> Frame:
    left, top, right, bottom = 64.0, 46.0, width - 20.0, height - 48.0
    values = [stage.number(key) or 0.0 for stage in shown]
    floor = _floor(values) if key == "kl_mean" else 0.0
    zero = bottom - 14 if key == "kl_mean" and min(values) <= floor else None
    low = bottom if zero is None else zero - ZERO_BAND
    margin = 0.1 if width >= 600 else 0.12
    x = fit([(stage.number("bytes") or 0.0) / 1e6 for stage in shown], left, right, log=True, margin=margin)
    y = fit([value for value in values if value > floor], low, top, log=True, margin=0.12)
    return Frame(left, top, right, bottom, x, y, zero, floor if any(values) else 0.0)


def _floor(values: Sequence[float]) -> float:
    """The power of ten below which KLs share a line: that of noise, or so many decades below the highest."""
    highest = max(values)
    if highest <= NOISE:  # nothing but noise
        return 0.0
    lowest: float = 10.0 ** (math.ceil(math.log10(highest)) - DECADES)
    return max(NOISE, lowest)


def _axes(run: RunRecord, frame: Frame, key: str, height: float) -> Markup:
    title = "KL to the original, nats per token" if key == "kl_mean" else "perplexity on held-out text"
    low = frame.y.start
    parts = [left_axis(frame.y, frame.left, frame.right, 6), bottom_axis(frame.x, frame.top, frame.bottom)]
    parts.append(text(frame.left, 20, f"↑ {title}", class_="axis-title"))
    parts.append(text(frame.right, height - 8, "MB →", anchor="end", class_="axis-title"))
    parts.append(text(frame.left, height - 8, "↙ smaller and closer is better", class_="axis-title"))
    parts.append(_smaller(run, frame))
    if frame.zero is not None:
        middle = (low + frame.zero) / 2
        parts.append(line(frame.left, frame.zero, frame.right, frame.zero, class_="zero"))
        below = f"<{tick_text(frame.floor)}" if frame.floor else "0"
        parts.append(text(frame.left - 8, frame.zero + 4, below, anchor="end", class_="tick"))
        parts.append(text(frame.left - 14, middle + 4, "⋮", anchor="middle", class_="tick"))
    return join(parts)


def _zero_line(frame: Frame) -> list[list[PixelPoint]]:
    return [] if frame.zero is None else [[(frame.left, frame.zero), (frame.right, frame.zero)]]


def _smaller(run: RunRecord, frame: Frame) -> Markup:
    """Along the top: how many times smaller than the original."""
    original_mb = (run.original.number("bytes") or 0.0) / 1e6
    parts: list[Markup] = []
    for factor in (1, 2, 4, 8, 16, 32, 64):
        if original_mb and frame.x.low <= original_mb / factor <= frame.x.high:
            x = frame.x(original_mb / factor)
            parts.append(line(x, frame.top - 4, x, frame.top, class_="tick-mark"))
            parts.append(
                text(
                    x,
                    frame.top - 8,
                    f"{factor}x smaller" if factor == 2 else f"{factor}x",
                    anchor="middle",
                    class_="tick",
                )
            )
    return join(parts)


def _mark(run: RunRecord, stage: StageRecord, point: PixelPoint, front: Sequence[str]) -> Markup:
    x, y = point
    ringed = stage.name in front if front else stage is run.last
    ring = el("circle", cx=x, cy=y, r=RADIUS + 4.5, class_="ring") if ringed else None
    return el(
        "g",
        el("title", f"{stage.name}: {_note(run, stage)}"),
        ring,
        el("circle", cx=x, cy=y, r=RADIUS, class_=f"mark {verb_class(stage.verb)}"),
    )


def _note(run: RunRecord, stage: StageRecord, *, short: bool = False) -> str:
    """The second line of a label; the short one omits what the axes show."""
    size = f"{megabytes(stage.number('bytes'))} MB"
    if stage is run.original:
        return size
    kl, kept = stage.number("kl_mean"), stage.number("top1_agreement")
    agreed = f"top-1 {percent(kept)} %" if kept is not None else None
    if short:
        return agreed or size
    return ", ".join(part for part in (size, f"KL {nats(kl, 2)}" if kl is not None else None, agreed) if part)


def _labels(
    run: RunRecord,
    shown: list[StageRecord],
    points: dict[str, PixelPoint],
    frame: Frame,
    paths: list[list[PixelPoint]],
    *,
    narrow: bool,
) -> Markup:
    names = {stage.name: _shortened(stage.name) for stage in shown}
    notes = {stage.name: _note(run, stage, short=narrow) for stage in shown}
    sizes = [
        (max(text_width(names[stage.name], NAME), text_width(notes[stage.name], NOTE)) + 4, NAME + NOTE + 5)
        for stage in shown
    ]
    bounds = LabelBox(frame.left + 2, frame.top + 2, frame.right - 2, frame.bottom - 2)
    boxes = place_labels([points[stage.name] for stage in shown], sizes, bounds, paths, RADIUS + 5)
    parts: list[Markup] = []
    for stage, box in zip(shown, boxes, strict=True):
        x = points[stage.name][0]
        anchor, at = _anchor(x, box)
        parts.append(_leader(points[stage.name], box))
        parts.append(text(at, box.top + NAME, names[stage.name], anchor=anchor, class_="label"))
        parts.append(text(at, box.top + NAME + NOTE + 3, notes[stage.name], anchor=anchor, class_="note"))
    return join(parts)


def _shortened(name: str, most: int = 20) -> str:
    """The name, cut to the length of a label."""
    return name if len(name) <= most else name[: most - 1] + "…"


def _anchor(x: float, box: LabelBox) -> tuple[str, float]:
    """The text anchor of a label: the side that faces its point."""
    if box.left >= x:
        return "start", box.left
    if box.right <= x:
        return "end", box.right
    return "middle", (box.left + box.right) / 2


def _leader(point: PixelPoint, box: LabelBox) -> Markup:
    """A thin line from a point to a label that stands far from it."""
    x, y = min(max(point[0], box.left), box.right), min(max(point[1], box.top), box.bottom)
    away = ((x - point[0]) ** 2 + (y - point[1]) ** 2) ** 0.5
    if away < 2.5 * RADIUS:
        return Markup()
    share = (RADIUS + 2) / away
    start = (point[0] + (x - point[0]) * share, point[1] + (y - point[1]) * share)
    return line(*start, x, y, class_="leader")
