"""Transforms: a dense checkpoint in, a dense one of the same function with less rounding error out.

``smoothquant``, ``awq``   scales found with calibration data (a sweep that changes no weight), folded into
                           the modules before (:mod:`attar.models.anatomy.folding`)
``rotate``                 norms folded into the Linears after them, then the residual stream and each head's
                           values rotated (:mod:`attar.models.anatomy.residual`); needs no data

Any rounding runs on the result, and transforms compose: rotate, then smooth. All scales are found on the
unmodified model: a fold does not change the inputs of any other fold, and a grid with scales for each row
rounds the rescaled rows of v or up as before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attar.checkpoint import atomic
from attar.checkpoint.companions import copy_companions
from attar.checkpoint.jsonfile import read_json
from attar.checkpoint.mtp import LEFT_OUT, without_mtp
from attar.checkpoint.open import Checkpoint, open_checkpoint
from attar.checkpoint.processes import Processes
from attar.checkpoint.shards import TensorSpec
from attar.checkpoint.tensors import stored_dtype
from attar.errors import CheckpointError, ModelError, NumericsError, SettingsError
from attar.formats.rules import ActivationRule
from attar.models.anatomy.discover import discover
from attar.models.anatomy.folding import Foldable, foldable, rescales
from attar.models.anatomy.residual import residual
from attar.models.loading.device import pick_device
from attar.models.loading.empty import empty_model
from attar.models.loading.stored import stored_names, stored_precision
from attar.progress import SILENT, Progress
from attar.quantization.calibration import batches_of
from attar.quantization.grids import Grid, IntGrid, MXFP4Grid, NVFP4Grid
from attar.quantization.grids.float8 import Float8Grid, MXFP8Grid
from attar.quantization.plan import plan
from attar.quantization.settings import QuantizeSettings
from attar.quantization.transforms.awq import AWQRule
from attar.quantization.transforms.rotation import ParameterChange, rotation_changes
from attar.quantization.transforms.smoothing import ScaleSolver
from attar.quantization.transforms.smoothquant import SmoothQuantRule
from attar.walks.positions import PositionWeights
from attar.walks.stream import stream
from attar.walks.sweep import SweepOptions, sweep_linears

KINDS = ("smoothquant", "awq", "rotate")
FOLDS = ("norm", "v", "up")
REPORT = "transform.json"


def apply_transforms(
    checkpoint: Checkpoint,
    settings: QuantizeSettings,
    assigned: Mapping[str, str] | None,
    work: Path,
    processes: Processes,
    progress: Progress,
) -> tuple[Checkpoint, list[dict[str, Any]]]:
    """The checkpoint to round and the report of each transform; without any, the checkpoint itself. The first
    of several processes makes it, in a work folder that they share."""
    with processes.main_process_first():
        reports = []
        source, device, options = checkpoint, pick_device(settings.device), settings.transform
        if options.rotate:
            folder = work / "rotated"
            source = transform(
                source,
                "rotate",
                folder=folder,
                work=work / "rotate",
                untie=options.untie,
                seed=settings.seed,
                device=device,
                progress=progress,
            )
            reports.append(read_json(folder / REPORT))
        if settings.smoothing != "none":
            folder = work / "smoothed"
            chosen = plan(source, settings.storage, assigned, dtype=stored_precision(checkpoint))
            layers = chosen.sites.values()
            rules = [layer.scheme.activations for layer in layers]
            source = transform(
                source,
                settings.smoothing,
                folder=folder,
                work=work / "smooth",
                batches=batches_of(source, settings),
                grids={layer.module: layer.grid for layer in layers},
                activations=activation_grid(rules[0]) if settings.smoothing == "smoothquant" else None,
                alpha=None if options.alpha < 0 else options.alpha,
                first_tokens=settings.calibration.first_weight,
                device=device,
                progress=progress,
            )
            reports.append(read_json(folder / REPORT))
        return source, reports


def activation_grid(rule: ActivationRule | None) -> Grid | None:
    """The grid of an activation rule, one row a token; None: inputs are not rounded."""
    if rule is None:
        return None
    if rule.mx:
        return MXFP4Grid() if rule.bits == 4 else MXFP8Grid()
    if rule.strategy == "tensor_group":
        return NVFP4Grid()
    rows = 0 if rule.strategy == "tensor" else 1
    if rule.kind == "int":
        return IntGrid(rule.bits, rule.group_size, rule.symmetric, rows=rows)
    return Float8Grid("e4m3fn", group_size=rule.group_size, rows=rows)


def transform(
    checkpoint: Checkpoint,
    kind: str,
    *,
    folder: Path,
    work: Path,
    batches: Sequence[Tensor] = (),
    grids: Mapping[str, Grid] | None = None,
    activations: Grid | None = None,
    alpha: float | None = None,
    folds: Sequence[str] | None = None,
    first_tokens: float = 1.0,
    untie: bool = False,
    seed: int = 0,
    dtype: torch.dtype | None = torch.float32,
    device: str | torch.device = "cpu",
    progress: Progress = SILENT,
) -> Checkpoint:
    """Write a dense checkpoint that computes the same function as a dense checkpoint. Resumes after a kill.

    Args:
        checkpoint: dense; only read.
        kind: one of :data:`KINDS`.
        folder: where the result goes; a finished one is opened and returned (it must come from the same
            checkpoint, batches and settings).
        work: scratch folder, which survives a kill.
        batches: int64 (B, S) calibration batches; not for ``rotate``.
        grids: module name to the number format its weight will be rounded to, for ``awq`` and a searched
            ``smoothquant``; the search leaves other Linears out.
        activations: ``smoothquant``: the format of the inputs, one row a token; None: they are not rounded.
        alpha: ``smoothquant``: migration strength; None: searched.
        folds: some of :data:`FOLDS`; None: all, or with a given ``alpha`` the norms alone, as in the paper.
        untie: ``rotate``: a tied head may become a separate tensor.
        seed: ``rotate``: of the random signs.
        dtype: of all floating-point tensors of the result; None keeps each one's. A rotated weight in
            bfloat16 has one more rounding error.
        device: where the sweep and the rotations run.

    Raises:
        SettingsError: ``kind`` or a fold is unknown, or a required argument is missing.
        ModelError: the family does not allow it; gives the reason.
        NumericsError: a result is not finite.
    """
    if kind not in KINDS:
        raise SettingsError("kind", kind, " or ".join(KINDS))
    if (folder / REPORT).is_file():
        return open_checkpoint(folder)
    model = empty_model(checkpoint.config, unstacked=True)
    if kind == "rotate":
        result = _rotate(checkpoint, model, seed, untie, device)
    else:
        chosen = _folds(folds, kind, alpha)
        first = first_tokens if kind == "awq" else 1.0  # the largest value counts once
        result = _smooth(
            checkpoint, model, kind, work, batches, grids, activations, alpha, chosen, first, device, progress
        )
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "rotate" and checkpoint.mtp:
        progress.log(f"note: {LEFT_OUT.format('it reads the stream that is rotated')}")
    _write(checkpoint, model, result, folder, work / "shards", dtype, progress, kind != "rotate")
    copy_companions(checkpoint.path, folder)
    atomic.write_json(folder / REPORT, {"kind": kind, **result.report})
    return open_checkpoint(folder)


@dataclass(frozen=True)
class _TransformResult:
    """A transform before it is written.

    Attributes:
        report: for :data:`REPORT`: ``folds`` with their errors and ``left`` with reasons, or ``rotated`` and
            ``added_bytes``.
        head: name of a head to be untied from the embedding, or None.
    """

    changes: dict[str, ParameterChange]
    report: dict[str, Any]
    head: str | None = None


def _write(
    checkpoint: Checkpoint,
    model: Any,
    result: _TransformResult,
    folder: Path,
    work: Path,
    dtype: torch.dtype | None,
    progress: Progress,
    keeps_mtp: bool,
) -> None:
    """Write config and tensors, under their stored names; with a new head, under the model's."""
    names = {stored: name for name, stored in stored_names(model, checkpoint).items()}
    embedding = f"{discover(model).embedding}.weight"
    head = f"{result.head}.weight" if result.head else None
    config = {key: value for key, value in checkpoint.config.items() if key != "torch_dtype"}
    if dtype is not None:
        config["dtype"] = str(dtype).removeprefix("torch.")
    if head:
        config["tie_word_embeddings"] = False
    if not keeps_mtp:
        config = without_mtp(config)
    atomic.write_json(folder / "config.json", config)

    def layout(info: Any) -> Sequence[TensorSpec]:
        if info.name in checkpoint.mtp and not keeps_mtp:
            return []
        name = names.get(info.name, info.name)
        floating = info.dtype in ("F64", "F32", "F16", "BF16")
        kind = stored_dtype(dtype) if dtype is not None and floating else info.dtype
        return [TensorSpec(written, kind, info.shape) for written, _ in targets(info.name, name)]

    def targets(stored: str, name: str) -> list[tuple[str, str]]:
        """The tensors that a stored one becomes: name in the file, and parameter name."""
        if not head:
            return [(stored, name)]
        if name == head:  # stored a second time although it is tied
            return []
        return [(name, name), (head, head)] if name == embedding else [(name, name)]

    def transformed(name: str, tensor: Tensor) -> Tensor:
        module, _, leaf = name.rpartition(".")
        if module in result.changes and leaf in ("weight", "bias"):
            kept = tensor.dtype
            tensor = result.changes[module](leaf, tensor).cpu().to(dtype or kept).contiguous()
            if not torch.isfinite(tensor).all():
                raise NumericsError(
                    f"{name} is not finite after the transform", hint="the checkpoint is damaged"
                )
        return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

    def change(stored: str, load: Callable[[], Tensor]) -> dict[str, Tensor]:
        tensor = load()
        return {
            written: transformed(name, tensor) for written, name in targets(stored, names.get(stored, stored))
        }

    stream(checkpoint, layout, change, folder, work=work, progress=progress, what="fold")


