"""The picture to choose from: loss over bytes, each point with the command that plans it; one HTML file."""

from __future__ import annotations

import shlex

from attar.checkpoint.units import bytes_text
from attar.measure.report.markup import Markup, el, join
from attar.measure.report.page import NARROW, WIDE, document, foot, kicker
from attar.measure.report.svg import (
    both_widths,
    bottom_axis,
    fit,
    left_axis,
    line,
    picture,
    point,
    polyline,
    text,
)
from attar.planner.result import HEADER, Plan, PlanRow
from attar.planner.settings import NOISE
from attar.settings import option, plain
from attar.version import __version__

MEGABYTE = 1e6


def plan_page(plan: Plan) -> str:
    """The page of a plan: its point, the front with commands, one scheme for all layers, and the reasons."""
    title = f"{plan.model}: {bytes_text(plan.point.file_bytes)}, KL {plan.point.kl:.3g}"
    pictures = both_widths(*(_picture(plan, width, height) for width, height in (WIDE, NARROW)))
    about = (
        f"Predicted KL over weights and KV cache; bars are 90 % intervals. Below {NOISE} nats KL says "
        "nothing of tasks. Click a row for the command that plans it."
    )
    parts = [
        el("header", kicker("plan", plan.settings.engine), el("h1", title)),
        el(
            "section",
            el("h2", "Bytes against loss"),
            el("p", about, class_="about"),
            pictures,
        ),
        _table("The plan", [plan.point, *plan.alternatives], plan),
        _table("Other sizes", plan.front, plan),
        _table("One scheme for all layers", plan.uniform, plan),
        el("section", el("h2", "Why"), el("ul", [el("li", reason) for reason in plan.reasons])),
    ]
    return document(f"{title} · attar plan", parts, foot(__version__))


def _picture(plan: Plan, width: float, height: float) -> Markup:
    """The front as a line, the plan and the uniform schemes as points."""
    left, right, top, bottom = 56.0, width - 16.0, 30.0, height - 40.0
    rows = [plan.point, *plan.front, *plan.uniform]
    x = fit([_size(row) for row in rows], left, right, log=True, margin=0.05)
    y = fit(
        [value for row in rows for value in (row.kl_low, row.kl_high)], bottom, top, log=True, margin=0.05
    )

    def mark(row: PlanRow, radius: float, colour: str) -> Markup:
        bar = line(x(_size(row)), y(row.kl_low), x(_size(row)), y(row.kl_high), "grid")
        words = f"{row.name}: {_size(row):.4g} MB, KL {row.kl:.3g} ({row.kl_low:.2g} to {row.kl_high:.2g})"
        return el("g", bar, point(words, x(_size(row)), y(row.kl), radius), class_=colour)

    front = [(x(_size(row)), y(row.kl)) for row in plan.front]
    return picture(
        width,
        height,
        "predicted KL over bytes",
        left_axis(y, left, right, 6),
        bottom_axis(x, top, bottom, 7),
        text(0, 14, "KL, nats a token", class_="panel-title"),
        text(right, bottom + 36, "MB of weights and cache", anchor="end", class_="tick"),
        el("g", polyline(front, "series"), class_="s0"),
        [mark(row, 3.0, "s0") for row in plan.front],
        [mark(row, 3.0, "s1") for row in plan.uniform],
        mark(plan.point, 6.0, "s2"),
        class_="picture",
    )


def _size(row: PlanRow) -> float:
    """Megabytes of weights and cache."""
    return (row.file_bytes + row.cache_bytes) / MEGABYTE


def _table(title: str, rows: tuple[PlanRow, ...] | list[PlanRow], plan: Plan) -> Markup:
    """Points with their commands."""
    head = el("tr", [el("th", name, scope="col") for name in HEADER])
    body = [_row(row, plan) for row in rows]
    table = el("table", el("thead", head), el("tbody", body), class_="stages")
    return el("section", el("h2", title), el("div", table, class_="scroll", tabindex=0))


def _row(row: PlanRow, plan: Plan) -> Markup:
    first, *others = row.cells()
    command = el("details", el("summary", first), el("code", command_of(row, plan)))
    cells = [el("td", cell, data_label=name) for name, cell in zip(HEADER[1:], others, strict=True)]
    return el("tr", el("th", command, scope="row"), join(*cells))


def command_of(row: PlanRow, plan: Plan) -> str:
    """The command that plans the best recipe of a row's bytes."""
    words = ["attar", "plan", plan.model, "--size", f"{row.file_bytes + row.cache_bytes}B"]
    for name, value in plain(plan.settings, defaults=False).items():
        if name not in ("size", "quality"):
            words += ["--for" if name == "engine" else option(name), str(value)]
    return shlex.join([*words, "-o", "plan.yaml"])
