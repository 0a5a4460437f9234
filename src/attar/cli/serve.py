"""``attar serve MODEL``."""

from __future__ import annotations

import sys
from typing import Any

from attar.cli.command import Answer, argument, read_settings, settings_options
from attar.cli.command import build as build_command
from attar.progress import Progress
from attar.recipe.stages import load
from attar.verbs import check_models

_SETTINGS = "attar.runtime.server.settings:ServerSettings"
_SERVE = "attar.runtime.server:serve"
_EXAMPLE = "attar serve attar:tiny --port 8000"
_ENGINE = "attar.runtime.settings:EngineSettings"


def build(verb: str) -> Any:
    """The command."""
    cls, engine = load(_SETTINGS), load(_ENGINE)
    parameters = [
        argument("model", "a folder, a .gguf file, a hub id (org/name@revision) or attar:tiny"),
        *settings_options(cls),
        *settings_options(engine),
    ]

    def act(values: dict[str, Any], progress: Progress) -> Answer:
        check_models(values["model"])
        settings = read_settings(cls, verb, values)
        options = read_settings(engine, verb, values).options()
        load(_SERVE)(values["model"], settings, progress=progress, show=_tell, **options)
        return Answer({"served": values["model"]}, "served until the signal came")

    return build_command(verb, "Serve a model over HTTP, as OpenAI's API does.", _EXAMPLE, parameters, act)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
