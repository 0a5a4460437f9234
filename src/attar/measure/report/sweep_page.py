"""The report of a sweep: one table, and one picture of size against quality with the Pareto front."""

from __future__ import annotations

from pathlib import Path

from attar.checkpoint.atomic import write_bytes
from attar.measure.report.markup import Markup, el
from attar.measure.report.page import NARROW, WIDE, document, foot, kicker
from attar.measure.report.quality import quality_picture, write_quality_svg
from attar.measure.report.sections import stage_table
from attar.measure.report.svg import both_widths
from attar.measure.sweep import SweepRecord, pareto_front
from attar.measure.table import notes, plain_table
from attar.version import __version__

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
        lines += [*notes(run), *([SHARED] if sweep.jobs > 1 else [])]
    if sweep.settings:
        lines.append(f"The runs differ in {', '.join(sweep.settings)}; their folders have the whole names.")
    lines += [
        f"failed: {sweep.labels[run.name]}: {run.message.replace(f'{run.name}/', '', 1)}"
        for run in sweep.runs
        if run.last is None
    ]
    return "\n".join(lines)


def sweep_page(sweep: SweepRecord) -> str:
    """The whole page."""
    run = sweep.as_run()
    failed = [run for run in sweep.runs if run.last is None]
    count = f"{len(sweep.runs)} run{'s' if len(sweep.runs) > 1 else ''}" + (
        f", {len(failed)} failed" if failed else ""
    )
    recipe = Path(sweep.recipe).name
    model = (run.original.text("model") or run.original.name) if run else ""
    title = f"{model}: {count}" if model else f"{recipe}: {count}"
    settings = ", ".join(sweep.settings)
    parts: list[Markup | None] = [
        el(
            "header",
            kicker(f"sweep of {recipe}", run.date if run else ""),
            el("h1", title),
            el(
                "p",
                f"The runs differ in {settings}; their folders in runs/ have the whole names.",
                class_="about",
            )
            if settings
            else None,
        )
    ]
    if run is not None:
        front = pareto_front(run.stages[1:])
        wide, narrow = (quality_picture(run, width, height, front) for width, height in (WIDE, NARROW))
        picture = both_widths(wide, narrow) if wide and narrow else None
        note = (
            "The last checkpoint of every run, both scales logarithmic. "
            "The line joins those that no other beats in both."
        )
        shared = el("p", SHARED, class_="warning") if sweep.jobs > 1 else None
        parts += [
            el("section", el("h2", "Size against quality"), el("p", note, class_="about"), picture),
            el(
                "section",
                el("h2", "Every run"),
                el("p", _front(front), class_="about"),
                stage_table(run),
                shared,
            ),
        ]
    if failed:
        rows = [
            el("div", el("dt", sweep.labels[run.name]), el("dd", run.message.replace(f"{run.name}/", "", 1)))
            for run in failed
        ]
        parts.append(el("section", el("h2", "Failed"), el("dl", rows, class_="failed")))
    return document(f"{title} · {recipe}", parts, foot(__version__))


def _front(front: list[str]) -> str:
    return f"On the front of size against quality: {', '.join(front) or 'none, as nothing was measured'}."
