"""Importance of each tensor's inputs for the search of scales: read from a file of llama.cpp's, or
computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from attar.data.calibration import calibration_batches
from attar.data.packing import row_length
from attar.deployment.settings import ExportSettings
from attar.errors import SettingsError
from attar.formats.gguf import imatrix
from attar.formats.readers import method
from attar.models.device import pick_device
from attar.progress import Progress

if TYPE_CHECKING:
    from attar.checkpoint import Checkpoint


@dataclass(frozen=True)
class Importance:
    """Mean squared inputs by tensor.

    Attributes:
        entries: by llama.cpp's name of the weight.
        origin: what an imatrix file says of where they come from.
    """

    entries: Mapping[str, imatrix.ImportanceEntry] = field(default_factory=dict)
    origin: Mapping[str, Any] = field(default_factory=dict)

    def vector(self, name: str) -> Tensor | None:
        """Importance (K,) of the inputs of a weight; None where nothing is known."""
        entry = self.entries.get(name)
        return None if entry is None else entry.importance()


def importance_of(
    source: Checkpoint, placed: Sequence[Any], settings: ExportSettings, work: Path, progress: Progress
) -> Importance:
    """What the settings ask for; nothing where it is left open: a rounding with data sees the inputs of what
    it rounds itself (codes.py).

    Raises:
        SettingsError: the file does not fit the model.
    """
    if not settings.imatrix:
        return Importance()
    if settings.imatrix != "compute":
        return _read(Path(settings.imatrix), placed)
    return _compute(source, placed, settings, work, progress)


def _read(file: Path, placed: Sequence[Any]) -> Importance:
    entries = imatrix.read(file)
    for one in placed:
        entry = entries.get(one.gguf)
        if entry is not None and entry.in_sum2.numel() != one.shape[-1]:
            raise SettingsError(
                "imatrix",
                str(file),
                f"one of this model: {one.gguf} has {one.shape[-1]} inputs, {entry.in_sum2.numel()} there",
            )
    if not any(one.gguf in entries for one in placed):
        raise SettingsError("imatrix", str(file), "one of this model: no tensor of it is in there")
    return Importance(entries)


def _compute(
    source: Checkpoint, placed: Sequence[Any], settings: ExportSettings, work: Path, progress: Progress
) -> Importance:
    from attar.deployment.imatrix import compute
    from attar.models.load import load_tokenizer

    if method(source):
        raise SettingsError("imatrix", "compute", "a file, or none: the checkpoint is quantized already")
    length = row_length(settings.sequence_length, source.config)
    batches = calibration_batches(
        load_tokenizer(source),
        settings.data,
        samples=settings.samples,
        sequence_length=length,
        batch_size=settings.batch_size,
        seed=settings.seed,
        bos=settings.bos,
    )
    found = compute(
        source,
        batches,
        work=work / "imatrix",
        precision=settings.precision,
        device=pick_device(settings.device),
        progress=progress,
    )
    entries = {one.gguf: imatrix.ImportanceEntry(*found[one.stored]) for one in placed if one.stored in found}
    origin = {
        "datasets": [settings.data],
        "chunks": sum(len(batch) for batch in batches),
        "chunk_size": length,
    }
    return Importance(entries, origin)