def _folds(folds: Sequence[str] | None, kind: str, alpha: float | None) -> tuple[str, ...]:
    if folds is None:
        return FOLDS[:1] if kind == "smoothquant" and alpha is not None else FOLDS
    for fold in folds:
        if fold not in FOLDS:
            raise SettingsError("folds", fold, " or ".join(FOLDS))
    return tuple(folds)


def _smooth(
    checkpoint: Checkpoint,
    model: Any,
    kind: str,
    work: Path,
    batches: Sequence[Tensor],
    grids: Mapping[str, Grid] | None,
    activations: Grid | None,
    alpha: float | None,
    kinds: Sequence[str],
    first_tokens: float,
    device: str | torch.device,
    progress: Progress,
) -> _TransformResult:
    """Find the scale of each fold by a sweep that changes no weight."""
    if not len(batches):
        raise SettingsError("batches", list(batches), f"calibration batches for {kind}")
    if grids is None and (kind == "awq" or alpha is None):
        raise SettingsError("grids", None, f"the number formats, for the search of {kind}")
    possible = foldable(checkpoint.config)
    counted = [name for fold in possible.folds for name in fold.consumers] if grids is None else list(grids)
    folds = [
        fold
        for fold in possible.folds
        if fold.kind in kinds and any(name in counted for name in fold.consumers)
    ]
    if not folds:
        why = next(iter(possible.left.values()), "no fold is left")
        raise ModelError(
            f"{checkpoint.path}: no scale can be folded: {why}",
            hint="quantize it without smoothing",
        )
    names = stored_names(model, checkpoint)

    def load(name: str) -> Tensor:
        tensor = checkpoint.load(names[f"{name}.weight"]).float().to(device)
        return tensor if isinstance(model.get_submodule(name), nn.Linear) else tensor.T.contiguous()

    rule: SmoothQuantRule | AWQRule = AWQRule() if kind == "awq" else SmoothQuantRule(activations, alpha)
    solver = ScaleSolver(folds, rule, grids, load)
    swept = sweep_linears(
        checkpoint,
        batches,
        solver,
        SweepOptions(
            work=work / "scales",
            select=solver.selects,
            positions=PositionWeights(first_tokens),
            device=device,
            progress=progress,
            what=kind,
        ),
    )
    scales = {
        name: tensors["scale"]
        for number in range(len(swept.files))
        for name, tensors in swept.tensors(number).items()
    }
    chosen = [(fold, scales[solver.first[fold.producer]]) for fold in folds]
    changes: dict[str, ParameterChange] = {
        name: change.apply for name, change in rescales(model, chosen).items()
    }
    return _TransformResult(changes, _smoothing_report(possible, solver, swept.reports))


