"""Importance of each tensor's inputs for the search of scales: read from a file of llama.cpp's, or
computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from attar.data.packing import calibration_batches, row_length
from attar.deployment.settings import ExportSettings
from attar.errors import SettingsError
from attar.formats.gguf import imatrix
from attar.models.device import pick_device
from attar.progress import Progress

if TYPE_CHECKING:
    from attar.checkpoint import Checkpoint


@dataclass(frozen=True)
class InputImportance:
    """Mean squared inputs by tensor.

    Attributes:
        entries: by llama.cpp's name of the weight.
        origin: of a computed one, the metadata of its file.
        source: its description; "" where there is none.
    """

    entries: Mapping[str, imatrix.ImportanceEntry] = field(default_factory=dict)
    origin: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""

    @property
    def notes(self) -> list[str]:
        """A sentence for the card and the terminal."""
        return [f"scales are searched with the importance of inputs: {self.source}"] if self.source else []

    def vector(self, name: str) -> Tensor | None:
        """Importance (K,) of the inputs of a weight; None where there is none."""
        entry = self.entries.get(name)
        return None if entry is None else entry.importance()


def importance_of(
    source: Checkpoint,
    view: Any,
    placed: Sequence[Any],
    settings: ExportSettings,
    work: Path,
    progress: Progress,
) -> InputImportance:
    """The importance that the settings ask for; none with ``auto`` and a rounding that runs the calibration
    text, which collects the inputs itself (gguf_codes.py).

    Args:
        view: the source with its weights decoded.

    Raises:
        SettingsError: the file does not fit the model.
    """
    if settings.importance_rows:
        return _compute(source, view, placed, settings, work, progress)
    if settings.imatrix in ("auto", "none", ""):
        return InputImportance()
    return _read(Path(settings.imatrix), placed)


def _read(file: Path, placed: Sequence[Any]) -> InputImportance:
    entries = imatrix.read_imatrix(file)
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
    return InputImportance(entries, source=file.name)


def _compute(
    source: Checkpoint,
    view: Any,
    placed: Sequence[Any],
    settings: ExportSettings,
    work: Path,
    progress: Progress,
) -> InputImportance:
    from attar.deployment.imatrix import compute
    from attar.models.load import load_tokenizer

    length = row_length(settings.sequence_length, source.config)
    batches = calibration_batches(
        load_tokenizer(source),
        settings.data,
        samples=settings.importance_rows,
        sequence_length=length,
        batch_size=settings.batch_size,
        seed=settings.seed,
        bos=settings.bos,
    )
    sums = compute(
        view,
        batches,
        work=work / "imatrix",
        precision=settings.precision,
        device=pick_device(settings.device),
        progress=progress,
    )
    entries = {one.gguf: imatrix.ImportanceEntry(*sums[one.stored]) for one in placed if one.stored in sums}
    origin = {
        "datasets": [settings.data],
        "chunks": sum(len(batch) for batch in batches),
        "chunk_size": length,
    }
    tokens = sum(batch.numel() for batch in batches)
    return InputImportance(entries, origin, f"{tokens:,} tokens of {settings.data}")
