"""``attar verify MODEL --against BASE``."""

from __future__ import annotations

from typing import Any

from attar.cli.command import (
    MODEL_HELP,
    Answer,
    argument,
    build_command,
    read_settings,
    settings_options,
    text_option,
)
from attar.errors import UsageError
from attar.measure.settings import VerifySettings
from attar.progress import Progress
from attar.recipe.stages import load
from attar.verbs import source_of

AGAINST = "the model that it was made from"


def build_verify(verb: str) -> Any:
    """The command."""
    parameters = [
        argument("model", MODEL_HELP),
        text_option("against", "--against", help=AGAINST, metavar="BASE"),
        *settings_options(VerifySettings),
    ]

    def act(values: dict[str, Any], progress: Progress) -> Answer:
        if not values["against"]:
            raise UsageError(
                "--against BASE: what the model is measured against", hint=f"attar {verb} --help"
            )
        settings = read_settings(VerifySettings, verb, values)
        model, against = source_of(values["model"]), source_of(values["against"])
        verified = load("attar.measure.verification:verify")(model, against, settings, progress=progress)
        lines = [*verified.faults, verified.verdict]
        return Answer(verified.to_dict(), "\n".join(lines), exit_code=int(bool(verified.faults)))

    help = "Open a finished model as engines do, and measure it against the original; exit code 1: not fit."
    return build_command(verb, help, "attar verify out/w4 --against attar:tiny", parameters, act)
