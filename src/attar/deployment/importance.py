"""Importance of each tensor's inputs for the search of scales: read from a file of llama.cpp's, or
computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attar.data.packing import calibration_batches, row_length
from attar.deployment.settings import ExportSettings
from attar.errors import SettingsError
from attar.formats.gguf import imatrix
from attar.models.device import pick_device
from attar.progress import Progress

if TYPE_CHECKING:
    from attar.checkpoint import Checkpoint
    from attar.checkpoint.processes import Processes
    from attar.deployment.imatrix import Sums
    from attar.formats.gguf.placement import Placement


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

    def vector(self, one: Placement) -> Tensor | None:
        """Importance (K,) of the inputs of a weight, or of one of its experts; None where there is none."""
        entry = self.entries.get(one.gguf)
        if entry is None or len(one.shape) != 2:
            return None
        means = entry.importance()
        return means if one.expert is None else means.reshape(one.experts, -1)[one.expert]


def importance_of(
    source: Checkpoint,
    view: Any,
    placed: Sequence[Any],
    settings: ExportSettings,
    work: Path,
    processes: Processes,
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
        return _compute(source, view, placed, settings, work, processes, progress)
    if settings.imatrix in ("auto", "none", ""):
        return InputImportance()
    return _read(Path(settings.imatrix), placed)


def _read(file: Path, placed: Sequence[Any]) -> InputImportance:
    entries = imatrix.read_imatrix(file)
    for one in placed:
        entry, inputs = entries.get(one.gguf), one.shape[-1] * max(one.experts, 1)
        if entry is not None and entry.in_sum2.numel() != inputs and len(one.shape) == 2:
            raise SettingsError(
                "imatrix",
                str(file),
                f"one of this model: {one.gguf} has {inputs} inputs, {entry.in_sum2.numel()} there",
            )
    if not any(one.gguf in entries for one in placed):
        raise SettingsError("imatrix", str(file), "one of this model: no tensor of it is in there")
    return InputImportance(entries, source=file.name)


def entries_of(sums: Sums, placed: Sequence[Placement]) -> dict[str, imatrix.ImportanceEntry]:
    """Sums of stored weights under llama.cpp's names, those of experts stacked; an expert that no token
    reached has none and counts 0."""
    entries: dict[str, imatrix.ImportanceEntry] = {}
    stacks: dict[str, list[Placement]] = {}
    for one in placed:
        if one.expert is not None and one.matrix:
            stacks.setdefault(one.gguf, []).append(one)
        elif one.stored in sums:
            entries[one.gguf] = imatrix.ImportanceEntry(*sums[one.stored])
    for name, stack in stacks.items():
        none = torch.zeros(stack[0].shape[-1])
        pairs = [sums.get(one.single or str(one.stored), (none, 0.0)) for one in stack]
        if any(count for _, count in pairs):
            counts = torch.tensor([[count] for _, count in pairs], dtype=torch.float32)
            entries[name] = imatrix.ImportanceEntry(torch.stack([total for total, _ in pairs]), counts)
    return entries


def _compute(
    source: Checkpoint,
    view: Any,
    placed: Sequence[Any],
    settings: ExportSettings,
    work: Path,
    processes: Processes,
    progress: Progress,
) -> InputImportance:
    from attar.deployment.imatrix import compute
    from attar.models.load import load_tokenizer
    from attar.models.single_experts import single_experts

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
        single_experts(view),
        batches,
        work=work / "imatrix",
        processes=processes,
        precision=settings.precision,
        device=pick_device(settings.device),
        progress=progress,
    )
    entries = entries_of(sums, placed)
    origin = {
        "datasets": [settings.data],
        "chunks": sum(len(batch) for batch in batches),
        "chunk_size": length,
    }
    tokens = sum(batch.numel() for batch in batches)
    return InputImportance(entries, origin, f"{tokens:,} tokens of {settings.data}")
