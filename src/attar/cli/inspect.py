"""``attar inspect CHECKPOINT`` and ``attar inspect FILE.gguf``."""

from __future__ import annotations

from typing import Any

from attar.cli.command import MODEL_HELP, Answer, argument, build_command
from attar.progress import Progress


def build_inspect(verb: str) -> Any:
    """The command."""
    parameters = [argument("checkpoint", MODEL_HELP)]

    def act(values: dict[str, Any], progress: Progress) -> Answer:
        from attar.verbs import inspect

        inspection = inspect(values["checkpoint"])
        return Answer(inspection.to_dict(), str(inspection.render()))

    help = "Show a checkpoint's architecture, parameters, bits, lineage and licence duties. Reads no weights."
    return build_command(verb, help, "attar inspect attar:tiny", parameters, act)
