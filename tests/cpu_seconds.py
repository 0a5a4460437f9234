"""Processor seconds of the tests by folder, with those of the children that were waited for, and a budget."""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Generator
from typing import Any

import pytest

BUDGETS = {
    "runtime": 60,
    "quantization": 50,
    "distillation": 48,
    "serving": 46,
    "": 32,
    "pruning": 20,
    "deployment": 18,
    "formats": 17,
    "checkpoint": 13,
    "models": 12,
    "cli": 11,
    "merging": 11,
    "kernels": 10,
    "recipe": 9,
    "measure": 7,
    "walks": 6,
    "collection": 5,
    "data": 4,
    "planner": 4,
    "mcp": 2,
    "sensitivity": 1,
}
"""Folder below ``tests`` ("" for the files beside the folders): seconds that the fast tests may take."""

_LAST = pytest.StashKey[float]()


def processor_seconds() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def start_counting(session: pytest.Session) -> None:
    session.config.stash[_LAST] = processor_seconds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """A report says what was spent since the report before: fixtures count where they are made."""
    report = yield
    now = processor_seconds()
    report.processor_seconds = now - item.config.stash[_LAST]
    item.config.stash[_LAST] = now
    return report


def folder_of(nodeid: str) -> str:
    parts = nodeid.partition("::")[0].split("/")[1:-1]
    return parts[0] if parts else ""


def pytest_terminal_summary(terminalreporter: Any) -> None:
    spent: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if seconds := getattr(report, "processor_seconds", 0.0):
                spent[folder_of(report.nodeid)] += seconds
    if sum(spent.values()) < 60:
        return
    terminalreporter.section("processor seconds by folder")
    for folder, seconds in spent.most_common():
        budget = BUDGETS.get(folder, 1)
        over = f"  over its {budget} s" if seconds > budget else ""
        terminalreporter.write_line(f"{seconds:7.1f}  {folder or 'beside the folders'}{over}")
    terminalreporter.write_line(f"{spent.total():7.1f}  of {sum(BUDGETS.values())} s")