def _smoothing_report(
    possible: Foldable, solver: ScaleSolver, reports: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    by_name = {report["name"]: report for report in reports}
    rows = []
    for fold in solver.folds:
        numbers = {key: value for key, value in by_name[solver.first[fold.producer]].items() if key != "name"}
        rows.append(
            {"producer": fold.producer, "consumers": list(fold.consumers), "kind": fold.kind, **numbers}
        )
    return {"folds": rows, "left": possible.left}


def _rotate(
    checkpoint: Checkpoint, model: Any, seed: int, untie: bool, device: str | torch.device
) -> _TransformResult:
    """The change of each module when the residual stream and the heads' values are rotated."""
    facts = residual(checkpoint.config)
    anatomy = discover(model)
    names = stored_names(model, checkpoint)
    if not facts.tied and f"{anatomy.head}.weight" not in names:
        raise CheckpointError(f"{checkpoint.path}: no tensor for {anatomy.head}.weight")
    embedding = checkpoint.tensors[names[f"{anatomy.embedding}.weight"]]
    if facts.tied and not untie:
        raise ModelError(
            f"{checkpoint.path}: its head is tied to the embedding, and the final norm's weight can only "
            f"move into a separate head ({embedding.nbytes:,} bytes more)",
            hint="allow it to be untied",
        )

    def load(name: str) -> Tensor:
        return checkpoint.load(names[name]).float()

    changes = rotation_changes(facts, model, anatomy.hidden_size, load, seed, device)
    rotated = {"residual": anatomy.hidden_size, "heads": len(facts.values), "centred": facts.centred}
    report = {"rotated": rotated, "added_bytes": embedding.nbytes if facts.tied else 0}
    return _TransformResult(changes, report, anatomy.head if facts.tied else None)
