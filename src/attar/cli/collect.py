"""``attar collect PROMPTS --teacher URL|MODEL -o data.jsonl``: a teacher's answers, to learn from."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from attar.checkpoint.units import table
from attar.cli.command import (
    Answer,
    argument,
    build_command,
    flag,
    read_settings,
    settings_options,
    text_option,
)
from attar.cluster.settings import ClusterSettings
from attar.errors import UsageError
from attar.progress import Progress
from attar.recipe.stages import COLLECT_SETTINGS, load
from attar.verbs import teacher_of

_EXAMPLE = "attar collect prompts.txt --teacher http://127.0.0.1:8000/v1 --model NAME -o data.jsonl"


def build_collect(verb: str) -> Any:
    """The command."""
    cls = load(COLLECT_SETTINGS)
    teacher = "an endpoint's URL (OpenAI's chat API, up to /v1), or a model: a folder, a hub id or attar:tiny"
    parameters = [
        argument(
            "prompts",
            "a prompt a line, JSON lines of prompt or messages, or topics; magpie: --samples questions "
            "that the model itself writes",
        ),
        text_option("teacher", "--teacher", help=teacher, metavar="URL|MODEL"),
        text_option("out", "--out", "-o", help="file of the answers", metavar="OUT.jsonl", required=True),
        *settings_options(cls),
        *settings_options(ClusterSettings),
        flag("dry_run", "--dry-run", help="show what would be asked and what it costs at most, and stop"),
        flag("offline", "--offline", help="ask nothing: write the answers that OUT.journal has"),
        flag("filter_only", "--filter-only", help="PROMPTS is a file of answers; only filter it"),
        flag("force", "--force", help="replace an existing file; its journal stays"),
    ]

    def act(values: dict[str, Any], progress: Progress) -> Answer:
        settings = read_settings(cls, verb, values)
        cluster = read_settings(ClusterSettings, verb, values)
        prompts, out = Path(values["prompts"]), Path(values["out"])
        teacher, force = values["teacher"], values["force"]
        if values["filter_only"]:
            filter_collection = load("attar.collection.collect:filter_collection")
            return _answer(filter_collection(prompts, out, settings, force=force, progress=progress))
        if not teacher:
            raise UsageError("no teacher", hint="--teacher URL or MODEL; --filter-only needs none")
        if values["dry_run"]:
            plan_collection = load("attar.collection.collect:plan_collection")
            plan = plan_collection(prompts, out, teacher_of(teacher), settings)
            return Answer(asdict(plan), plan.text())
        options = {"cluster": cluster, "offline": values["offline"], "force": force, "progress": progress}
        collect = load("attar.collection.collect:collect")
        return _answer(collect(prompts, out, teacher_of(teacher), settings, **options))

    help = "Ask a teacher, and keep its answers to learn from: data for distill."
    return build_command(verb, help, _EXAMPLE, parameters, act, resumes=True)


def _answer(result: Any) -> Answer:
    rows = [
        ("requests", f"{result.requests:,}"),
        ("answers", f"{result.answers:,}"),
        ("refused", f"{result.refused:,}"),
        ("sent in this run", f"{result.sent:,}"),
        ("prompt tokens", f"{result.prompt_tokens:,}"),
        ("answer tokens", f"{result.answer_tokens:,}"),
    ]
    if result.cost is not None:
        rows += [("cost of these answers", f"{result.cost:.4f}"), ("spent in all", f"{result.spent:.4f}")]
    rows.append(("kept by the filters", f"{result.filters.kept:,}"))
    text = table((str(result.path), ""), rows)
    return Answer(result.to_dict(), f"{text}\n\n{result.filters.table()}")
