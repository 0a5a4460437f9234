"""Write the table of docs/licences.md from the data: ``python scripts/document_licences.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attar.checkpoint.licences import data, entries

PAGE = Path(__file__).parents[1] / "docs" / "licences.md"
HEADING = "## The table\n"


def effect(entry: dict[str, Any], role: str) -> str:
    """The status in a role, and the students that it is limited to."""
    rule = entry.get(role)
    if rule is None:
        return "-"
    family = rule.get("students", {}).get("family", [])
    limit = f"; only students of {', '.join(family)}" if family else ""
    return str(rule["status"]).replace("_", " ") + limit


def table() -> str:
    """The section with a row for each licence."""
    lines = [HEADING, f"Looked at until {data()['checked_on']}. Generated from the data.\n"]
    lines += ["| id | title | weights | outputs | clause | confidence |", "|---|---|---|---|---|---|"]
    for name, entry in entries().items():
        cells = [f"`{name}`", entry["title"], effect(entry, "weights"), effect(entry, "signal")]
        lines.append("| " + " | ".join([*cells, entry["clause"], entry["confidence"]]) + " |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """The page with the table as the data has it."""
    return PAGE.read_text(encoding="utf-8").partition(HEADING)[0] + table()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
