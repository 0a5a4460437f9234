"""``attar mcp FOLDER ...``."""

from __future__ import annotations

from typing import Any

from attar.cli.command import Answer, build_command, flag, many_argument
from attar.errors import MissingExtraError, UsageError
from attar.progress import Progress


def build_mcp(verb: str) -> Any:
    """The command."""
    parameters = [
        many_argument("folders", "what the client may read and write: everything below", "FOLDER..."),
        flag("hub", "--hub", help="models of the hub too (org/name)"),
    ]

    def act(values: dict[str, Any], progress: Progress) -> Answer:
        if not values["folders"]:
            raise UsageError("no folder", hint="attar mcp FOLDER")
        try:
            import mcp
        except ImportError:
            raise MissingExtraError("mcp", "mcp") from None
        del mcp
        from attar.mcp.folders import Folders
        from attar.mcp.server import serve

        serve(Folders.of(values["folders"], hub=values["hub"]))
        return Answer({}, lambda: None)

    help = (
        "Offer inspect, plan, estimate, quantize, evaluate and status to an agent, as tools of the Model "
        "Context Protocol on stdin and stdout."
    )
    return build_command(verb, help, "attar mcp models/", parameters, act)
