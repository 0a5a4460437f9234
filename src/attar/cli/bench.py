"""``attar bench MODEL``: speed of a model, or of speculation methods against plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attar.checkpoint.units import bytes_text, number, table
from attar.cli.command import (
    MODEL_HELP,
    Answer,
    argument,
    build_command,
    flag,
    read_settings,
    settings_options,
    text_option,
)
from attar.errors import OutputError, UsageError
from attar.progress import Progress
from attar.runtime.settings import BenchSettings, EngineSettings
from attar.runtime.speculate.settings import ProfileSettings
from attar.settings import settings_of
from attar.verbs import check_models

_EXAMPLE = "attar bench attar:tiny --speculate ngram --speculate lookahead --picture speedup.svg"
_HEADER = ("batch", "context", "prompt tok/s", "decode tok/s", "first p50", "p99 ms", "between p50", "p99 ms")
_PROFILE_HEADER = ("set", "method", "batch", "tok/s", "speedup", "95 %", "accepted", "a", "tok/pass",
                   "theory", "drafting", "same")  # fmt: skip
_PROFILE_NOTE = """\
speedup: geometric mean over prompts, rounds interleaved; 95 %: Student's t of the logarithms
accepted: of all drafts; a: at the depths tried; theory: mean of (1 - a^(k+1)) / (1 - a), k a pass's depth
drafting: share of the time spent in the proposer; same: completions equal to plain decoding's"""


def build_bench(verb: str) -> Any:
    """The command."""
    profile_options = [setting.name for setting in settings_of(ProfileSettings)]
    parameters = [
        argument("model", MODEL_HELP),
        *settings_options(BenchSettings),
        *settings_options(ProfileSettings),
        text_option("picture", "--picture", help="with --speculate or --draft: draw it", metavar="FILE.svg"),
        flag("kernels", "--kernels", help="time the products of its layers in each format, for attar plan"),
        *settings_options(EngineSettings, without=[*profile_options, "prefix_store"]),
    ]

    def act(values: dict[str, Any], progress: Progress) -> Answer:
        check_models(values["model"])
        other_options = {name: value for name, value in values.items() if name not in profile_options}
        methods = read_settings(ProfileSettings, verb, values)
        engine, cases = (
            read_settings(EngineSettings, verb, other_options),
            read_settings(BenchSettings, verb, other_options),
        )
        if values["kernels"]:
            return _kernels(values["model"], cases.batch, engine.device, progress)
        if methods.requested:
            batches = cases.batch if values.get("batch") else (1,)
            return _profile(values, methods, cases, engine, batches, progress)
        _refuse_without_methods(values, [*profile_options, "picture"])
        from attar.runtime.bench import bench
        from attar.runtime.llm import LLM

        with progress.task("load", total=1) as task:
            llm = LLM(values["model"], **engine.options())
            task.advance()
        result = bench(llm, cases, progress=progress)
        return Answer(result.to_dict(), _text(result))

    help = (
        "Measure how fast a model reads prompts and generates completions: alone, and several at a time. "
        "With --speculate or --draft: plain decoding against speculation methods. With --kernels: the times "
        "of its products, which are kept for attar plan --speed; as YAML for --hardware elsewhere; with "
        "--device cuda those of a card, by each of its kernels."
    )
    return build_command(verb, help, _EXAMPLE, parameters, act)


def _kernels(model: str, batches: Sequence[int], device: str, progress: Progress) -> Answer:
    """Times of a model's products; as text the YAML that ``attar plan --hardware`` takes elsewhere, of a
    card the table of its kernels."""
    from attar.planner.speed import device_kernels, model_kernels

    if device != "cpu":
        times = device_kernels(model, batches, device, progress)
    else:
        times = model_kernels(model, batches, progress)
    return Answer(times.to_dict(), times.to_yaml().rstrip())


