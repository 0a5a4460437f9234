"""Export to ordinary safetensors: every tensor decoded, in one number type. Loads everywhere, saves no
bytes."""

from __future__ import annotations

import torch

from attar.checkpoint.atomic import write_config
from attar.checkpoint.companions import copy_companions
from attar.checkpoint.open import Checkpoint, open_checkpoint
from attar.checkpoint.output import StageOutput
from attar.checkpoint.shards import TensorSpec
from attar.deployment.settings import ExportSettings
from attar.deployment.verify import same_tensors
from attar.formats.readers import Decoded, quant_method, reader
from attar.models.loading.single_experts import stacked_reader
from attar.models.loading.stored import decoded_precision
from attar.progress import Progress
from attar.walks.stream import stream


def refuse(source: Checkpoint, settings: ExportSettings) -> None:
    """Raise where a checkpoint cannot be decoded.

    Raises:
        ModelError: it is quantized in a way that attar cannot read.
    """
    quant_method(source)


def write(source: Checkpoint, settings: ExportSettings, output: StageOutput, progress: Progress) -> list[str]:
    """Write the folder; returns what was checked, as sentences."""
    dtype = _dtype(source, settings, output)
    view = Decoded(source, read=stacked_reader(reader(source), source), dtype=dtype)
    write_config(output.folder / "config.json", view.config)
    stream(
        view,  # type: ignore[arg-type]
        lambda info: [TensorSpec(info.name, info.dtype, info.shape)],
        lambda name, load: {name: load()},
        output.folder,
        work=output.shared / "shards",
        processes=output.processes,
        progress=progress,
        what="export dense",
    )
    output.exit_unless_rank0()
    copy_companions(source.path, output.folder)
    return same_tensors(source, open_checkpoint(output.folder).with_mtp, dtype, progress)


def _dtype(source: Checkpoint, settings: ExportSettings, output: StageOutput) -> torch.dtype | None:
    """The number type of the tensors; None: as stored. Adds a note where it is chosen here."""
    if settings.dtype != "auto":
        chosen: torch.dtype = getattr(torch, settings.dtype)
        return chosen
    dtype = decoded_precision(source)
    if dtype is not None:
        name = str(dtype).removeprefix("torch.")
        output.details["notes"] = [
            f"codes are decoded and stored as {name}; --dtype float32 keeps their values exactly"
        ]
    return dtype
