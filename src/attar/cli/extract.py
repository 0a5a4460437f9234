"""``attar extract MODEL --base BASE -o OUT``."""

from __future__ import annotations

import time
from typing import Any

from attar.cli.command import Answer, argument, flag, read_settings, settings_options, text_option
from attar.cli.command import build as build_command
from attar.progress import Progress
from attar.recipe.stages import EXTRACT_SETTINGS, load
from attar.verbs import run_extract

_MODEL = "a folder, a hub id (org/name@revision) or attar:tiny"


def build(verb: str) -> Any:
    """The command."""
    cls = load(EXTRACT_SETTINGS)
    parameters = [
        argument("model", f"the fine-tuned model: {_MODEL}"),
        text_option("base", "--base", help="the model it came from", metavar="BASE", required=True),
        text_option("out", "--out", "-o", help="folder of the adapter", metavar="OUT", required=True),
        *settings_options(cls),
        flag("force", "--force", help="replace an existing adapter"),
    ]

    def act(values: dict[str, Any], progress: Progress) -> Answer:
        settings = read_settings(cls, verb, values)
        start = time.monotonic()
        out = run_extract(
            values["model"], values["base"], values["out"], settings, force=values["force"], progress=progress
        )
        return _answer(out, values["out"], time.monotonic() - start)

    help = "Write the difference of two models as a LoRA adapter (SVD, layer by layer)."
    example = "attar extract out/tuned --base attar:tiny -o out/adapter --rank 32 --energy 0.95"
    return build_command(verb, help, example, parameters, act, resumes=True)


def _answer(made: Any, out: str, seconds: float) -> Answer:
    from attar.checkpoint.card import Card
    from attar.checkpoint.units import bytes_text

    card = Card.read(made)
    nbytes = sum(file.stat().st_size for file in made.glob("*.safetensors"))
    data = {
        "path": str(made),
        "bytes": nbytes,
        "seconds": seconds,
        "card": card.to_dict() if card else None,
    }
    return Answer(data, f"{out}  {bytes_text(nbytes)}")