def _profile(
    values: dict[str, Any], methods: Any, cases: Any, engine: Any, batches: Any, progress: Progress
) -> Answer:
    """Measure speculation methods, and draw the picture where it is requested."""
    picture = _picture_path(values.get("picture"))
    from attar.measure.speculation.run import run_profile

    profile = run_profile(values["model"], methods, cases, engine, batches=batches, progress=progress)
    if picture is not None:
        from attar.checkpoint.atomic import write_bytes
        from attar.measure.report.speculation import speculation_picture

        write_bytes(picture, speculation_picture(profile.to_dict()).encode())
    return Answer(profile.to_dict(), profile_text(profile))


def _picture_path(name: str | None) -> Path | None:
    """The path of the picture; one that cannot be written is refused before anything is measured."""
    if name is None:
        return None
    path = Path(name)
    if path.is_dir() or not path.parent.is_dir():
        why = "is a folder" if path.is_dir() else f"cannot be written: there is no folder {path.parent}"
        raise OutputError(f"{path} {why}", hint="--picture takes the name of a file")
    return path


def _refuse_without_methods(values: dict[str, Any], names: list[str]) -> None:
    """Raise UsageError for an option that needs --speculate or --draft."""
    for name in names:
        if values.get(name) not in (None, [], (), False):
            spelling = "--" + name.replace("_", "-")
            raise UsageError(f"{spelling} goes with --speculate or --draft", hint="add --speculate ngram")


def _text(result: Any) -> str:
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
        for case in result.cases
    ]
    how = f"runner {result.runner}, weights {result.weights}"
    title = f"{result.model}, {how}, {result.tokens} tokens each, medians of {result.rounds}"
    return f"{title}\n\n{table(_HEADER, rows, left=0)}\n\npeak memory  {bytes_text(result.peak_rss_bytes)}"


def profile_text(profile: Any) -> str:
    """The table of speculation methods, and their histograms."""
    how = f"temperature {profile.temperature:g}, seeded" if profile.temperature else "greedy"
    how += ", typical acceptance (LOSSY)" if profile.lossy else ""
    rounds = f"{profile.rounds} rounds" if profile.rounds > 1 else "1 round"
    title = f"{profile.model}, runner {profile.runner}, {profile.tokens} tokens each, {how}, {rounds}"
    rows = table(_PROFILE_HEADER, [_profile_row(row) for row in profile.rows], left=2)
    return f"{title}\n\n{rows}\n\n{_PROFILE_NOTE}\n\n{_histograms(profile)}".rstrip()


def _profile_row(row: Any) -> tuple[str, ...]:
    has_interval = row.low is not None and row.low < row.high  # not from a single prompt
    interval = f"{row.low:.2f} to {row.high:.2f}" if has_interval else "-"
    return (
        row.set,
        row.method,
        str(row.batch),
        f"{row.tokens_per_s:.1f}",
        number(row.speedup, ".2f"),
        interval,
        number(row.acceptance, ".1%"),
        number(row.chance, ".2f"),
        number(row.tokens_per_pass, ".2f"),
        number(row.theory, ".2f"),
        f"{row.draft_share:.1%}",
        f"{row.same}/{row.texts}",
    )


def _histograms(profile: Any) -> str:
    """For each method, over all sets: per cent of the passes with 0, 1, 2, ... accepted drafts."""
    sums: dict[str, list[int]] = {}
    for row in profile.rows:
        counts = sums.setdefault(row.method, [])
        counts += [0] * (len(row.histogram) - len(counts))
        for accepted, count in enumerate(row.histogram):
            counts[accepted] += count
    drafted = {method: counts for method, counts in sums.items() if sum(counts)}
    if not drafted:
        return ""
    width = max(map(len, drafted))
    lines = [
        f"{method:{width}}  " + "  ".join(f"{n}: {count / sum(counts):.0%}" for n, count in enumerate(counts))
        for method, counts in drafted.items()
    ]
    return "\n".join(["passes by accepted drafts, all sets", *lines])
