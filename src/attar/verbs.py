"""The verbs as Python functions: ``attar.quantize("attar:tiny", "out/w4", scheme="W4A16", method="gptq")``.

Settings are keywords, checked like those of a recipe: an unknown one is an error that names the nearest.
A bar shows on a terminal and in a notebook, ``progress=False`` hides it (:func:`attar.progress.shown`). A
transformers model may stand where a path is taken, alone or as ``(model, tokenizer)``, and ``data`` may be
texts or a ``datasets.Dataset``. torch is imported by the first call of a verb, not by this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from attar.checkpoint import atomic, remote
from attar.checkpoint.open import Checkpoint
from attar.checkpoint.processes import Processes
from attar.checkpoint.readme import FILE as README
from attar.checkpoint.readme import with_new_readme
from attar.errors import NumericsError, UsageError
from attar.progress import Progress, shown
from attar.recipe.stages import STAGES, load, settings_classes
from attar.settings import PythonOrigin, parse, plain
from attar.tracking.track import stage_run

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from attar.checkpoint.description import Inspection
    from attar.collection.collect import CollectionResult
    from attar.measure.evaluate import Measurements
    from attar.measure.verification import Verification
    from attar.planner.result import Plan
    from attar.quantization.settings import QuantizeSettings
    from attar.recipe.run import RunResult
    from attar.recipe.sweep import SweepOutcome
    from attar.runtime.results import Result

ModelSource: TypeAlias = "str | Path | Checkpoint | PreTrainedModel | tuple[PreTrainedModel, Any]"
"""A folder, a hub id (``org/name@revision``), ``attar:tiny``, a checkpoint that is open already, or a
transformers model, alone or with its tokenizer."""


def collect(
    prompts: str | Path,
    out: str | Path,
    *,
    teacher: ModelSource,
    offline: bool = False,
    force: bool = False,
    progress: Progress | bool | None = None,
    **settings: Any,
) -> CollectionResult:
    """Ask a teacher, and write its answers as JSON lines to learn from.

    Answers are kept in ``OUT.journal`` as they come: called again, nothing is asked twice.

    Args:
        prompts: a text file (a prompt a line), JSON lines of ``prompt`` or ``messages``, or topics;
            ``magpie``: the model writes questions of its own, ``samples`` of them.
        out: the data, a file that ends with ``.jsonl``; its card is ``OUT.card.json``.
        teacher: the URL of an endpoint that speaks OpenAI's API, or a model.
        offline: ask nothing: write what the journal has.
        settings: see :class:`attar.collection.settings.CollectSettings`.

    Raises:
        AttarError: bad input, or an endpoint that fails; the journal stays.
    """
    checked, source = _settings("collect", settings), teacher_of(teacher)
    result: CollectionResult = load("attar.collection.collect:collect")(
        Path(prompts), Path(out), source, checked, offline=offline, force=force, progress=shown(progress)
    )
    return result


def distill(
    teacher: ModelSource,
    out: str | Path,
    *,
    force: bool = False,
    progress: Progress | bool | None = None,
    **settings: Any,
) -> Checkpoint:
    """Make a student with fewer layers and train it on the teacher's distribution.

    Args:
        settings: see :class:`attar.distillation.settings.DistillSettings`.

    Raises:
        AttarError: bad input; no output is left.
    """
    return run_stage("distill", teacher, out, _settings("distill", settings), force=force, progress=progress)


def train_head(
    model: ModelSource,
    out: str | Path,
    *,
    force: bool = False,
    progress: Progress | bool | None = None,
    **settings: Any,
) -> Checkpoint:
    """Train a draft head for speculative decoding; the model stays as it is, unless ``joint`` is above 0.

    See :func:`distill` and :class:`attar.distillation.head_settings.TrainHeadSettings`.
    """
    checked = _settings("train-head", settings)
    return run_stage("train-head", model, out, checked, force=force, progress=progress)


def prune(
    model: ModelSource,
    out: str | Path,
    *,
    force: bool = False,
    progress: Progress | bool | None = None,
    **settings: Any,
) -> Checkpoint:
    """Remove weights (zeros), heads, neurons, channels or layers.

    See :func:`distill` and :class:`attar.pruning.settings.PruneSettings`.
    """
    return run_stage("prune", model, out, _settings("prune", settings), force=force, progress=progress)


def recover(
    model: ModelSource,
    out: str | Path,
    *,
    teacher: ModelSource | None = None,
    force: bool = False,
    progress: Progress | bool | None = None,
    **settings: Any,
) -> Checkpoint:
    """Train a pruned model to agree with its unpruned ``teacher`` again; its zeros stay zero.

    With ``alpha=0`` it learns from the text alone, and needs no teacher.

    See :func:`distill` and :class:`attar.distillation.settings.RecoverSettings`.
    """
    checked = _settings("recover", settings)
    return run_stage("recover", model, out, checked, teacher=teacher, force=force, progress=progress)


def quantize(
    model: ModelSource,
    out: str | Path,
    *,
    force: bool = False,
    progress: Progress | bool | None = None,
    **settings: Any,
) -> Checkpoint:
    """Store the weights in few bits.

    See :func:`distill` and :class:`attar.quantization.settings.QuantizeSettings`.
    """
    checked = _settings("quantize", settings)
    source = _sized(model, checked)
    check_output(out, force)
    with _stage("quantize", {"model": source}, Path(out), checked, progress) as (run, ended):
        return ended(run(source, Path(out), checked, force=force))


def plan(
    model: ModelSource,
    out: str | Path | None = None,
    *,
    progress: Progress | bool | None = None,
    **settings: Any,
) -> Plan:
    """Find the recipe that meets a budget at the smallest loss, and predict what it will lose.

    Args:
        out: a YAML file for the recipe, which :func:`run` takes, and beside it a page to choose from
            (``.html``); None: ``plan.write(path)`` writes the recipe.
        settings: see :class:`attar.planner.settings.PlanSettings`: ``size="5GB"``, ``quality="kl<=0.05"``.

    Raises:
        UsageError: no recipe meets the budget; names the nearest point in each direction.
    """
    return run_plan(model, out, _settings("plan", settings), progress=progress)


def merge(
    config: str | Path | dict[str, Any],
    out: str | Path,
    *,
    models: Mapping[str, str | Path] | None = None,
    force: bool = False,
    progress: Progress | bool | None = None,
    **settings: Any,
) -> Checkpoint:
    """Make one model out of several.

    Args:
        config: mergekit's YAML: a file, its text, or its content as a dict.
        models: models by names of your own, which the configuration may use.
        settings: see :class:`attar.merging.settings.MergeSettings`.

    Raises:
        AttarError: bad input; no output is left.
    """
    checked = _settings("merge", {**settings, "config": config_text(config)})
    return run_merge(out, checked, models=models, force=force, progress=progress)


def extract(
    model: ModelSource,
    base: ModelSource,
    out: str | Path,
    *,
    force: bool = False,
    progress: Progress | bool | None = None,
    **settings: Any,
) -> Path:
    """Write the difference of two models as a LoRA adapter.

    Args:
        settings: see :class:`attar.merging.adapters.settings.ExtractSettings`.
    """
    checked = _settings("extract", settings)
    return run_extract(model, base, out, checked, force=force, progress=progress)


def export(
    model: ModelSource,
    out: str | Path,
    *,
    force: bool = False,
    progress: Progress | bool | None = None,
    **settings: Any,
) -> Checkpoint:
    """Write a checkpoint for another engine; a file ``NAME.gguf`` is in format gguf, of a dense model Q4_K_M.

    See :func:`distill` and :class:`attar.deployment.settings.ExportSettings`.
    """
    source = source_of(model)
    settings = load("attar.deployment.settings:output_defaults")(settings, out, lambda: is_dense(source))
    return run_stage("export", source, out, _settings("export", settings), force=force, progress=progress)


def evaluate(
    model: ModelSource,
    *,
    reference: ModelSource | None = None,
    progress: Progress | bool | None = None,
    **settings: Any,
) -> Measurements:
    """Measure a model: perplexity, divergence from a reference, size, speed, memory, a sample.

    Args:
        reference: what to compare with; None: perplexity, size and speed only.
        settings: see :class:`attar.measure.settings.EvaluateSettings`.
    """
    checked = _settings("evaluate", settings)
    return run_evaluate(model, checked, reference=reference, progress=progress)


def generate(
    model: ModelSource,
    prompts: str | Sequence[str],
    *,
    progress: Progress | bool | None = None,
    **settings: Any,
) -> list[Result]:
    """Complete the prompts in one batch; results are in the order of the prompts.

    The model is loaded for this call; :class:`attar.runtime.llm.LLM` keeps it loaded.

    Args:
        settings: of sampling, :class:`attar.runtime.settings.TextSettings`, and of the engine,
            :class:`attar.runtime.settings.EngineSettings`.
    """
    from attar.runtime.settings import EngineSettings, TextSettings

    known = {field.name for field in fields(EngineSettings)}
    origin = PythonOrigin("generate")
    options = parse(
        EngineSettings, {name: settings[name] for name in settings if name in known}, origin
    ).options()
    sampling = {name: settings[name] for name in settings if name not in known}
    params = parse(TextSettings, sampling, origin).params()
    llm = load("attar.runtime.llm:LLM")(source_of(model), **options)
    results: list[Result] = llm.generate(prompts, params, progress=shown(progress))
    return results


def inspect(model: ModelSource) -> Inspection:
    """Architecture, parameters by part, bits, lineage and duties of a checkpoint. Reads no weights."""
    inspection: Inspection = load("attar.checkpoint.inspect:inspect")(source_of(model))
    return inspection


def run(
    recipe: str | Path,
    out: str | Path | None = None,
    *,
    fresh: bool = False,
    overrides: Iterable[str] = (),
    progress: Progress | bool | None = None,
) -> RunResult:
    """Run a recipe, or continue an earlier run.

    Args:
        out: the run's folder; None: ``runs/<name of the recipe's file>``.
        overrides: changes to the recipe such as ``stages.2.ratio=0.3``.
    """
    from attar.recipe.run import run_recipe
    from attar.recipe.runfolder import default_folder
    from attar.recipe.schema import load_recipe

    folder = default_folder(recipe) if out is None else Path(out)
    return run_recipe(load_recipe(recipe, overrides), folder, fresh=fresh, progress=shown(progress))


def sweep(
    recipe: str | Path,
    values: Mapping[str, Iterable[Any]],
    out: str | Path | None = None,
    *,
    fresh: bool = False,
    progress: Progress | bool | None = None,
    **settings: Any,
) -> SweepOutcome:
    """Run a recipe with every combination of some values; stages that runs share are done once.

    Args:
        values: the values of each key of the recipe: ``{"stages.quantize.bits": [3, 4, 5]}``.
        out: the sweep's folder; None: ``runs/<name of the recipe's file>-sweep``.

    Raises:
        AttarError: a value is wrong in some combination; nothing is run then.
    """
    from attar.recipe.runfolder import default_folder
    from attar.recipe.sweep import change_of, run_sweep

    folder = default_folder(recipe)
    out = folder.with_name(f"{folder.name}-sweep") if out is None else Path(out)
    changes = [change_of(key, choices) for key, choices in values.items()]
    checked = _settings("sweep", settings)
    return run_sweep(Path(recipe), out, changes, checked, fresh=fresh, progress=shown(progress))


def demo(
    out: str | Path | None = None,
    *,
    fresh: bool = False,
    overrides: Iterable[str] = (),
    progress: Progress | bool | None = None,
) -> RunResult:
    """Run the quickstart recipe on the embedded model. See :func:`run`."""
    return run(quickstart(), out, fresh=fresh, overrides=overrides, progress=progress)


def report(run_dir: str | Path) -> Path:
    """Build the report of a run again. Returns its path."""
    path: Path = load("attar.measure.report.page:write_report")(Path(run_dir))
    return path


def quickstart() -> Path:
    """The recipe of the demo, as a file."""
    return Path(str(resources.files("attar") / "embedded" / "quickstart.yaml"))


def run_stage(
    verb: str,
    model: ModelSource,
    out: str | Path,
    settings: Any,
    *,
    teacher: ModelSource | None = None,
    force: bool = False,
    progress: Progress | bool | None = None,
) -> Checkpoint:
    """Call a stage function with settings that are checked already."""
    model, teacher = source_of(model), source_of(teacher)
    if teacher is None and STAGES[verb].teacher:
        settings.check_alone()
    teacher_option: dict[str, Any] = {} if teacher is None else {"teacher": teacher}
    check_output(out, force)
    if verb == "quantize":
        model = _sized(model, settings)
    load("attar.recipe.memory_needs:check_memory")(verb, model, settings)
    with (
        remote.output(out, force) as (folder, replace),
        _stage(verb, {"model": model, **teacher_option}, folder, settings, progress) as (run, ended),
    ):
        return ended(run(model, folder, settings, **teacher_option, force=replace))


@contextmanager
def _stage(
    verb: str, models: Mapping[str, Any], folder: Path, settings: Any, progress: Progress | bool | None
) -> Iterator[tuple[Callable[..., Checkpoint], Callable[[Checkpoint], Checkpoint]]]:
    """A stage function, tracked where ``progress`` is, and a function that is given its checkpoint."""
    bar = shown(progress)
    inputs = {name: str(getattr(value, "spelling", value)) for name, value in models.items()}
    with stage_run(bar, verb, {**inputs, **plain(settings)}, folder) as finish:

        def ended(checkpoint: Checkpoint) -> Checkpoint:
            if (card := checkpoint.card) is not None:
                finish({"bytes": checkpoint.nbytes, **card.measurements, **card.details})
            return checkpoint

        yield partial(STAGES[verb].run(), progress=bar), ended


def run_plan(
    model: ModelSource,
    out: str | Path | None,
    settings: Any,
    *,
    progress: Progress | bool | None = None,
) -> Plan:
    """Plan with settings that are checked already."""
    planned: Plan = load("attar.planner.plan:make_plan")(source_of(model), settings, progress=shown(progress))
    if out is not None:
        path = planned.write(out)
        atomic.write_bytes(path.with_suffix(".html"), load("attar.planner.page:plan_page")(planned).encode())
    return planned


def config_text(config: str | Path | dict[str, Any]) -> str:
    """A merge's configuration as the setting ``config`` holds it: text stays, a dict becomes JSON (which is
    YAML)."""
    if isinstance(config, dict):
        import json

        return json.dumps(config, indent=2)
    return str(config)


def run_merge(
    out: str | Path,
    settings: Any,
    *,
    models: Mapping[str, str | Path] | None = None,
    force: bool = False,
    progress: Progress | bool | None = None,
) -> Checkpoint:
    """Call the merge with settings that are checked already."""
    load("attar.merging.settings:yaml_text")(
        settings.config
    )  # a wrong path is refused before torch is imported
    check_output(out, force)
    function = STAGES["merge"].run()
    draw = load("attar.measure.report.conflicts:conflicts_svg")
    with remote.output(out, force) as (folder, replace):
        checkpoint: Checkpoint = function(
            folder, settings, models=models or {}, draw=draw, progress=shown(progress), force=replace
        )
    return checkpoint


def teacher_of(teacher: ModelSource) -> Any:
    """The address of an endpoint as it is; the source of a model."""
    address = isinstance(teacher, str) and teacher.lower().startswith(("http://", "https://"))
    return teacher if address else source_of(teacher)


def run_extract(
    model: ModelSource,
    base: ModelSource,
    out: str | Path,
    settings: Any,
    *,
    force: bool = False,
    progress: Progress | bool | None = None,
) -> Path:
    """Call the extraction with settings that are checked already."""
    model, base = source_of(model), source_of(base)
    function = load("attar.merging.adapters.extract:extract")
    with remote.output(out, force) as (folder, replace):
        adapter: Path = function(model, base, folder, settings, progress=shown(progress), force=replace)
    return adapter


def upload(
    model: ModelSource,
    address: str,
    *,
    against: ModelSource | None = None,
    progress: Progress | bool | None = None,
) -> str | None:
    """Upload a checkpoint to a store (``s3://...``) or the hub (``hf://org/name``), its card last.

    Files that an earlier call uploaded are not sent again.

    Args:
        against: the model that it was made from: the checkpoint is verified against it first, and its card
            and README get the figures. None: it is not verified.

    Returns:
        The verdict.

    Raises:
        NumericsError: the checkpoint is not fit; nothing is uploaded.
        UsageError: not an address.
        OutputError: the store refuses.
    """
    if not remote.is_remote(address):
        raise UsageError(f"{address}: is no address", hint="s3://BUCKET/FOLDER or hf://ORG/NAME")
    checkpoint = load("attar.checkpoint.open:open_checkpoint")(model)
    if checkpoint.source.is_file():
        raise UsageError(f"{model}: is a single file", hint="upload the folder of a model")
    verified: Verification | None = None
    if against is not None:
        check = load("attar.measure.verification:verify")
        verified = check(source_of(model), source_of(against), None, progress=shown(progress))
    if verified is not None:
        if verified.faults:
            raise NumericsError(
                f"{model}: {verified.verdict}", hint="without --against it is uploaded all the same"
            )
        if checkpoint.card is not None:
            measured = checkpoint.card.with_measurements(**verified.measurements.to_dict())
            with_new_readme(measured, checkpoint.path / README).write(checkpoint.path)
    remote.upload(checkpoint.path, address.rstrip("/"))
    return None if verified is None else verified.verdict


def run_evaluate(
    model: ModelSource,
    settings: Any,
    *,
    reference: ModelSource | None = None,
    progress: Progress | bool | None = None,
) -> Measurements:
    """Call the evaluation with settings that are checked already; all processes of a run call it."""
    model, reference = source_of(model), source_of(reference)
    function = load("attar.measure.evaluate:evaluate")
    measurements: Measurements = function(
        model, settings, reference=reference, processes=Processes.of_run(), progress=shown(progress)
    )
    return measurements


def check_models(*models: ModelSource | None) -> None:
    """Refuse missing paths, before torch and transformers are imported, which takes seconds.

    Raises:
        CheckpointError: no such folder, file or embedded model, and not a hub id.
    """
    from attar.checkpoint.paths import find

    for model in models:
        if isinstance(model, str | Path):
            find(model)


def source_of(model: Any) -> Any:
    """The path of a model, checked to exist, or its checkpoint; a model in memory becomes a checkpoint.

    Raises:
        CheckpointError: no such folder, file or embedded model, and not a hub id.
        UsageError: not a model.
    """
    from attar.checkpoint.open import Checkpoint

    check_models(model)
    if model is None or isinstance(model, str | Path | Checkpoint):
        return model
    return load("attar.models.loading.in_memory:checkpoint_of")(model)


def is_dense(model: ModelSource) -> bool:
    """Whether the weights of a model are stored as numbers, not as codes."""
    checkpoint = load("attar.checkpoint.open:open_checkpoint")(model)
    return all(info.dtype in ("F64", "F32", "F16", "BF16") for info in checkpoint.tensors.values())


def check_output(out: str | Path, force: bool) -> None:
    """Refuse an output that exists, before torch is imported. Raises OutputError."""
    if remote.is_remote(out):
        return
    final = atomic.target(Path(out))
    check = atomic.check_file if final.suffix == ".gguf" else atomic.check_target
    check(final, force)


def _sized(model: ModelSource, settings: QuantizeSettings) -> Checkpoint:
    """An open checkpoint; a size of groups that no layer of a dense one has is refused before torch is
    imported."""
    checkpoint: Checkpoint = load("attar.checkpoint.open:open_checkpoint")(source_of(model))
    if is_dense(checkpoint):
        settings.storage.check_sizes({name: info.shape for name, info in checkpoint.tensors.items()})
    return checkpoint


def _settings(verb: str, values: dict[str, Any]) -> Any:
    """The keywords of a verb as its settings; texts in memory become a file."""
    if "data" in values:
        values = {**values, "data": load("attar.data.in_memory:text_source")(values["data"])}
    (cls,) = settings_classes(verb)
    return parse(cls, values, PythonOrigin(verb))
