"""Transforms: a dense checkpoint in, a dense checkpoint that computes the same function and rounds better.

``smoothquant``, ``awq``   scales found with calibration data (a sweep that changes no weight), folded into
                           the modules before (:mod:`attar.models.folding`)
``rotate``                 norms folded into the Linears behind them, then the residual stream and each
                           head's values rotated (:mod:`attar.models.residual`); needs no data

Any rounding runs on what comes out, and transforms compose: rotate, then smooth. All scales are found on the
unmodified model. That is sound: a fold does not change what any other fold sees of the inputs, and rows of v
or up divided by a scale are rounded as before by any grid with scales of its own for each row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attar.checkpoint import atomic
from attar.checkpoint.companions import copy_companions
from attar.checkpoint.jsonfile import read_json
from attar.checkpoint.open import open_checkpoint
from attar.checkpoint.shards import TensorSpec
from attar.checkpoint.tensors import stored_dtype
from attar.errors import CheckpointError, ModelError, NumericsError, SettingsError
from attar.models.anatomy import discover
from attar.models.folding import Foldable, foldable, rescales
from attar.models.load import empty_model
from attar.models.names import stored_names
from attar.models.residual import residual
from attar.progress import SILENT, Progress
from attar.quantization.grids import Grid
from attar.quantization.transforms.rotating import ParameterChange, rotation_changes
from attar.quantization.transforms.smoothing import AWQRule, ScaleSolver, SmoothQuantRule
from attar.walks.stream import stream
from attar.walks.sweep import sweep

if TYPE_CHECKING:
    from attar.checkpoint import Checkpoint

KINDS = ("smoothquant", "awq", "rotate")
PLACES = ("norm", "v", "up")
REPORT = "transform.json"


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
    places: Sequence[str] | None = None,
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
        folder: where the result goes; one that is finished is opened and returned (so it must be of this
            work: the same checkpoint, batches and settings).
        work: scratch folder of this work, which survives a kill.
        batches: int64 (B, S) calibration batches; not for ``rotate``.
        grids: module name to the number format its weight will be rounded to, for ``awq`` and a searched
            ``smoothquant``; Linears that are not in it do not count.
        activations: ``smoothquant``: the format of the inputs, one row a token; None: they are not rounded.
        alpha: ``smoothquant``: migration strength; None: searched.
        places: which folds are used, of :data:`PLACES`; None: all, for a given ``alpha`` the norms alone, as
            in the paper.
        untie: ``rotate``: a tied head may become a tensor of its own.
        seed: ``rotate``: of the random signs.
        dtype: of all floating-point tensors of the result; None keeps each one's. A rotated weight in
            bfloat16 has one more rounding error.
        device: where the sweep and the rotations run.

    Returns:
        the result; :func:`report_of` says what was done.

    Raises:
        SettingsError: ``kind`` or a place is unknown, or something is missing that it needs.
        ModelError: the family does not allow it; says why.
        NumericsError: a result is not finite.
    """
    if kind not in KINDS:
        raise SettingsError("kind", kind, " or ".join(KINDS))
    if (folder / REPORT).is_file():
        return open_checkpoint(folder)
    model = empty_model(checkpoint.config)
    if kind == "rotate":
        done = _rotate(checkpoint, model, seed, untie, device)
    else:
        chosen = _places(places, kind, alpha)
        done = _smooth(
            checkpoint, model, kind, work, batches, grids, activations, alpha, chosen, device, progress
        )
    folder.mkdir(parents=True, exist_ok=True)
    _write(checkpoint, model, done, folder, work / "shards", dtype, progress)
    copy_companions(checkpoint.path, folder)
    atomic.write_json(folder / REPORT, {"kind": kind, **done.report})
    return open_checkpoint(folder)


def report_of(folder: Path) -> dict[str, Any]:
    """What a transform did: ``kind``, and ``folds`` with their errors and ``left`` with reasons, or
    ``rotated`` and ``added_bytes``."""
    return read_json(folder / REPORT)


@dataclass(frozen=True)
class _Done:
    """What to write.

    Attributes:
        changes: by module name.
        report: for :data:`REPORT`.
        head: name of a head to be untied from the embedding, or None.
    """

    changes: dict[str, ParameterChange]
    report: dict[str, Any]
    head: str | None = None


