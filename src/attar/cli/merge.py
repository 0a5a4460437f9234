"""``attar merge CONFIG.yml -o OUT``."""

from __future__ import annotations

import time
from typing import Any

from attar.cli.command import Answer, argument, flag, read_settings, settings_options, text_option
from attar.cli.command import build as build_command
from attar.errors import UsageError
from attar.progress import Progress
from attar.recipe.stages import STAGES, load
from attar.verbs import run_merge


def build(verb: str) -> Any:
    """The command."""
    stage = STAGES[verb]
    cls = stage.settings_class()
    parameters = [
        argument("config", "the models, the method and its parameters, in mergekit's YAML", "CONFIG.yml"),
        text_option("out", "--out", "-o", help="folder of the new checkpoint", metavar="OUT"),
        *settings_options(cls, without=("config",)),
        flag("dry_run", "--dry-run", help="say what would be merged and how the tokenizers align, and stop"),
        flag("force", "--force", help="replace an existing checkpoint"),
    ]

    def act(values: dict[str, Any], progress: Progress) -> Answer:
        settings = read_settings(cls, verb, values)
        if values["dry_run"]:
            found = load("attar.merging.planning.prepare:preview")(settings)
            return Answer(found.to_dict(), found.text())
        if not values["out"]:
            raise UsageError("no output folder", hint="-o OUT")
        start = time.monotonic()
        made = run_merge(values["out"], settings, force=values["force"], progress=progress)
        return _answer(made, values["out"], time.monotonic() - start)

    return build_command(verb, stage.summary, stage.example, parameters, act, resumes=True)


def _answer(made: Any, out: str, seconds: float) -> Answer:
    from attar.checkpoint.units import bytes_text, table

    card = made.card.to_dict() if made.card else None
    data = {"path": str(made.path), "bytes": made.nbytes, "seconds": seconds, "card": card}
    lines = [f"{out}  {bytes_text(made.nbytes)}"]
    quality = card["details"].get("quality") if card else None
    if quality:
        rows = [(row["name"], f"{row['loss']:.4f}", f"{row['perplexity']:.3f}") for row in quality]
        lines += ["", table(("model", "loss (nats a token)", "perplexity"), rows)]
    return Answer(data, "\n".join(lines))
