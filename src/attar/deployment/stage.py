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
from attar.formats.compressed_tensors import TRANSPOSED, is_packed
from attar.formats.readers import reader
from attar.formats.settings import VERSION, ExportSettings
from attar.progress import SILENT, Progress
from attar.walks.stream import stream

if TYPE_CHECKING:
    from attar.checkpoint import Checkpoint


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
    if settings.format == "compressed-tensors":
        _refuse(source)
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


def _refuse(source: Checkpoint) -> None:
    """Raise where a checkpoint cannot leave as compressed-tensors."""
    said = source.config.get("quantization_config")
    if not said:
        raise ModelError(f"{source.path} is not quantized", hint="quantize it first, or --format dense")
    if not is_packed(source.config):
        raise ModelError(
            f"{source.path} is in the layout of {said.get('quant_method')}",
            hint="it loads as it is; --format dense loads everywhere",
        )
    if said["format"] == TRANSPOSED:
        raise ModelError(
            f"{source.path}: compressed-tensors has no transposed Linears ({source.config['model_type']})",
            hint="--format dense loads everywhere; the packed checkpoint itself is for attar",
        )


def _write_dense(
    source: Checkpoint, folder: Path, work: Path, settings: ExportSettings, progress: Progress
) -> None:
    dtype = _target(source, settings)
    config = {key: value for key, value in source.config.items() if key != "quantization_config"}
    if dtype is not None:
        config["dtype"] = str(dtype).removeprefix("torch.")
        config.pop("torch_dtype", None)
    _write_config(folder, config)
    read = reader(source)

    def layout(info: Any) -> Sequence[Slot]:
        made = read.slot(info)
        if made is None:
            return []
        name, kind, shape = made
        if dtype is not None and kind in ("F32", "F16", "BF16"):
            kind = stored_dtype(dtype)
        return [Slot(name, kind, shape)]

    def transform(name: str, load: Callable[[], Tensor]) -> dict[str, Tensor]:
        tensor, made = read.dense(name), read.slot(source.tensors[name])
        assert tensor is not None and made is not None, "scales have no slot"
        return {made[0]: tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor}

    stream(source, layout, transform, folder, work=work / "shards", progress=progress, what="export dense")


def _target(source: Checkpoint, settings: ExportSettings) -> torch.dtype | None:
    return None if settings.dtype == "auto" else getattr(torch, settings.dtype)


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
    before, after = reader(source), reader(written)
    checked = 0
    with progress.task("verify", total=len(source.tensors)) as task:
        for name in source.tensors:
            wanted = before.dense(name)
            if wanted is not None:
                before.check(name)
                slot = before.slot(source.tensors[name])
                stored = slot[0] if slot and settings.format == "dense" else name
                _compare(stored, wanted, after.dense(stored), target)
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
