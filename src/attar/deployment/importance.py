"""Importance of each tensor's inputs for the search of scales: read from a file of llama.cpp's, or
computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attar.checkpoint.open import Checkpoint
from attar.data.sources import COMPRESSION
from attar.deployment.gguf_types import FLOATS
from attar.deployment.settings import ExportSettings
from attar.errors import ModelError, SettingsError
from attar.formats.gguf import imatrix
from attar.models.loading.device import pick_device
from attar.progress import Progress
from attar.quantization.gates import unseen_inputs
from attar.quantization.hessian import informed

EMBEDDING = "token_embd.weight"
SHOWN = 6  # names in a sentence

if TYPE_CHECKING:
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
        """Sentences for the card and the terminal."""
        unseen = unseen_inputs([{"unseen": entry.unseen} for entry in self.entries.values()])
        notes = [f"scales are searched with the importance of inputs: {self.source}"] if self.source else []
        return notes + ([f"{unseen}: they count as usual ones do"] if unseen else [])

    def missing(self, placed: Sequence[Placement], kinds: Mapping[str, str]) -> list[str]:
        """A sentence on the tensors that get no importance, or whose experts saw no token; empty where all
        have it. The embedding is no product, and has none in llama.cpp either."""
        if not self.entries:
            return []
        names, experts = [], 0
        for placement in placed:
            if not placement.matrix or kinds[placement.gguf] in FLOATS or placement.gguf == EMBEDDING:
                continue
            entry = self.entries.get(placement.gguf)
            counts = torch.as_tensor(0.0 if entry is None else entry.count).flatten()
            if not bool((counts > 0).any()):
                names.append(placement.gguf)
            elif placement.expert is not None and counts.numel() == placement.experts:
                experts += int(counts[placement.expert] <= 0)
        names = list(dict.fromkeys(names))
        shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
        plain = "their scales are searched without it"
        return [f"{len(names)} tensors have no importance ({shown}): {plain}"] * bool(names) + [
            f"{experts} matrices of experts saw no token: {plain}"
        ] * bool(experts)

    def vector(self, placement: Placement) -> Tensor | None:
        """Importance (K,) of the inputs of a weight, or of one of its experts, the median of the others where
        an input was always zero; None where there is none."""
        entry = self.entries.get(placement.gguf)
        if entry is None or len(placement.shape) != 2 or not bool((torch.as_tensor(entry.count) > 0).any()):
            return None
        means = entry.importance()
        if placement.expert is not None:
            means = means.reshape(placement.experts, -1)[placement.expert]
        return informed(means)


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
    for placement in placed:
        entry, inputs = entries.get(placement.gguf), placement.shape[-1] * max(placement.experts, 1)
        if entry is not None and placement.matrix and entry.in_sum2.numel() != inputs:
            raise SettingsError(
                "imatrix",
                str(file),
                f"one of this model: {placement.gguf} has {inputs} inputs, {entry.in_sum2.numel()} there",
            )
    if not any(placement.gguf in entries for placement in placed):
        raise SettingsError("imatrix", str(file), "one of this model: no tensor of it is in there")
    return InputImportance(entries, source=file.name)


def entries_of(sums: Sums, placed: Sequence[Placement]) -> dict[str, imatrix.ImportanceEntry]:
    """Sums of stored weights under llama.cpp's names, those of experts stacked; an expert that no token
    reached has none and counts 0."""
    entries: dict[str, imatrix.ImportanceEntry] = {}
    stacks: dict[str, list[Placement]] = {}
    for placement in placed:
        if placement.expert is not None and placement.matrix:
            stacks.setdefault(placement.gguf, []).append(placement)
        elif placement.stored in sums:
            total, count = sums[placement.stored]
            total = total if placement.columns is None else total[placement.columns]
            entries[placement.gguf] = imatrix.ImportanceEntry(total, count)
    for name, stack in stacks.items():
        none = torch.zeros(stack[0].shape[-1])
        pairs = [sums.get(placement.single or str(placement.stored), (none, 0.0)) for placement in stack]
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
    from attar.models.loading.calibration import calibration_text
    from attar.models.loading.single_experts import single_experts

    batches = calibration_text(source, settings, settings.importance_rows, COMPRESSION)
    try:
        sums = compute(
            single_experts(view),
            batches,
            work=work / "imatrix",
            processes=processes,
            precision=settings.precision,
            device=pick_device(settings.device),
            progress=progress,
        )
    except ModelError as error:
        raise ModelError(error.message, hint="--imatrix none, or --imatrix FILE of llama.cpp's") from error
    entries = entries_of(sums, placed)
    origin = {
        "datasets": [settings.data],
        "chunks": sum(len(batch) for batch in batches),
        "chunk_size": batches[0].shape[1],
    }
    tokens = sum(batch.numel() for batch in batches)
    return InputImportance(entries, origin, f"{tokens:,} tokens of {settings.data}")
