"""The table of all stages: columns, and printing (rich on a terminal, aligned plain text elsewhere)."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

from attar.measure.numbers import (
    NOTHING,
    count,
    fixed,
    nats,
    nats_with_interval,
    percent,
    times,
    with_interval,
)
from attar.measure.run_folder import ENCODER_TASKS, RunRecord, StageRecord
from attar.printable import one_line, printable

Cell = Callable[[RunRecord, StageRecord], str]


@dataclass(frozen=True)
class Column:
    """A column: its heading, its meaning, and the text of a cell."""

    title: str
    meaning: str
    cell: Cell


def _aligned(key: str, scale: float = 1.0) -> Cell:
    """Cells with the same number of decimals in all rows, chosen so that the smallest shows three digits."""

    def cell(run: RunRecord, stage: StageRecord) -> str:
        values = [abs(value) * scale for other in run.stages if (value := other.number(key))]
        decimals = max(0, 2 - math.floor(math.log10(min(values)))) if values else 0
        value = stage.number(key)
        return fixed(None if value is None else value * scale, min(decimals, 4))

    return cell


def _number(key: str, text: Callable[[float | None], str]) -> Cell:
    return lambda run, stage: text(stage.number(key))


def _percent(value: float | None) -> str:
    return percent(value, 1)


def _kept(run: RunRecord, stage: StageRecord) -> str:
    """With its interval; the original is itself, and has none."""
    kept, stderr = stage.number("quality_kept"), stage.number("quality_kept_stderr")
    return NOTHING if kept is None else with_interval(kept, None if stage is run.original else stderr, 1)


def _kl(run: RunRecord, stage: StageRecord) -> str:
    kl, stderr = stage.number("kl_mean"), stage.number("kl_mean_row_stderr")
    return NOTHING if kl is None else nats_with_interval(kl, None if stage is run.original else stderr)


MB = Column("MB", "bytes of the stored tensors, in 10^6", _aligned("bytes", 1e-6))
SMALLER = Column(
    "smaller", "bytes of the original / bytes", lambda run, stage: times(run.times_smaller(stage))
)
BITS = Column(
    "bits/weight",
    "8 * bytes / parameters, scales included",
    _number("bits_per_weight", lambda value: fixed(value, 2)),
)
PARAMETERS = Column("parameters", "of the dense model", _number("parameters", count))
PERPLEXITY = Column("perplexity", "exp of the mean loss on held-out text", _aligned("perplexity"))
KL = Column("KL", "mean KL(original || this), nats per token", _number("kl_mean", nats))
KL_ERROR = Column("KL", "mean KL(original || this), nats per token, ± its 95 % interval over rows", _kl)
KL_P99 = Column("KL p99", "99th percentile of the tokens' KL", _number("kl_p99", nats))
TOP1 = Column(
    "top-1 %", "tokens where both models predict the same next token", _number("top1_agreement", _percent)
)
KEPT = Column(
    "quality kept %",
    "predicted right, as a share of what the original does, ± its 95 % interval",
    _kept,
)
ACCURACY = Column("accuracy %", "classes or hidden tokens predicted right", _number("accuracy", _percent))
PREFILL = Column("prefill tok/s", "prompt tokens per second", _number("prefill_tokens_per_s", fixed))
DECODE = Column(
    "decode tok/s", "generated tokens per second, one sequence", _number("decode_tokens_per_s", fixed)
)
REFERENCE_PREFILL, REFERENCE_DECODE = (
    Column(
        f"{what} tok/s (transformers)",
        "the same of transformers on the decoded weights, for reference",
        _number(f"transformers_{what}_tokens_per_s", fixed),
    )
    for what in ("prefill", "decode")
)

TERMINAL = (MB, SMALLER, BITS, PERPLEXITY, KEPT, KL, TOP1, DECODE)
REPORT = (MB, SMALLER, BITS, PARAMETERS, PERPLEXITY, KEPT, KL_ERROR, KL_P99, TOP1, PREFILL, DECODE)


def columns(run: RunRecord, usual: tuple[Column, ...]) -> list[Column]:
    """The usual columns; those of transformers follow where it was timed too (``reference_speed``). Encoders
    have an accuracy, and nothing to decode."""
    if any(stage.text("task") in ENCODER_TASKS for stage in run.stages):
        usual = tuple({PERPLEXITY: ACCURACY, DECODE: PREFILL}.get(column, column) for column in usual)
        return list(dict.fromkeys(usual))
    timed = any(stage.number("transformers_decode_tokens_per_s") is not None for stage in run.stages)
    pairs = {PREFILL: REFERENCE_PREFILL, DECODE: REFERENCE_DECODE}
    return [*usual, *(pairs[column] for column in usual if timed and column in pairs)]


def print_table(run: RunRecord, file: TextIO | None = None) -> None:
    """Print one row per stage to ``file`` (stdout), and the notes below it."""
    file = file or sys.stdout
    if file.isatty():
        _print_rich(run, file)
    else:
        print(plain_table(run), file=file)
    if sentences := notes(run):
        print("", *sentences, sep="\n", file=file)


def notes(run: RunRecord) -> list[str]:
    """Sentences below the table: the engine of its figures, and KLs without an order."""
    return [sentence for sentence in (engine_note(run), kl_note(run)) if sentence]


def kl_note(run: RunRecord) -> str:
    """Which stages, neighbours by KL, are not told apart; empty where all are."""
    known = [stage for stage in run.stages[1:] if stage.number("kl_mean") is not None]
    known.sort(key=lambda stage: stage.number("kl_mean") or 0.0)
    groups: list[list[StageRecord]] = []
    for stage in known:
        if groups and not stage.kl_differs(groups[-1][-1]):
            groups[-1].append(stage)
        else:
            groups.append([stage])
    names = [" and ".join(stage.name for stage in group) for group in groups if len(group) > 1]
    return f"KL does not tell apart {'; '.join(names)}." if names else ""


def engine_note(run: RunRecord) -> str:
    """The engine that served the stages while they were measured, and its formats; empty for records without
    it."""
    groups: dict[str, list[str]] = {}
    for stage in run.stages:
        runner, activations, kv_dtype = (stage.text(key) for key in ("runner", "activations", "kv_dtype"))
        if runner and activations and kv_dtype:
            engine = "transformers" if runner == "transformers" else f"attar's runtime, {runner} runner"
            description = f"{engine} (activations {activations}, KV cache {kv_dtype})"
            groups.setdefault(description, []).append(stage.name)
    if len(groups) == 1:
        return f"Measured in {next(iter(groups))}."
    parts = [f"{', '.join(names)} in {description}" for description, names in groups.items()]
    return f"Measured: {'; '.join(parts)}." if parts else ""


def table_rows(run: RunRecord) -> list[list[str]]:
    """The headings, then a row per stage, which begins with the stage's name."""
    shown = columns(run, TERMINAL)
    rows = [[one_line(stage.name), *(column.cell(run, stage) for column in shown)] for stage in run.stages]
    return [["stage", *(column.title for column in shown)], *rows]


def plain_table(run: RunRecord) -> str:
    """Columns aligned with spaces, names to the left and numbers to the right; then a line for each stage
    that was not measured on held-out text."""
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
    return printable("\n".join([*lines, *run.not_held_out()]))


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
        table.add_row(*map(Text, row), style=style)  # Text: brackets in a name are not markup
    console = Console(file=file)
    console.print(table)
    for note in run.not_held_out():
        console.print(Text(printable(note)))
