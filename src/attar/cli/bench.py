"""``attar bench MODEL``."""

from __future__ import annotations

from typing import Any

from attar.cli.command import Answer, argument, read_settings, settings_options
from attar.cli.command import build as build_command
from attar.progress import Progress
from attar.recipe.stages import load
from attar.recipe.table import table

_SETTINGS = "attar.runtime.settings"
_EXAMPLE = "attar bench attar:tiny --batch 1 --batch 8 --context 128 --context 512"
_HEADER = ("batch", "context", "prompt tok/s", "decode tok/s", "first p50", "p99 ms", "between p50", "p99 ms")


def build(verb: str) -> Any:
    """The command."""
    engine, cases = load(f"{_SETTINGS}:EngineSettings"), load(f"{_SETTINGS}:BenchSettings")
    parameters = [
        argument("model", "a folder, a .gguf file, a hub id (org/name@revision) or attar:tiny"),
        *settings_options(cases),
        *settings_options(engine),
    ]

    def act(values: dict[str, Any], progress: Progress) -> Answer:
        chosen, options = read_settings(cases, verb, values), read_settings(engine, verb, values).options()
        with progress.task("load", total=1) as task:
            llm = load("attar.runtime.llm:LLM")(values["model"], **options)
            task.advance()
        found = load("attar.runtime.bench:bench")(llm, chosen, progress=progress)
        return Answer(found.to_dict(), _text(found))

    help = "Measure how fast a model reads prompts and writes texts: alone, and several at a time."
    return build_command(verb, help, _EXAMPLE, parameters, act)


def _text(found: Any) -> str:
    from attar.checkpoint.units import bytes_text

    rows = [
        (
            str(case.batch),
            str(case.context),
            f"{case.prompt_tokens_per_s:.1f}",
            f"{case.decode_tokens_per_s:.1f}",
            *(
                f"{1e3 * seconds:.2f}"
                for seconds in (case.first_p50_s, case.first_p99_s, case.between_p50_s, case.between_p99_s)
            ),
        )
        for case in found.cases
    ]
    said = f"{found.model}, runner {found.runner}, {found.tokens} tokens a text, medians of {found.rounds}"
    return f"{said}\n\n{table(_HEADER, rows, left=0)}\n\npeak memory  {bytes_text(found.peak_rss_bytes)}"
