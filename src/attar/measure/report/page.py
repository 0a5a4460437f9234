"""The report: one HTML file made from ``run.json``, without scripts and without links to other files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from attar.checkpoint.atomic import write_bytes
from attar.measure.report.charts import curve_pictures, layer_pictures, zeros_pictures
from attar.measure.report.conflicts import conflict_pictures
from attar.measure.report.cuts import scan_pictures
from attar.measure.report.layer_maps import layer_map_pictures
from attar.measure.report.markup import Child, Markup, el, join
from attar.measure.report.quality import quality_picture
from attar.measure.report.sections import definitions, lineage_tree, parent_tables, sample_cards, stage_table
from attar.measure.report.svg import both_widths, style
from attar.measure.run_folder import RunRecord, read_run
from attar.measure.verdict import findings, verdict

WIDE, NARROW = (900.0, 470.0), (370.0, 430.0)


def write_report(run_dir: str | Path) -> Path:
    """Write ``run_dir/report.html`` from ``run_dir/run.json`` and return its path.

    Raises:
        DataError: ``run.json`` is missing or damaged.
        OutputError: the report cannot be written.
    """
    run = read_run(run_dir)
    path = Path(run_dir) / "report.html"
    recipe = Path(run_dir) / "recipe.yaml"
    text = recipe.read_text(encoding="utf-8", errors="replace") if recipe.is_file() else None
    write_bytes(path, page(run, text).encode("utf-8"))
    return path


def page(run: RunRecord, recipe: str | None = None) -> str:
    """The whole page."""
    name = _name(run)
    return document(f"{name}: {verdict(run)}", [_top(run, name), _sections(run, recipe)], foot(run.attar))


def document(title: str, content: Child, foot: str) -> str:
    """A page of a report, with its style sheets."""
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name_="color-scheme", content="light dark"),
        el("title", title),
        el("style", style("picture"), style("page")),
    )
    body = el("body", el("main", content), el("footer", foot))
    return "<!doctype html>\n" + el("html", head, "\n", body, lang="en") + "\n"


def kicker(*parts: str) -> Markup:
    """The line above the title: what was run, on which model, when."""
    words = "".join(f" · {part}" for part in parts if part)
    return el("p", el("span", "attar", class_="mark-name"), words, class_="kicker")


def _top(run: RunRecord, name: str) -> Markup:
    unfinished = (
        None
        if run.finished
        else el(
            "p",
            f"The run is not finished: {len(run.stages)} checkpoint{'s' if len(run.stages) > 1 else ''} "
            "so far. The same command goes on where it stopped.",
            class_="warning",
        )
    )
    results = [el("li", sentence) for sentence in findings(run)]
    folder = run.folder.resolve().name if run.folder else ""
    above = kicker(name, folder, run.date)
    warnings = [el("p", note, class_="warning") for note in run.not_held_out()]
    return el(
        "header",
        above,
        el("h1", _unbroken(verdict(run))),
        el("ul", results) if results else None,
        unfinished,
        warnings,
    )


def _unbroken(sentence: str) -> str:
    """A figure and its interval stay on one line."""
    return re.sub(r"(\d) ± ([\d.]+) %", "\\1\u00a0±\u00a0\\2\u00a0%", sentence)


def _sections(run: RunRecord, recipe: str | None) -> Markup:
    wide, narrow = (quality_picture(run, width, height) for width, height in (WIDE, NARROW))
    quality = both_widths(wide, narrow) if wide and narrow else None
    return join(
        _section(
            "Size against quality",
            quality,
            "Every checkpoint of the run; arrows lead from parent to child. Both scales are logarithmic.",
        ),
        _section("Every stage", stage_table(run, run.last if len(run.stages) > 1 else None)),
        _section(
            "Error of every layer",
            layer_pictures(run),
            "Relative error of a layer's output on the calibration text: ‖WX − ŴX‖² / ‖WX‖², by block. "
            "One scale for all panels; lower is better.",
        ),
        _section(
            "Zeros of every layer",
            zeros_pictures(run),
            "Fraction of a layer's weights that pruning set to zero, by block. One scale for all panels.",
        ),
        _section(
            "Parents and merge",
            parent_tables(run),
            "Held-out text that no search has read, each model with its own tokenizer: between different "
            "ones, compare nats per byte.",
        ),
        _section(
            "Where the parents disagree",
            conflict_pictures(run),
            "Every pair of parents of a merge, by layer: cosine of their changes to the base, and how often "
            "the signs agree where both changed a weight. At 0 and 50 % (dotted) the changes are unrelated; "
            "below, they undo each other.",
        ),
        _section(
            "What pruning costs",
            scan_pictures(run),
            "KL of the whole model to the cut one on calibration text, by the share of the parameters that "
            "go, and of each layer cut alone. Both scales are logarithmic; lower and lighter are better.",
        ),
        _section("Training", curve_pictures(run)),
        _section(
            "Learned layer maps",
            layer_map_pictures(run),
            "Which layers of the teacher each layer of the student came to follow: the weights of its row.",
        ),
        _section(
            "The same prompt, greedily",
            sample_cards(run),
            "Marked: what differs from the original, word by word; struck out: what is missing.",
        ),
        _section("Lineage", lineage_tree(run)),
        _section("Where it ran", _facts(run)),
        _section("Recipe", _recipe(run, recipe)),
    )


def _recipe(run: RunRecord, text: str | None) -> Markup | None:
    """As it was written, folded; of a run of an earlier version the file with all defaults."""
    shown = run.written or text
    if not shown:
        return None
    summary = el("summary", f"{len(shown.splitlines())} lines; other settings have their defaults")
    return el("details", summary if run.written else el("summary", "show"), el("pre", shown, class_="recipe"))


def _section(title: str, content: Child, note: str | None = None) -> Markup | None:
    """A titled section; None without content."""
    if content is None:
        return None
    return el("section", el("h2", title), el("p", note, class_="about") if note else None, content)


def _facts(run: RunRecord) -> Markup | None:
    groups = [
        (title, values) for title, values in (("machine", run.machine), ("versions", run.versions)) if values
    ]
    drawn = [el("div", el("h3", title), definitions(values)) for title, values in groups]
    return el("div", drawn, class_="facts") if drawn else None


def _name(run: RunRecord) -> str:
    model: Any = run.recipe.get("model")
    return str(model or run.original.text("model") or run.original.name)


def foot(version: str) -> str:
    """The line below everything."""
    return f"Written by attar {version}".strip() + ". This file holds everything it shows and loads nothing."
