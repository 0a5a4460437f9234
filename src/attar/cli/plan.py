"""``attar plan MODEL``: a budget in, a recipe and its evidence out."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from attar.checkpoint.units import bytes_text, number, table
from attar.cli.command import (
    MODEL_HELP,
    Answer,
    build_command,
    flag,
    optional_argument,
    read_settings,
    settings_options,
    text_option,
)
from attar.errors import SettingsError, UsageError
from attar.planner.settings import ENGINES, PlanSettings
from attar.progress import Progress
from attar.recipe.plan_history import PlanRecord, read_records

_OUT = "the recipe, for attar run; beside it FILE.html, a page to choose from"
_HISTORY = (
    "date",
    "model",
    "method",
    "KL predicted",
    "90 %",
    "measured",
    "inside",
    "bytes predicted",
    "measured",
)


def build_plan(verb: str) -> Any:
    """The command."""
    engines = "|".join(ENGINES)
    parameters = [
        optional_argument("model", MODEL_HELP, "MODEL", ""),
        text_option(
            "out",
            "--out",
            "-o",
            help="the recipe, for attar run; a page to choose from is beside it",
            metavar="FILE.yaml",
        ),
        text_option("engine", "--for", help="the engine that will run it  [default: attar]", metavar=engines),
        *settings_options(PlanSettings, without=("engine",)),
        flag("history", "--history", help="show how good the plans were that were run here"),
    ]

    def act(values: dict[str, Any], progress: Progress) -> Answer:
        if values.pop("history"):
            records = read_records()
            return Answer({"plans": [asdict(record) for record in records]}, history_text(records))
        if values["engine"] not in (None, *ENGINES):
            raise SettingsError("for", values["engine"], f"{', '.join(ENGINES[:-1])} or {ENGINES[-1]}")
        model, out = values.pop("model"), values.pop("out")
        if not model:
            raise UsageError("a model is missing", hint="attar plan MODEL --size 5GB")
        settings = read_settings(PlanSettings, verb, values)
        if out and Path(out).suffix not in (".yaml", ".yml"):
            raise UsageError(f"{out} is no name of a YAML file", hint="-o plan.yaml")
        if out and (Path(out).is_dir() or not Path(out).absolute().parent.is_dir()):
            raise UsageError(f"{out} cannot be written", hint="-o takes the name of a YAML file")
        from attar.verbs import run_plan

        plan = run_plan(model, out, settings, progress=progress)
        page = Path(out or "").with_suffix(".html") if out else None
        next_line = (
            f"attar run {out}\npage: {page}" if out else "-o plan.yaml writes the recipe, for attar run"
        )
        return Answer(plan.to_dict(), f"{plan.text()}\n\n{next_line}")

    help = (
        "Find the recipe that meets a budget of bytes, quality and speed at the smallest loss: bits of each "
        "layer and the format of keys and values, by what each costs this model. Losses are measured once "
        "and kept. The recipe says what it predicts; attar run measures it, and later plans are corrected."
    )
    example = "attar plan attar:tiny --size 4MB -o plan.yaml"
    return build_command(verb, help, example, parameters, act, resumes=True)


def history_text(records: list[PlanRecord]) -> str:
    """Plans that were run: a table, and how many of the measured KLs were inside their interval."""
    if not records:
        return "no plan was run here yet: attar plan MODEL -o plan.yaml, then attar run plan.yaml"
    rows = [_history_row(record) for record in records]
    judged = [record.inside for record in records if record.inside is not None]
    share = f"{sum(judged)} of {len(judged)} measured KLs are inside their 90 % interval"
    return f"{table(_HISTORY, rows, left=3)}\n\n{share}"


def _history_row(record: PlanRecord) -> tuple[str, ...]:
    predicted, measured = record.predicted, record.measured
    low, high = (number(predicted.get(name), ".2g") for name in ("kl_low", "kl_high"))
    inside = {True: "yes", False: "no", None: "-"}[record.inside]
    sizes = [bytes_text(numbers["bytes"]) if "bytes" in numbers else "-" for numbers in (predicted, measured)]
    kls = [number(numbers.get("kl"), ".4g") for numbers in (predicted, measured)]
    return (record.date, record.name, record.method, kls[0], f"{low} to {high}", kls[1], inside, *sizes)
