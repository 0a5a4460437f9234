"""The verb ``export``: a checkpoint as other engines want it, checked before it is handed over.

``dense``                ordinary safetensors in one number type, decoded from whatever it was: loads
everywhere, saves nothing.
``compressed-tensors``   the packed layout as it is, re-read with an independent look at every tensor.

What is checked is what has broken for people elsewhere: scales that are zero, infinite or out of the range of
their type; layers whose codes are all the same; a config that names no architecture; a vocabulary larger than
the embedding; a written file that does not decode to what went in.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attar.checkpoint.companions import copy_companions
from attar.checkpoint.open import open_checkpoint
from attar.checkpoint.output import produce
from attar.checkpoint.shards import Slot
from attar.checkpoint.tensors import stored_dtype
from attar.errors import ModelError, NumericsError
from attar.formats.compressed_tensors import PACKED, SCALE, SHAPE, TRANSPOSED, ZERO, dense_tensor, is_packed
from attar.formats.settings import VERSION, ExportSettings
from attar.progress import SILENT, Progress
from attar.walks.stream import stream

if TYPE_CHECKING:
    from attar.checkpoint import Checkpoint

CONSTANT = 0.999  # a layer whose codes are all but one in a thousand the same is broken


def export(
    model: str | Path | Checkpoint,
    out: Path,
    settings: ExportSettings,
    *,
    progress: Progress = SILENT,
    force: bool = False,
    key: str | None = None,
) -> Checkpoint:
    """Write a checkpoint for another engine.

    Args:
        model: any checkpoint.
        out: the folder to make.

    Raises:
        ModelError: the checkpoint is not of the layout asked for.
        NumericsError: a tensor would not survive the format.
    """
    source = open_checkpoint(model)
    packed = is_packed(source.config)
    if settings.format == "compressed-tensors" and not packed:
        raise ModelError(f"{source.path} is not quantized", hint="quantize it first, or --format dense")
    if (
        settings.format == "compressed-tensors"
        and source.config["quantization_config"]["format"] == TRANSPOSED
    ):
        raise ModelError(
            f"{source.path}: compressed-tensors has no transposed Linears ({source.config['model_type']})",
            hint="--format dense loads everywhere; the packed checkpoint itself is for attar",
        )
    with produce(
        out,
        stage="export",
        version=VERSION,
        settings=asdict(settings),
        seed=0,
        parents=[(source, "weights")],
        force=force,
        key=key,
    ) as output:
        if settings.format == "dense":
            _write_dense(source, output.folder, output.work, settings, progress)
        else:
            _write_packed(source, output.folder, output.work, progress)
        copy_companions(source.path, output.folder)
        output.details["checks"] = verify(source, open_checkpoint(output.folder), settings, progress)
    return open_checkpoint(out)


def _write_dense(
    source: Checkpoint, folder: Path, work: Path, settings: ExportSettings, progress: Progress
) -> None:
    dtype = _target(source, settings)
    config = {key: value for key, value in source.config.items() if key != "quantization_config"}
    if dtype is not None:
        config["dtype"] = str(dtype).removeprefix("torch.")
        config.pop("torch_dtype", None)
    _write_config(folder, config)

    def layout(info: Any) -> Sequence[Slot]:
        shape = _dense_shape(source, info)
        if shape is None:
            return []
        kind = _decoded_dtype(source, info)
        if dtype is not None and kind in ("F32", "F16", "BF16"):
            kind = stored_dtype(dtype)
        return [Slot(info.name.removesuffix("_packed"), kind, shape)]

    def transform(name: str, load: Callable[[], Tensor]) -> dict[str, Tensor]:
        tensor = dense_tensor(source, name)
        assert tensor is not None, "scales have no slot"
        return {
            name.removesuffix("_packed"): tensor.to(dtype) if dtype is not None and _casts(tensor) else tensor
        }

    stream(source, layout, transform, folder, work=work / "shards", progress=progress, what="export dense")


def _casts(tensor: Tensor) -> bool:
    return bool(tensor.is_floating_point())


def _target(source: Checkpoint, settings: ExportSettings) -> torch.dtype | None:
    return None if settings.dtype == "auto" else getattr(torch, settings.dtype)


def _dense_shape(source: Checkpoint, info: Any) -> tuple[int, ...] | None:
    """Shape of what a stored tensor decodes to; None for scales and the like."""
    base, _, leaf = info.name.rpartition(".")
    if leaf in (SCALE, SHAPE, ZERO):
        return None
    if leaf == PACKED:
        rows, columns = (int(size) for size in source.load(f"{base}.{SHAPE}"))
        return (
            (columns, rows)
            if source.config["quantization_config"]["format"] == TRANSPOSED
            else (rows, columns)
        )
    shape: tuple[int, ...] = info.shape
    return shape


def _decoded_dtype(source: Checkpoint, info: Any) -> str:
    """Stored type of what a tensor decodes to: that of its scale, where it has one."""
    scale = source.tensors.get(f"{info.name.rpartition('.')[0]}.{SCALE}")
    kind: str = scale.dtype if scale is not None and info.dtype in ("I32", "I8") else info.dtype
    return kind


def _write_packed(source: Checkpoint, folder: Path, work: Path, progress: Progress) -> None:
    _write_config(folder, source.config)
    stream(
        source,
        lambda info: [Slot(info.name, info.dtype, info.shape)],
        lambda name, load: {name: load()},
        folder,
        work=work / "shards",
        progress=progress,
        what="export",
    )


def _write_config(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def verify(
    source: Checkpoint, written: Checkpoint, settings: ExportSettings, progress: Progress = SILENT
) -> list[str]:
    """Read the written files back and compare with the source, tensor by tensor.

    Returns:
        what was checked, in words.

    Raises:
        NumericsError: a tensor differs, overflows, or is degenerate.
    """
    target = _target(source, settings) if settings.format == "dense" else None
    checked = 0
    with progress.task("verify", total=len(source.tensors)) as task:
        for name in source.tensors:
            wanted = dense_tensor(source, name)
            if wanted is not None:
                _check_codes(source, name)
                stored = name.removesuffix("_packed") if settings.format == "dense" else name
                got = dense_tensor(written, stored)
                _compare(stored, wanted, got, target)
                checked += 1
            task.advance()
    return [f"{checked} tensors read back equal", "scales finite and not zero", "no layer of constant codes"]


def _compare(name: str, wanted: Tensor, got: Tensor | None, target: torch.dtype | None) -> None:
    if target is not None and wanted.is_floating_point():
        wanted = wanted.to(target)
    if wanted.is_floating_point() and not torch.isfinite(wanted).all():
        raise NumericsError(
            f"{name} does not fit {str(wanted.dtype).removeprefix('torch.')}", hint="try --dtype bfloat16"
        )
    if got is None or got.dtype != wanted.dtype or not torch.equal(got, wanted):
        raise NumericsError(
            f"{name} reads back differently from what was written",
            hint="the disk may be failing; run it again",
        )


def _check_codes(source: Checkpoint, name: str) -> None:
    """Scales that decode, codes that vary."""
    base, _, leaf = name.rpartition(".")
    if leaf != PACKED:
        return
    scale = source.load(f"{base}.{SCALE}").float()
    if not (torch.isfinite(scale).all() and (scale > 0).all()):
        raise NumericsError(
            f"{base}.{SCALE} holds zero, negative or infinite scales", hint="quantize the model again"
        )
    words = source.load(name).flatten()
    same = float((words == words[0]).float().mean()) if words.numel() > 64 else 0.0
    if same > CONSTANT:
        raise NumericsError(
            f"{base}: nearly all codes are the same", hint="the weights were zero or damaged before"
        )
