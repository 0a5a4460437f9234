"""Export to ordinary safetensors: every tensor decoded, in one number type. Loads everywhere, saves no
bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attar.checkpoint.atomic import write_config
from attar.checkpoint.companions import copy_companions
from attar.checkpoint.open import open_checkpoint
from attar.checkpoint.output import StageOutput
from attar.checkpoint.shards import TensorSpec
from attar.checkpoint.tensors import stored_dtype
from attar.deployment.settings import ExportSettings
from attar.deployment.verify import same_tensors
from attar.formats.readers import quant_method, reader
from attar.models.loading.single_experts import stacked_reader
from attar.models.loading.stored import stored_precision
from attar.progress import Progress
from attar.walks.stream import stream

if TYPE_CHECKING:
    from attar.checkpoint import Checkpoint


def refuse(source: Checkpoint, settings: ExportSettings) -> None:
    """Raise where a checkpoint cannot be decoded.

    Raises:
        ModelError: it is quantized in a way that attar cannot read.
    """
    quant_method(source)


def write(source: Checkpoint, settings: ExportSettings, output: StageOutput, progress: Progress) -> list[str]:
    """Write the folder; returns what was checked, as sentences."""
    dtype = _dtype(source, settings, output)
    config = {key: value for key, value in source.config.items() if key != "quantization_config"}
    if dtype is not None:
        config["dtype"] = str(dtype).removeprefix("torch.")
        config.pop("torch_dtype", None)
    write_config(output.folder / "config.json", config)
    read = stacked_reader(reader(source), source)

    def layout(info: Any) -> Sequence[TensorSpec]:
        slot = read.header(info)
        if slot is None:
            return []
        name, kind, shape = slot
        if dtype is not None and kind in ("F64", "F32", "F16", "BF16"):
            kind = stored_dtype(dtype)
        return [TensorSpec(name, kind, shape)]

    def transform(name: str, load: Callable[[], Tensor]) -> dict[str, Tensor]:
        tensor, slot = read.decode(name), read.header(source.tensors[name])
        assert tensor is not None and slot is not None, "scales have no slot"
        return {slot[0]: tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor}

    stream(
        source,
        layout,
        transform,
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
    if not any(info.block for info in source.tensors.values()):
        return None
    output.details["notes"] = [
        "quantized blocks are decoded and stored as bfloat16; --dtype float32 keeps their values exactly"
    ]
    return stored_precision(source)
