"""Rows dealt to workers in batches; each result is kept in a journal under the row's hash as it comes.

A batch that is lost with its worker is dealt again row by row, so that a row that kills its worker is found:
it ends as one row with an error, and all others have their results. The driver alone writes the journal. Rows
with errors are not in it: the same command tries them again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attar.cluster.journal import Appender, read_lines
from attar.cluster.tasks import DONE, ClusterTask, TaskOutcome, Workers, run_tasks
from attar.progress import SILENT, Progress

MakeTask = Callable[[str, list[dict[str, Any]]], ClusterTask]
"""The task of a batch, from its id and its rows; it returns a list of ``{"id", "result"}`` or ``{"id",
"error"}``."""


def run_rows(
    rows: Mapping[str, Any],
    make_task: MakeTask,
    workers: Callable[[], Workers],
    journal: Path,
    *,
    batch: int,
    progress: Progress = SILENT,
) -> dict[str, dict[str, Any]]:
    """The result of each row, by its id: ``{"result": ...}`` or ``{"error": message}``.

    Args:
        rows: id (a hash of everything that the result depends on) to its content, JSON.
        workers: called where a row has no result yet.

    Raises:
        OutputError: the journal cannot be written.
    """
    results = {record["id"]: record for record in read_lines(journal) if record.get("id") in rows}
    errors: dict[str, dict[str, Any]] = {}
    if len(results) == len(rows):
        return results
    lines, crew = Appender(journal), workers()

    def keep(outcome: TaskOutcome) -> None:
        for record in outcome.result if outcome.state == DONE else ():
            if "error" in record:
                errors[record["id"]] = record
            else:
                lines.write(record)
                results[record["id"]] = record

    try:
        for size, attempts in ((batch, 1), (1, 2)):
            missing = [{"id": id, "row": row} for id, row in rows.items() if id not in results | errors]
            batches = [missing[start : start + size] for start in range(0, len(missing), size)]
            tasks = {f"rows {number}": batch_rows for number, batch_rows in enumerate(batches, 1)}
            calls = [make_task(name, batch_rows) for name, batch_rows in tasks.items()]
            outcomes = run_tasks(calls, crew, None, after=keep, attempts=attempts, progress=progress)
        for name, outcome in outcomes.items():
            for record in tasks[name] if outcome.state != DONE else ():
                errors[record["id"]] = {"id": record["id"], "error": outcome.message}
    finally:
        crew.close()
        lines.close()
    return results | errors
