"""Results in a notebook: a table, a picture, a data frame."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from attar.measure.run_folder import RunRecord
from attar.measure.table import table_rows

if TYPE_CHECKING:
    import pandas


def run_html(run: RunRecord, front: Sequence[str] = ()) -> str:
    """A run as HTML: the table of its stages, and size against quality as an image that loads nothing."""
    from attar.measure.report.quality import quality_svg

    picture = base64.b64encode(quality_svg(run, front=front).encode()).decode()
    image = f'<img alt="size against quality" src="data:image/svg+xml;base64,{picture}">'
    return html_table(table_rows(run)) + image


def html_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of text as an HTML table; the first one is its head."""
    head, *body = rows
    lines = [_row(head, "th"), *(_row(row, "td") for row in body)]
    return f"<table>{''.join(lines)}</table>"


def _row(cells: Sequence[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"


def run_frame(run: RunRecord) -> pandas.DataFrame:
    """The measurements of a run: a row for each stage, indexed by its name."""
    return frame({stage.name: stage.measurements for stage in run.stages})


def frame(rows: Mapping[str, Mapping[str, Any]]) -> pandas.DataFrame:
    """Records by name as a data frame, its index the names."""
    import pandas

    return pandas.DataFrame.from_records(list(rows.values()), index=list(rows))
