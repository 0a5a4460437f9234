"""``attar bench MODEL``: how fast it is, or how fast methods of speculation make it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attar.checkpoint.units import table
from attar.cli.bench_speculate import profile_text
from attar.cli.command import Answer, argument, read_settings, settings_options, text_option
from attar.cli.command import build as build_command
from attar.errors import OutputError, UsageError
from attar.progress import Progress
from attar.recipe.settings import settings_of
from attar.recipe.stages import load
from attar.verbs import check_models

_SETTINGS = "attar.runtime.settings"
_PROFILE = "attar.runtime.speculate.profile"
_EXAMPLE = "attar bench attar:tiny --speculate ngram --speculate lookahead --picture speedup.svg"
_HEADER = ("batch", "context", "prompt tok/s", "decode tok/s", "first p50", "p99 ms", "between p50", "p99 ms")


def build(verb: str) -> Any:
    """The command."""
    engine, cases = load(f"{_SETTINGS}:EngineSettings"), load(f"{_SETTINGS}:BenchSettings")
    methods = load(f"{_PROFILE}.settings:ProfileSettings")
    own = [setting.name for setting in settings_of(methods)]
    parameters = [
        argument("model", "a folder, a .gguf file, a hub id (org/name@revision) or attar:tiny"),
        *settings_options(cases),
        *settings_options(methods),
        text_option("picture", "--picture", help="with --speculate or --draft: draw it", metavar="FILE.svg"),
        *settings_options(engine, without=own),
    ]

    def act(values: dict[str, Any], progress: Progress) -> Answer:
        check_models(values["model"])
        rest = {name: value for name, value in values.items() if name not in own}
        chosen, how = read_settings(methods, verb, values), read_settings(engine, verb, rest)
        bench = read_settings(cases, verb, rest)
        if chosen.asked:
            picture = _picture(values.get("picture"))
            batches = bench.batch if values.get("batch") else (1,)
            found = load(f"{_PROFILE}.run:run_profile")(
                values["model"], chosen, bench, how, batches=batches, progress=progress
            )
            if picture is not None:
                drawn = load("attar.measure.report.speculation:speculation_picture")(found.to_dict())
                load("attar.checkpoint.atomic:write_bytes")(picture, drawn.encode())
            return Answer(found.to_dict(), profile_text(found))
        _refuse_without_methods(values, [*own, "picture"])
        with progress.task("load", total=1) as task:
            llm = load("attar.runtime.llm:LLM")(values["model"], **how.options())
            task.advance()
        found = load("attar.runtime.bench:bench")(llm, bench, progress=progress)
        return Answer(found.to_dict(), _text(found))

    help = (
        "Measure how fast a model reads prompts and writes texts: alone, and several at a time. "
        "With --speculate or --draft: plain decoding beside methods of speculation."
    )
    return build_command(verb, help, _EXAMPLE, parameters, act)


def _picture(written: str | None) -> Path | None:
    """Where it goes; what cannot be a file is refused before anything is measured."""
    if written is None:
        return None
    path = Path(written)
    if path.is_dir() or not path.parent.is_dir():
        why = "is a folder" if path.is_dir() else f"cannot be written: there is no folder {path.parent}"
        raise OutputError(f"{path} {why}", hint="--picture takes the name of a file")
    return path


def _refuse_without_methods(values: dict[str, Any], names: list[str]) -> None:
    """Raises UsageError where an option is given that only the profiler has."""
    for name in names:
        if values.get(name) not in (None, [], (), False):
            spelling = "--" + name.replace("_", "-")
            raise UsageError(f"{spelling} goes with --speculate or --draft", hint="add --speculate ngram")


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
