"""``attar export MODEL -o OUT``: a file for another engine; of a GGUF file its loss, of several a table."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attar.checkpoint.card import Card
from attar.checkpoint.processes import Processes, rank
from attar.checkpoint.readme import FILE as README
from attar.checkpoint.readme import MODELFILE, ollama_name, with_new_readme
from attar.checkpoint.units import bytes_text
from attar.cli.command import Answer, build_command, flag, read_settings, text_option
from attar.cli.launch import launch_if_asked
from attar.cli.stage import checkpoint_data, stage_parameters
from attar.deployment.settings import GGUF, ExportSettings, output_defaults
from attar.errors import AttarError, UsageError
from attar.measure.run_folder import RunRecord, StageRecord
from attar.measure.settings import EvaluateSettings
from attar.progress import Progress
from attar.recipe.stages import STAGES, load
from attar.verbs import check_models, check_output, is_dense, run_stage

TOKENS = 2048
"""Held-out tokens on which the loss of a file is measured."""


def build_export(verb: str) -> Any:
    """The command."""
    types_help = "gguf: several types by commas, Q3_K_M,Q4_K_M: a file NAME-TYPE.gguf each, and one table"
    parameters = [
        *stage_parameters(verb, out=True),
        text_option("types", "--types", help=types_help, metavar="TYPE,..."),
        flag("no_check", "--no-check", help=f"gguf: do not measure the loss on {TOKENS:,} held-out tokens"),
    ]

    def act(values: dict[str, Any], progress: Progress) -> Answer:
        model, types = values["model"], [name.strip() for name in (values["types"] or "").split(",")]
        if values["types"]:
            _check_types(values, types)
        check_models(model)
        values |= output_defaults(_given(values), values["out"], lambda: is_dense(model))
        files = {}
        for kind in types:
            out = _file_of(values["out"], kind) if kind else values["out"]
            check_output(out, values["force"])
            files[out] = read_settings(ExportSettings, verb, values | ({"type": kind} if kind else {}))
        launch_if_asked(values)
        start = time.monotonic()
        written = [
            run_stage(verb, model, out, settings, force=values["force"], progress=progress)
            for out, settings in files.items()
        ]
        seconds = time.monotonic() - start
        run = None
        if not values["no_check"] and all(settings.format == "gguf" for settings in files.values()):
            run = _measured(model, files, progress)
        answers = [checkpoint_data(checkpoint, seconds) for checkpoint in written]
        if run is not None:
            answers = [
                answer | {"measurements": dict(stage.measurements)}
                for answer, stage in zip(answers, run.stages[1:], strict=True)
            ]
        sizes = [checkpoint.nbytes for checkpoint in written]
        data = {"files": answers} if values["types"] else answers[0]
        return Answer(data, "\n".join(_lines(list(files), sizes, run)))

    stage = STAGES[verb]
    return build_command(verb, stage.summary, stage.example, parameters, act, resumes=True)


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value not in (None, [], (), False)}


def _check_types(values: dict[str, Any], types: Sequence[str]) -> None:
    """Raise UsageError unless there are several types, and a file to name theirs after."""
    if values["type"] or Path(values["out"]).suffix != GGUF:
        raise UsageError("--types makes files: -o NAME.gguf, without --type", hint="attar export --help")
    if not all(types) or len(set(types)) < len(types):
        raise UsageError(f"--types {values['types']}: each type once", hint="--types Q3_K_M,Q4_K_M,Q5_K_M")


def _file_of(out: str, kind: str) -> str:
    """``NAME.gguf`` and a type: ``NAME-TYPE.gguf``."""
    path = Path(out)
    return str(path.with_name(f"{path.stem}-{kind.upper()}{GGUF}"))


def _measured(model: str, files: dict[str, ExportSettings], progress: Progress) -> RunRecord | None:
    """What each file loses against the model, on held-out text of the same source: a run with a stage each.
    The files' cards record it. None where it cannot be measured; a line says why."""
    settings = next(iter(files.values()))
    evaluation = EvaluateSettings(
        data=settings.data,
        bos=settings.bos,
        seed=settings.seed,
        tokens=TOKENS,
        speed=False,
        sample="",
        noise_floor=False,
        answers=0,
    )
    evaluate = load("attar.measure.evaluate:evaluate")
    try:
        reference = load("attar.measure.evaluate:prepare_reference")(model, evaluation, progress=progress)
        original = StageRecord(str(model), measurements={"bytes": _bytes(model)})
        stages = [original]
        for out in files:
            processes = Processes.of_run()
            measured = evaluate(out, evaluation, reference=reference, processes=processes, progress=progress)
            measurements = measured.to_dict()
            if not rank():
                _record(Path(out), measurements)
            stages.append(StageRecord(Path(out).name, measurements=measurements))
    except AttarError as error:
        progress.log(f"the loss was not measured: {error.message}")
        return None
    return RunRecord(tuple(stages))


def _bytes(model: str) -> int:
    return int(load("attar.checkpoint.open:open_checkpoint")(model).nbytes)


def _record(out: Path, measurements: dict[str, Any]) -> None:
    """Write measurements into the card of a folder or of a single file."""
    if out.is_dir() and (card := Card.read(out)):
        with_new_readme(card.with_measurements(**measurements), out / README).write(out)
    elif card := load("attar.checkpoint.open:open_checkpoint")(out).card:
        card_path = load("attar.deployment.stage:card_beside")(out)
        measured = with_new_readme(card.with_measurements(**measurements), out.with_suffix(".md"))
        load("attar.checkpoint.atomic:write_json")(card_path, measured.to_dict())


def _lines(outs: Sequence[str], sizes: Sequence[int], run: RunRecord | None) -> list[str]:
    """For people: each file's size, what it lost, and Ollama's command."""
    lines = [f"{out}  {bytes_text(size)}" for out, size in zip(outs, sizes, strict=True)]
    if run is not None and len(outs) == 1:
        from attar.measure.verdict import verdict

        lines.append(f"{verdict(run)} ({TOKENS:,} held-out tokens)")
    elif run is not None:
        from attar.measure.table import plain_table

        lines = [plain_table(run), ""]
    for out in map(Path, outs):
        modelfile = out.with_suffix(f".{MODELFILE}") if out.suffix == GGUF else out / MODELFILE
        if modelfile.is_file():
            lines.append(f"ollama create {ollama_name(out.stem)} -f {modelfile}")
    return lines