def _write(
    checkpoint: Checkpoint,
    model: Any,
    done: _Done,
    folder: Path,
    work: Path,
    dtype: torch.dtype | None,
    progress: Progress,
) -> None:
    """The config and the changed tensors, under their stored names; with a new head, under the model's."""
    names = {stored: name for name, stored in stored_names(model, checkpoint).items()}
    embedding = f"{discover(model).embedding}.weight"
    head = f"{done.head}.weight" if done.head else None
    config = {key: value for key, value in checkpoint.config.items() if key != "torch_dtype"}
    if dtype is not None:
        config["dtype"] = str(dtype).removeprefix("torch.")
    if head:
        config["tie_word_embeddings"] = False
    atomic.write_json(folder / "config.json", config)

    def layout(info: Any) -> Sequence[TensorSpec]:
        name = names.get(info.name, info.name)
        floating = info.dtype in ("F64", "F32", "F16", "BF16")
        kind = stored_dtype(dtype) if dtype is not None and floating else info.dtype
        return [TensorSpec(written, kind, info.shape) for written, _ in targets(info.name, name)]

    def targets(stored: str, name: str) -> list[tuple[str, str]]:
        """What a stored tensor becomes: name in the file, and parameter name."""
        if not head:
            return [(stored, name)]
        if name == head:  # stored a second time although it is tied
            return []
        return [(name, name), (head, head)] if name == embedding else [(name, name)]

    def made(name: str, tensor: Tensor) -> Tensor:
        module, _, leaf = name.rpartition(".")
        if module in done.changes and leaf in ("weight", "bias"):
            kept = tensor.dtype
            tensor = done.changes[module](leaf, tensor).cpu().to(dtype or kept).contiguous()
            if not torch.isfinite(tensor).all():
                raise NumericsError(
                    f"{name} is not finite after the transform", hint="the checkpoint is damaged"
                )
        return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

    def change(stored: str, load: Callable[[], Tensor]) -> dict[str, Tensor]:
        tensor = load()
        return {written: made(name, tensor) for written, name in targets(stored, names.get(stored, stored))}

    stream(checkpoint, layout, change, folder, work=work, progress=progress, what="fold")


def _places(places: Sequence[str] | None, kind: str, alpha: float | None) -> tuple[str, ...]:
    if places is None:
        return PLACES[:1] if kind == "smoothquant" and alpha is not None else PLACES
    for place in places:
        if place not in PLACES:
            raise SettingsError("places", place, " or ".join(PLACES))
    return tuple(places)


def _smooth(
    checkpoint: Checkpoint,
    model: Any,
    kind: str,
    work: Path,
    batches: Sequence[Tensor],
    grids: Mapping[str, Grid] | None,
    activations: Grid | None,
    alpha: float | None,
    places: Sequence[str],
    device: str | torch.device,
    progress: Progress,
) -> _Done:
    """Find a scale for each fold, by a sweep that changes nothing."""
    if not len(batches):
        raise SettingsError("batches", list(batches), f"calibration batches for {kind}")
    if grids is None and (kind == "awq" or alpha is None):
        raise SettingsError("grids", None, f"the number formats, for the search of {kind}")
    found = foldable(checkpoint.config)
    counted = [name for fold in found.folds for name in fold.consumers] if grids is None else list(grids)
    folds = [
        fold
        for fold in found.folds
        if fold.kind in places and any(name in counted for name in fold.consumers)
    ]
    if not folds:
        why = next(iter(found.left.values()), "no place is left")
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
    swept = sweep(
        checkpoint,
        batches,
        solver,
        work=work / "scales",
        select=solver.selects,
        device=device,
        progress=progress,
        what=kind,
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
    return _Done(changes, _smoothing_report(found, solver, swept.reports))


def _smoothing_report(
    found: Foldable, solver: ScaleSolver, reports: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    by_name = {report["name"]: report for report in reports}
    rows = []
    for fold in solver.folds:
        numbers = {key: value for key, value in by_name[solver.first[fold.producer]].items() if key != "name"}
        rows.append(
            {"producer": fold.producer, "consumers": list(fold.consumers), "kind": fold.kind, **numbers}
        )
    return {"folds": rows, "left": found.left}


def _rotate(checkpoint: Checkpoint, model: Any, seed: int, untie: bool, device: str | torch.device) -> _Done:
    """What rotating the residual stream and the heads' values does to each module."""
    facts = residual(checkpoint.config)
    anatomy = discover(model)
    names = stored_names(model, checkpoint)
    if not facts.tied and f"{anatomy.head}.weight" not in names:
        raise CheckpointError(f"{checkpoint.path}: no tensor for {anatomy.head}.weight")
    embedding = checkpoint.tensors[names[f"{anatomy.embedding}.weight"]]
    if facts.tied and not untie:
        raise ModelError(
            f"{checkpoint.path}: its head is tied to the embedding, and the final norm's weight can only "
            f"move into a head of its own ({embedding.nbytes:,} bytes more)",
            hint="allow it to be untied",
        )

    def load(name: str) -> Tensor:
        return checkpoint.load(names[name]).float()

    changes = rotation_changes(facts, model, anatomy.hidden_size, load, seed, device)
    rotated = {"residual": anatomy.hidden_size, "heads": len(facts.values), "centred": facts.centred}
    report = {"rotated": rotated, "added_bytes": embedding.nbytes if facts.tied else 0}
    return _Done(changes, report, anatomy.head if facts.tied else None)
