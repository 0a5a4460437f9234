"""How well a merge and each of its parents predict held-out text, as a table for each merge that says it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attar.measure.numbers import significant
from attar.measure.report.markup import Markup, el, join
from attar.measure.run_folder import RunRecord, StageRecord

COLUMNS = (("loss, nats/token", "loss"), ("perplexity", "perplexity"), ("nats/byte", "nats_per_byte"))


def parent_tables(run: RunRecord) -> Markup | None:
    """Tables of every merge whose card tells of quality; None where none does."""
    known = [(stage, rows) for stage in run.stages if (rows := _rows(stage))]
    drawn = [join(el("h3", stage.name) if len(known) > 1 else None, _table(rows)) for stage, rows in known]
    return join(drawn) if drawn else None


def _rows(stage: StageRecord) -> list[Mapping[str, Any]]:
    return [row for row in stage.rows("quality") if isinstance(row.get("name"), str)]


def _table(rows: list[Mapping[str, Any]]) -> Markup:
    head = [el("th", "model", scope="col"), *(el("th", title, scope="col") for title, _ in COLUMNS)]
    body = [
        el(
            "tr",
            el("th", Path(str(row["name"])).name, scope="row"),
            [_cell(row.get(key)) for _, key in COLUMNS],
        )
        for row in rows
    ]
    table = el("table", el("thead", el("tr", head)), el("tbody", body), class_="stages")
    return el("div", table, class_="scroll", tabindex=0)


def _cell(value: Any) -> Markup:
    return el("td", significant(float(value), 4) if isinstance(value, int | float) else significant(None))
