"""``attar distill|prune|recover|quantize|export MODEL -o OUT``: one builder, options from the settings."""

from __future__ import annotations

import time
from typing import Any

from attar.cli.command import Answer, argument, flag, read_settings, settings_options, text_option
from attar.cli.command import build as build_command
from attar.progress import Progress
from attar.recipe.stages import STAGES
from attar.verbs import run_stage

_MODEL = "a folder, a hub id (org/name@revision) or attar:tiny"


def build(verb: str) -> Any:
    """The command of a stage."""
    stage = STAGES[verb]
    cls = stage.settings_class()
    parameters = [
        argument("model", f"the teacher: {_MODEL}" if verb == "distill" else _MODEL),
        text_option("out", "--out", "-o", help="folder of the new checkpoint", metavar="OUT", required=True),
    ]
    if stage.teacher:
        help = "the model to agree with, usually the unpruned one"
        parameters.append(text_option("teacher", "--teacher", help=help, metavar="MODEL", required=True))
    parameters += settings_options(cls)
    parameters.append(flag("force", "--force", help="replace an existing checkpoint"))

    def act(values: dict[str, Any], progress: Progress) -> Answer:
        settings = read_settings(cls, verb, values)
        start = time.monotonic()
        made = run_stage(
            verb,
            values["model"],
            values["out"],
            settings,
            teacher=values.get("teacher"),
            force=values["force"],
            progress=progress,
        )
        return _answer(made, values["out"], time.monotonic() - start)

    return build_command(verb, stage.summary, stage.example, parameters, act, resumes=True)


def _answer(made: Any, out: str, seconds: float) -> Answer:
    from attar.checkpoint.units import bytes_text

    card = made.card.to_dict() if made.card else None
    data = {"path": str(made.path), "bytes": made.nbytes, "seconds": seconds, "card": card}
    lines = [f"{out}  {bytes_text(made.nbytes)}"]
    if made.card and "drafting" in made.card.details:
        from attar.distillation.for_drafting import describe_report

        lines.append(describe_report(made.card.details["drafting"]))
    return Answer(data, "\n".join(lines))
