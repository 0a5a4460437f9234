"""``attar upload MODEL ADDRESS``."""

from __future__ import annotations

from typing import Any

from attar.cli.command import Answer, argument, build_command, text_option
from attar.progress import Progress
from attar.verbs import upload


def build_upload(verb: str) -> Any:
    """The command."""
    parameters = [
        argument("model", "the folder of a model"),
        argument("address", "s3://BUCKET/FOLDER (or another store of fsspec), or hf://ORG/NAME"),
        text_option(
            "against",
            "--against",
            help="the model that it was made from: it is verified first, uploaded only if it is fit, and its "
            "card gets the figures",
            metavar="BASE",
        ),
    ]

    def act(values: dict[str, Any], progress: Progress) -> Answer:
        model, address = values["model"], values["address"]
        verdict = upload(model, address, against=values["against"], progress=progress)
        data = {"model": model, "address": address, "verdict": verdict}
        note = verdict or "not verified: --against BASE measures it first"
        return Answer(data, f"{note}\n{model} is at {address}")

    help = "Upload a checkpoint to an object store or the hub, its card last; goes on where it was stopped."
    example = "attar upload runs/quickstart/06-gptq s3://models/small"
    return build_command(verb, help, example, parameters, act, resumes=True)
