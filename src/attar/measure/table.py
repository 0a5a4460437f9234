"""The terminal's table of all stages: drawn with rich on a terminal, aligned plain text elsewhere."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

from attar.measure.numbers import count, fixed, percent, significant, times
from attar.measure.run_folder import RunRecord, StageRecord


def print_table(run: RunRecord, file: TextIO | None = None) -> None:
    """Print one row per stage to ``file`` (stdout), and below what computed them."""
    file = file or sys.stdout
    if file.isatty():
        _print_rich(run, file)
    else:
        print(plain_table(run), file=file)
    if sentence := engine_note(run):
        print(f"\n{sentence}", file=file)


def engine_note(run: RunRecord) -> str:
    """Which runner computed the figures of which stages, and in which formats; empty where none says so."""
    groups: dict[str, list[str]] = {}
    for stage in run.stages:
        runner, activations, kept = (stage.text(key) for key in ("runner", "activations", "kv_dtype"))
        if runner and activations and kept:
            formats = f"runner {runner}, activations {activations}, keys and values {kept}"
            groups.setdefault(formats, []).append(stage.name)
    if len(groups) == 1:
        return f"Measured in {next(iter(groups))}."
    parts = [f"{', '.join(names)} in {formats}" for formats, names in groups.items()]
    return f"Measured: {'; '.join(parts)}." if parts else ""


def table_rows(run: RunRecord) -> list[list[str]]:
    """The headings, then a row per stage; every row begins with the stage's name."""
    body = [[stage.name, *(column.cell(run, stage) for column in TERMINAL)] for stage in run.stages]
    return [["stage", *(column.title for column in TERMINAL)], *body]


def plain_table(run: RunRecord) -> str:
    """Columns aligned with spaces, names to the left and numbers to the right; below, what is not measured on
    held-out text."""
    table = table_rows(run)
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    rule = ["-" * width for width in widths]
    lines = []
    for row in [table[0], rule, *table[1:]]:
        cells = [
            row[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join([*lines, *run.not_held_out()])


def _print_rich(run: RunRecord, file: TextIO) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    head, *body = table_rows(run)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True, header_style="bold")
    table.add_column(head[0], no_wrap=True)
    for title in head[1:]:
        lines = title.replace(" ", "\n").replace("/w", "/\nw")  # narrow enough for 80 columns
        table.add_column(Text(lines), justify="right", no_wrap=True, vertical="bottom")
    for row in body:
        style = "bold" if row[0] == run.last.name else ""
        table.add_row(*map(Text, row), style=style)  # Text: a name with brackets is no markup
    console = Console(file=file)
    console.print(table)
    for note in run.not_held_out():
        console.print(Text(note))


@dataclass(frozen=True)
class Column:
    """One column: its heading, what it means, and the text of a cell."""

    title: str
    meaning: str
    cell: Callable[[RunRecord, StageRecord], str]


def _aligned(key: str, scale: float = 1.0) -> Callable[[RunRecord, StageRecord], str]:
    """Cells with one number of decimals in all rows, chosen so that the smallest shows three digits."""

    def cell(run: RunRecord, stage: StageRecord) -> str:
        values = [abs(value) * scale for each in run.stages if (value := each.number(key))]
        decimals = max(0, 2 - math.floor(math.log10(min(values)))) if values else 0
        value = stage.number(key)
        return fixed(None if value is None else value * scale, min(decimals, 4))

    return cell


MB = Column("MB", "bytes of the stored tensors, in 10^6", _aligned("bytes", 1e-6))
SMALLER = Column(
    "smaller", "the original's bytes over these", lambda run, stage: times(run.times_smaller(stage))
)
BITS = Column(
    "bits/weight",
    "8 * bytes / parameters, scales included",
    lambda run, stage: fixed(stage.number("bits_per_weight"), 2),
)
PARAMETERS = Column("parameters", "of the dense model", lambda run, stage: count(stage.number("parameters")))
PERPLEXITY = Column("perplexity", "exp of the mean loss on held-out text", _aligned("perplexity"))
KL = Column(
    "KL", "mean KL(original || this), nats per token", lambda run, stage: significant(stage.number("kl_mean"))
)
KL_P99 = Column(
    "KL p99", "99th percentile of the tokens' KL", lambda run, stage: significant(stage.number("kl_p99"))
)
TOP1 = Column(
    "top-1 %",
    "tokens whose likeliest successor is the original's",
    lambda run, stage: percent(stage.number("top1_agreement"), 1),
)
KEPT = Column(
    "quality kept %",
    "next tokens predicted right, as a share of those of the original",
    lambda run, stage: percent(stage.number("quality_kept"), 1),
)
PREFILL = Column(
    "prefill tok/s",
    "prompt tokens read per second",
    lambda run, stage: fixed(stage.number("prefill_tokens_per_s")),
)
DECODE = Column(
    "decode tok/s",
    "tokens made per second, one sequence",
    lambda run, stage: fixed(stage.number("decode_tokens_per_s")),
)

TERMINAL = (MB, SMALLER, BITS, PERPLEXITY, KEPT, KL, TOP1, DECODE)
REPORT = (MB, SMALLER, BITS, PARAMETERS, PERPLEXITY, KEPT, KL, KL_P99, TOP1, PREFILL, DECODE)
