"""``attar report RUN_DIR``."""

from __future__ import annotations

from typing import Any

from attar.cli.command import Answer, argument
from attar.cli.command import build as build_command
from attar.progress import Progress


def build(verb: str) -> Any:
    """The command."""
    parameters = [argument("run_dir", "the folder of a run", "RUN_DIR")]

    def act(values: dict[str, Any], progress: Progress) -> Answer:
        from attar.verbs import report

        path = report(values["run_dir"])
        return Answer({"report": str(path)}, str(path))

    help = "Build the report of a run again: one HTML file that needs no network."
    return build_command(verb, help, "attar report runs/quickstart", parameters, act)
