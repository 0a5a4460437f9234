"""Plain tables and numbers for people, without any library."""

from __future__ import annotations

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A table with aligned columns.

    Args:
        header: names of the columns.
        rows: their cells, as many as there are columns.
        left: how many of the first columns are aligned to the left; the others to the right.
    """
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join(padded).rstrip()

    return "\n".join([line(header), line(["-" * width for width in widths]), *(line(row) for row in rows)])


def seconds_text(seconds: float) -> str:
    """``75`` -> ``1 min 15 s``; two figures are enough for a duration."""
    whole = round(seconds)
    if whole < 1:
        return "under 1 s"
    if whole < 60:
        return f"{whole} s"
    if whole < 600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 3600:
        return f"{round(whole / 60)} min"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def number(value: float | None, form: str) -> str:
    """A number in a format, or a dash where it was not measured."""
    return "-" if value is None else format(value, form)
