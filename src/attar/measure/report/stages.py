"""The table with a row per stage."""

from __future__ import annotations

from attar.measure.columns import MB, REPORT, TOP1, Column
from attar.measure.report.markup import Markup, el, join
from attar.measure.report.svg import verb_class
from attar.measure.run_folder import Run, Stage


def stage_table(run: Run) -> Markup:
    """All stages with what was measured; it scrolls sideways on a narrow screen."""
    head = [el("th", "stage", scope="col")]
    head += [el("th", column.title, scope="col", title=column.meaning) for column in REPORT]
    rows = [_row(run, stage) for stage in run.stages]
    table = el("table", el("thead", el("tr", head)), el("tbody", rows), class_="stages")
    return join(el("div", table, class_="scroll", tabindex=0), _footnote(run))


def _row(run: Run, stage: Stage) -> Markup:
    name = el(
        "th", el("i", class_=f"dot {verb_class(stage.verb)}"), el("b", stage.name), _title(stage), scope="row"
    )
    return el(
        "tr",
        name,
        [_cell(run, stage, column) for column in REPORT],
        class_="last" if stage is run.last else None,
    )


def _title(stage: Stage) -> Markup | None:
    return el("small", stage.title) if stage.title else None


def _cell(run: Run, stage: Stage, column: Column) -> Markup:
    share = _share(run, stage, column)
    bar = el("i", class_="bar", style=f"width:{share * 100:.1f}%") if share is not None else None
    return el("td", column.cell(run, stage), el("span", bar, class_="track") if bar else None)


def _share(run: Run, stage: Stage, column: Column) -> float | None:
    """The length of the bar under a number: bytes of the largest stage's, agreement of all tokens."""
    if column is TOP1:
        return stage.number("top1_agreement")
    if column is MB:
        most = max((each.number("bytes") or 0.0 for each in run.stages), default=0.0)
        size = stage.number("bytes")
        return size / most if size is not None and most else None
    return None


def _footnote(run: Run) -> Markup:
    measured = run.last
    parts = []
    if (tokens := measured.number("tokens")) is not None:
        which = "tokens" if run.not_held_out() else "held-out tokens that no stage saw"
        parts.append(f"Quality on {tokens:,.0f} {which}.")
    dtype, device, threads = measured.text("dtype"), measured.text("device"), measured.number("threads")
    if measured.number("decode_tokens_per_s") is not None and dtype and device:
        where = f"{device}, {threads:.0f} threads" if threads and device == "cpu" else device
        parts.append(f"Speed is the median of several rounds in transformers, in {dtype} on {where}.")
        if any(each.verb == "quantize" for each in run.stages):
            parts.append(
                f"Packed weights are decoded to {dtype} first: they show their size here, not their speed."
            )
        spread = max((each.number("decode_spread") or 0.0 for each in run.stages), default=0.0)
        parts.append(f"Rounds of one measurement differ by up to {spread * 100:.0f} %.")
    return el("p", " ".join(parts), class_="foot") if parts else Markup()
