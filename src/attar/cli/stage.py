"""``attar distill|train-head|prune|recover|quantize MODEL -o OUT``, ``attar merge CONFIG.yml -o OUT`` and
``attar extract MODEL --base BASE -o OUT``: options from the settings.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from attar.checkpoint.units import bytes_text, table
from attar.cli.command import (
    Answer,
    argument,
    build_command,
    flag,
    read_settings,
    settings_options,
    text_option,
    track_option,
)
from attar.cli.launch import launch_if_asked
from attar.errors import UsageError
from attar.progress import Progress
from attar.recipe.stages import EXTRACT_SETTINGS, STAGES, load
from attar.verbs import run_extract, run_merge, run_stage, source_of

_MODEL = "a folder, a hub id (org/name@revision) or attar:tiny"


def build_stage(verb: str) -> Any:
    """The command of a stage with one model."""
    stage = STAGES[verb]

    def act(values: dict[str, Any], progress: Progress) -> Answer:
        return _run_stage(verb, values, progress)

    return build_command(
        verb, stage.summary, stage.example, stage_parameters(verb, out=True), act, resumes=True
    )


def build_prune(verb: str) -> Any:
    """The command ``prune``: without an output, ``--scan FILE`` measures and stops."""
    stage = STAGES[verb]

    def act(values: dict[str, Any], progress: Progress) -> Answer:
        if values["out"]:
            return _run_stage(verb, values, progress)
        if not values["scan"]:
            raise UsageError("no output folder", hint="-o OUT, or --scan FILE to measure only")
        if values["launch"]:
            raise UsageError("--scan works in one process", hint="leave out --launch")
        values["method"] = values["method"] or "mixed"
        settings = read_settings(stage.settings_class(), verb, values)
        scan, model = load("attar.pruning.mixed:scan"), source_of(values["model"])
        return Answer(*scan(model, Path(values["scan"]), settings, progress=progress))

    return build_command(
        verb, stage.summary, stage.example, stage_parameters(verb, out=False), act, resumes=True
    )


def stage_parameters(verb: str, *, out: bool) -> list[Any]:
    """The parameters of a stage with one model; ``out``: an output is required."""
    stage = STAGES[verb]
    parameters = [
        argument("model", f"the teacher: {_MODEL}" if verb == "distill" else _MODEL),
        text_option("out", "--out", "-o", help="folder of the new checkpoint", metavar="OUT", required=out),
    ]
    if stage.teacher:
        help = "the model to agree with, usually the unpruned one; not needed with --alpha 0"
        parameters.append(text_option("teacher", "--teacher", help=help, metavar="MODEL"))
    parameters += settings_options(stage.settings_class())
    parameters += launch_options(shard=verb in ("distill", "train-head", "recover"))
    parameters.append(track_option())
    parameters.append(flag("force", "--force", help="replace an existing checkpoint"))
    return parameters


def launch_options(*, shard: bool = False) -> list[Any]:
    """How many processes work, and whether they divide the model."""
    help = "processes on this machine that share the work"
    options = [text_option("launch", "--launch", help=help, metavar="N")]
    help = "divide what is trained over the processes, with its gradients and optimizer (FSDP2)"
    return [*options, flag("shard", "--shard", help=help)] if shard else options


def _run_stage(verb: str, values: dict[str, Any], progress: Progress) -> Answer:
    settings = read_settings(STAGES[verb].settings_class(), verb, values)
    launch_if_asked(values)
    start = time.monotonic()
    checkpoint = run_stage(
        verb,
        values["model"],
        values["out"],
        settings,
        teacher=values.get("teacher"),
        force=values["force"],
        progress=progress,
    )
    data = checkpoint_data(checkpoint, time.monotonic() - start)
    lines = [_size_line(values["out"], checkpoint.nbytes)]
    details = checkpoint.card.details if checkpoint.card else {}
    if "drafting" in details and "head" not in details:
        from attar.distillation.for_drafting import describe_report

        lines.append(describe_report(details["drafting"]))
    return Answer(data, "\n".join(lines))


def build_merge(verb: str) -> Any:
    """The command ``merge``."""
    stage = STAGES[verb]
    cls = stage.settings_class()
    parameters = [
        argument("config", "the models, the method and its parameters, in mergekit's YAML", "CONFIG.yml"),
        text_option("out", "--out", "-o", help="folder of the new checkpoint", metavar="OUT"),
        *settings_options(cls, without=("config",)),
        *launch_options(),
        flag("dry_run", "--dry-run", help="show what would be merged and how the tokenizers align, and stop"),
        flag("force", "--force", help="replace an existing checkpoint"),
    ]

    def act(values: dict[str, Any], progress: Progress) -> Answer:
        settings = read_settings(cls, verb, values)
        if values["dry_run"]:
            from attar.merging.planning.prepare import preview

            plan = preview(settings)
            return Answer(plan.to_dict(), plan.text())
        if not values["out"]:
            raise UsageError("no output folder", hint="-o OUT")
        launch_if_asked(values)
        start = time.monotonic()
        checkpoint = run_merge(values["out"], settings, force=values["force"], progress=progress)
        return _merge_answer(checkpoint, values["out"], time.monotonic() - start)

    return build_command(verb, stage.summary, stage.example, parameters, act, resumes=True)


def build_extract(verb: str) -> Any:
    """The command ``extract``."""
    cls = load(EXTRACT_SETTINGS)
    parameters = [
        argument("model", f"the fine-tuned model: {_MODEL}"),
        text_option("base", "--base", help="the model it came from", metavar="BASE", required=True),
        text_option("out", "--out", "-o", help="folder of the adapter", metavar="OUT", required=True),
        *settings_options(cls),
        *launch_options(),
        flag("force", "--force", help="replace an existing adapter"),
    ]

    def act(values: dict[str, Any], progress: Progress) -> Answer:
        settings = read_settings(cls, verb, values)
        launch_if_asked(values)
        start = time.monotonic()
        folder = run_extract(
            values["model"], values["base"], values["out"], settings, force=values["force"], progress=progress
        )
        return _extract_answer(folder, values["out"], time.monotonic() - start)

    help = "Write the difference of two models as a LoRA adapter (SVD, layer by layer)."
    example = "attar extract out/tuned --base attar:tiny -o out/adapter --rank 32 --energy 0.95"
    return build_command(verb, help, example, parameters, act, resumes=True)


def _merge_answer(checkpoint: Any, out: str, seconds: float) -> Answer:
    lines = [_size_line(out, checkpoint.nbytes)]
    quality = checkpoint.card.to_dict()["details"].get("quality") if checkpoint.card else None
    if quality:
        rows = [(row["name"], f"{row['loss']:.4f}", f"{row['perplexity']:.3f}") for row in quality]
        lines += ["", table(("model", "loss (nats a token)", "perplexity"), rows)]
    return Answer(checkpoint_data(checkpoint, seconds), "\n".join(lines))


def _extract_answer(folder: Path, out: str, seconds: float) -> Answer:
    from attar.checkpoint.card import Card

    card = Card.read(folder)
    nbytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    data = {
        "path": str(folder),
        "bytes": nbytes,
        "seconds": seconds,
        "card": card.to_dict() if card else None,
    }
    return Answer(data, _size_line(out, nbytes))


def checkpoint_data(checkpoint: Any, seconds: float) -> dict[str, Any]:
    """A checkpoint for ``--json``."""
    card = checkpoint.card.to_dict() if checkpoint.card else None
    return {"path": str(checkpoint.path), "bytes": checkpoint.nbytes, "seconds": seconds, "card": card}


def _size_line(out: str, nbytes: int) -> str:
    return f"{out}  {bytes_text(nbytes)}"
