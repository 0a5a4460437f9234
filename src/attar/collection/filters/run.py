"""Run the filters over collected rows, and say what went and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from attar.collection.filters.contamination import contamination
from attar.collection.filters.language import language
from attar.collection.filters.length import length
from attar.collection.filters.near_duplicates import near_duplicates
from attar.collection.filters.refusal import refusal
from attar.collection.filters.row import CollectedRow, answer_of, prompt_of
from attar.collection.filters.self_consistency import self_consistency
from attar.collection.filters.settings import NAMES, FilterSettings
from attar.progress import SILENT, Progress

RowFilter = Callable[[Sequence[CollectedRow], FilterSettings], list[str]]
"""Rows to a reason against each of them; "" keeps one."""

FILTERS: dict[str, RowFilter] = {
    "length": length,
    "refusal": refusal,
    "language": language,
    "contamination": contamination,
    "self_consistency": self_consistency,
    "near_duplicates": near_duplicates,
}
assert tuple(FILTERS) == NAMES

EXAMPLES = 3  # of each reason
SHOWN = 160  # characters of an example


@dataclass(frozen=True, kw_only=True)
class DroppedRows:
    """The rows that one filter dropped for one reason.

    Attributes:
        examples: ``id``, ``prompt`` and ``answer``, shortened, of the first of them.
    """

    filter: str
    reason: str
    count: int
    examples: tuple[dict[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class FilterSummary:
    """What the filters did.

    Attributes:
        filters: the filters that ran, in order.
        dropped: by filter and reason, in order, the most frequent reason of a filter first.
    """

    rows: int
    kept: int
    filters: tuple[str, ...]
    dropped: tuple[DroppedRows, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON content."""
        return asdict(self)

    def table(self) -> str:
        """For people: a line for each reason, with its first example."""
        lines = [f"{self.kept:,} of {self.rows:,} rows kept ({', '.join(self.filters) or 'no filter'})"]
        width = max((len(item.reason) for item in self.dropped), default=0)
        names = max((len(item.filter) for item in self.dropped), default=0)
        for item in self.dropped:
            example = item.examples[0]["answer"].replace("\n", " ")[: max(100 - width - names, 20)]
            lines.append(f"  {item.filter:<{names}}  {item.count:>7,}  {item.reason:<{width}}  {example!r}")
        return "\n".join(lines)


def filter_rows(
    rows: Sequence[CollectedRow], settings: FilterSettings, progress: Progress = SILENT
) -> tuple[list[CollectedRow], FilterSummary]:
    """The rows that every filter keeps, in their order, and a summary. A row is judged by one filter after
    the other until one drops it.

    Raises:
        AttarError: a file that a filter reads is missing or empty.
    """
    kept = list(rows)
    dropped: list[DroppedRows] = []
    with progress.task("filter", total=len(settings.names)) as task:
        for name in settings.names:
            reasons = FILTERS[name](kept, settings)
            dropped += _dropped(name, kept, reasons)
            kept = [row for row, reason in zip(kept, reasons, strict=True) if not reason]
            task.advance(rows=len(kept))
    summary = FilterSummary(rows=len(rows), kept=len(kept), filters=settings.names, dropped=tuple(dropped))
    return kept, summary


def _dropped(name: str, rows: Sequence[CollectedRow], reasons: Sequence[str]) -> list[DroppedRows]:
    counts = Counter(reason for reason in reasons if reason)
    return [
        DroppedRows(
            filter=name,
            reason=reason,
            count=count,
            examples=tuple(
                _example(row)
                for row in [row for row, why in zip(rows, reasons, strict=True) if why == reason][:EXAMPLES]
            ),
        )
        for reason, count in counts.most_common()
    ]


def _example(row: CollectedRow) -> dict[str, str]:
    parts = {"id": str(row.get("id", "")), "prompt": prompt_of(row), "answer": answer_of(row)}
    return {name: text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..." for name, text in parts.items()}
