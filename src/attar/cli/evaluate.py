"""``attar evaluate MODEL [--reference BASE]``."""

from __future__ import annotations

from typing import Any

from attar.cli.command import Answer, argument, read_settings, settings_options, text_option
from attar.cli.command import build as build_command
from attar.progress import Progress
from attar.recipe.stages import EVALUATE_SETTINGS, load
from attar.recipe.table import number, table
from attar.verbs import run_evaluate

_EXAMPLE = "attar evaluate out/w4 --reference attar:tiny --tokens 16384"
_ROWS = (
    ("perplexity", "perplexity", ".4f"),
    ("KL to the reference, mean (nats)", "kl_mean", ".5f"),
    ("KL to the reference, 99 %", "kl_p99", ".4f"),
    ("top-1 agreement", "top1_agreement", ".2%"),
    ("bits per weight", "bits_per_weight", ".3f"),
    ("prefill, tokens/s", "prefill_tokens_per_s", ".1f"),
    ("decode, tokens/s", "decode_tokens_per_s", ".1f"),
)


def build(verb: str) -> Any:
    """The command."""
    cls = load(EVALUATE_SETTINGS)
    parameters = [
        argument("model", "a folder, a .gguf file, a hub id (org/name@revision) or attar:tiny"),
        text_option(
            "reference",
            "--reference",
            help="the model to compare with: adds KL and agreement",
            metavar="BASE",
        ),
        *settings_options(cls),
    ]

    def act(values: dict[str, Any], progress: Progress) -> Answer:
        settings = read_settings(cls, verb, values)
        found = run_evaluate(
            values["model"], settings, reference=values["reference"], progress=progress
        ).to_dict()
        return Answer(found, _text(found))

    return build_command(
        verb, "Measure a model's quality, size, speed and memory.", _EXAMPLE, parameters, act
    )


def _text(found: dict[str, Any]) -> str:
    from attar.checkpoint.units import bytes_text

    rows = [(label, number(found[key], form)) for label, key, form in _ROWS]
    rows.insert(4, ("bytes", bytes_text(found["bytes"])))
    if "data" in found:
        rows.append(("text", found["data"] + (", held out" if found["held_out"] else ", NOT held out")))
    rows.append(("peak memory", bytes_text(found["peak_rss_bytes"])))
    text = table(("measurement", "value"), rows)
    sample = found.get("sample")
    return f"{text}\n\n{found.get('prompt') or ''}{sample}" if sample else text
