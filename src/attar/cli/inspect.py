"""``attar inspect CHECKPOINT`` and ``attar inspect FILE.gguf``."""

from __future__ import annotations

from typing import Any

from attar.cli.command import Answer, argument
from attar.cli.command import build as build_command
from attar.progress import Progress


def build(verb: str) -> Any:
    """The command."""
    parameters = [
        argument("checkpoint", "a folder, a .gguf file, a hub id (org/name@revision) or attar:tiny")
    ]

    def act(values: dict[str, Any], progress: Progress) -> Answer:
        from attar.verbs import inspect

        found = inspect(values["checkpoint"])
        return Answer(found.to_dict(), str(found.render()))

    help = "Show a checkpoint's architecture, parameters, bits, lineage and licence duties. Reads no weights."
    return build_command(verb, help, "attar inspect attar:tiny", parameters, act)
