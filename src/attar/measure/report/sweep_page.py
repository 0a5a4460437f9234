"""The report of a sweep: one table, and one picture of size against quality with the Pareto front."""

from __future__ import annotations

from pathlib import Path

from attar.checkpoint.atomic import write_bytes
from attar.measure.report.markup import Markup, el
from attar.measure.report.page import NARROW, WIDE
from attar.measure.report.quality import quality_picture, write_quality_svg
from attar.measure.report.sections import stage_table
from attar.measure.report.svg import both_widths, style
from attar.measure.sweep import SweepRecord, pareto_front
from attar.measure.table import engine_note, plain_table

SHARED = "Processes shared the machine while speeds were measured: compare tokens/s of --jobs 1 alone."


def write_sweep_report(sweep: SweepRecord, folder: Path) -> Path:
    """Write ``report.html`` and ``pareto.svg`` and return the report's path. Raises OutputError."""
    path = folder / "report.html"
    write_bytes(path, sweep_page(sweep).encode())
    run = sweep.as_run()
    if run is not None:
        write_quality_svg(run, folder / "pareto.svg", front=pareto_front(run.stages[1:]))
    return path


def sweep_table(sweep: SweepRecord) -> str:
    """The results as text: a row per run, those on the front, and those that failed."""
    run = sweep.as_run()
    lines = [] if run is None else [plain_table(run)]
    if run is not None:
        lines += ["", _front(pareto_front(run.stages[1:]))]
        lines += [note for note in (engine_note(run), SHARED if sweep.jobs > 1 else "") if note]
    lines += [f"failed: {one.name}: {one.message}" for one in sweep.runs if one.last is None]
    return "\n".join(lines)


def sweep_page(sweep: SweepRecord) -> str:
    """The whole page."""
    run = sweep.as_run()
    name = f"{Path(sweep.recipe).stem}: {len(sweep.runs)} runs"
    failed = [el("li", f"{one.name}: {one.message}") for one in sweep.runs if one.last is None]
    parts: list[Markup | None] = [el("h1", name)]
    if run is not None:
        front = pareto_front(run.stages[1:])
        wide, narrow = (quality_picture(run, width, height, front) for width, height in (WIDE, NARROW))
        picture = both_widths(wide, narrow) if wide and narrow else None
        note = "The last checkpoint of every run. The line joins those that no other beats in both."
        parts.append(el("section", el("h2", "Size against quality"), el("p", note), picture))
        parts.append(el("section", el("h2", "Every run"), stage_table(run), el("p", _front(front))))
        parts.append(el("p", " ".join([engine_note(run), SHARED if sweep.jobs > 1 else ""])))
    if failed:
        parts.append(el("section", el("h2", "Failed"), el("ul", failed)))
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        el("title", name),
        el("style", style("picture"), style("page")),
    )
    return "<!doctype html>\n" + el("html", head, "\n", el("body", el("main", parts)), lang="en") + "\n"


def _front(front: list[str]) -> str:
    return f"On the front of size against quality: {', '.join(front) or 'none, as nothing was measured'}."
