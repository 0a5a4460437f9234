"""``attar serve MODEL``."""

from __future__ import annotations

import sys
from typing import Any

from attar.cli.command import Answer, argument, read_settings, settings_options, text_option
from attar.cli.command import build as build_command
from attar.progress import Progress
from attar.recipe.stages import load

_SETTINGS = "attar.runtime.server.settings:ServerSettings"
_SERVE = "attar.runtime.server.stage:serve"
_EXAMPLE = "attar serve attar:tiny --port 8000"
_ENGINE = (
    ("dtype", "what to compute in: auto, float32, bfloat16 or float16"),
    ("device", "cpu, cuda or cuda:0"),
    ("kv_dtype", "how keys and values are kept; auto: as the model computes"),
)


def build(verb: str) -> Any:
    """The command."""
    cls = load(_SETTINGS)
    parameters = [
        argument("model", "a folder, a .gguf file, a hub id (org/name@revision) or attar:tiny"),
        *(text_option(name, f"--{name.replace('_', '-')}", help=help) for name, help in _ENGINE),
        *settings_options(cls),
    ]

    def act(values: dict[str, Any], progress: Progress) -> Answer:
        settings = read_settings(cls, verb, values)
        engine = {name: values[name] for name, _ in _ENGINE if values[name] is not None}
        load(_SERVE)(values["model"], settings, progress=progress, told=_tell, **engine)
        return Answer({"served": values["model"]}, "served until the signal came")

    return build_command(verb, "Serve a model over HTTP, as OpenAI's API does.", _EXAMPLE, parameters, act)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
