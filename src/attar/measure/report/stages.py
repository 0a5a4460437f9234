"""The table with a row per stage."""

from __future__ import annotations

from attar.measure.columns import KEPT, MB, REPORT, TOP1, Column
from attar.measure.report.markup import Markup, el, join
from attar.measure.report.svg import verb_class
from attar.measure.run_folder import RunRecord, StageRecord
from attar.measure.table import engine_note


def stage_table(run: RunRecord) -> Markup:
    """All stages with what was measured; on a narrow screen each stage is a card with its figures named."""
    head = [el("th", "stage", scope="col")]
    head += [el("th", column.title, scope="col", title=column.meaning) for column in REPORT]
    rows = [_row(run, stage) for stage in run.stages]
    table = el("table", el("thead", el("tr", head)), el("tbody", rows), class_="stages")
    return join(el("div", table, class_="scroll", tabindex=0), _footnote(run))


def _row(run: RunRecord, stage: StageRecord) -> Markup:
    name = el(
        "th", el("i", class_=f"dot {verb_class(stage.verb)}"), el("b", stage.name), _title(stage), scope="row"
    )
    return el(
        "tr",
        name,
        [_cell(run, stage, column) for column in REPORT],
        class_="last" if stage is run.last else None,
    )


def _title(stage: StageRecord) -> Markup | None:
    return el("small", stage.title) if stage.title else None


def _cell(run: RunRecord, stage: StageRecord, column: Column) -> Markup:
    share = _share(run, stage, column)
    bar = el("i", class_="bar", style=f"width:{share * 100:.1f}%") if share is not None else None
    track = el("span", bar, class_="track") if bar else None
    return el("td", column.cell(run, stage), track, data_label=column.title)


def _share(run: RunRecord, stage: StageRecord, column: Column) -> float | None:
    """The length of the bar under a number: bytes of the largest stage's, quality and agreement of
    all."""
    if column is TOP1:
        return stage.number("top1_agreement")
    if column is KEPT:
        kept = stage.number("quality_kept")
        return None if kept is None else min(kept, 1.0)
    if column is MB:
        most = max((each.number("bytes") or 0.0 for each in run.stages), default=0.0)
        size = stage.number("bytes")
        return size / most if size is not None and most else None
    return None


def _footnote(run: RunRecord) -> Markup:
    measured = run.last
    parts = []
    if (tokens := measured.number("tokens")) is not None:
        which = "tokens" if run.not_held_out() else "held-out tokens that no stage saw"
        parts.append(f"Quality on {tokens:,.0f} {which}.")
    if sentence := engine_note(run):
        parts.append(f"{sentence} The reference is computed by transformers.")
    parts += _speed_notes(run, measured)
    return el("p", " ".join(parts), class_="foot") if parts else Markup()


def _speed_notes(run: RunRecord, measured: StageRecord) -> list[str]:
    """What the tokens per second are."""
    device, threads = measured.text("device"), measured.number("threads")
    if measured.number("decode_tokens_per_s") is None or not device:
        return []
    where = f"{device}, {threads:.0f} threads" if threads and device == "cpu" else device
    notes = [f"Speed is that of one sequence on {where}, the median of its rounds."]
    if (measured.text("runner") or "transformers") == "transformers":
        notes.append("It is that of transformers: packed weights show their size here, not their speed.")
    spread = max((each.number("decode_spread") or 0.0 for each in run.stages), default=0.0)
    if spread >= 0.005:
        notes.append(f"Rounds of one measurement differ by up to {spread * 100:.0f} %.")
    return notes
