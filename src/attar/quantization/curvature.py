"""H_O, the output side of the model's KL Hessian that two-sided rounding wants, collected for as many Linears
at a time as memory allows, and kept in the work folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from attar.models.device import pick_device
from attar.models.load import load_model
from attar.progress import Progress
from attar.quantization.scheme import Plan, Site
from attar.quantization.settings import QuantizeSettings
from attar.walks.kronecker import collect
from attar.walks.passes import has_bfloat16

if TYPE_CHECKING:
    from attar.checkpoint import Checkpoint

ROWS = 32  # sequences that the factors are collected on: a backward pass costs three forward ones
LIMIT = 2 * 2**30  # bytes of factors collected in one go


class Curvature:
    """H_O (N, N) of every site's Linear, read when asked for. The input side H_I comes from the sweep, which
    sees what reaches the layer behind the quantized prefix.

    Args:
        checkpoint: the dense model, which must fit in memory.
        chosen: whose sites are collected.
        batches: int64 (B, S) calibration batches.
        work: folder of the files, one for each portion; a killed run keeps those that are finished.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        chosen: Plan,
        batches: Sequence[Tensor],
        settings: QuantizeSettings,
        work: Path,
        progress: Progress,
    ) -> None:
        self.checkpoint, self.batches, self.settings = checkpoint, batches, settings
        self.work, self.progress = work, progress
        self.portions = portions(list(chosen.sites.values()), LIMIT)
        self.number = {name: i for i, names in enumerate(self.portions) for name in names}
        self.held: tuple[int, dict[str, Tensor]] = (-1, {})

    def __call__(self, name: str) -> Tensor:
        """H_O of one Linear, float32."""
        number = self.number[name]
        if self.held[0] != number:
            self.held = (number, load_file(self._collected(number)))
        return self.held[1][name]

    def _collected(self, number: int) -> Path:
        """The file of a portion, made where it is not there."""
        file = self.work / f"factors-{number:05d}.safetensors"
        if file.exists():
            return file
        self.work.mkdir(parents=True, exist_ok=True)
        device = torch.device(pick_device(self.settings.device))
        fast = self.settings.precision != "fp32" and has_bfloat16(device)
        factors = collect(
            load_model(self.checkpoint, dtype=torch.float32, device=device),
            self.batches[: max(ROWS // self.settings.batch_size, 1)],
            self.portions[number],
            rounds=self.settings.rounds,
            seed=self.settings.seed,
            autocast=torch.bfloat16 if fast else None,
            progress=self.progress,
            device=device,
        )
        tensors = {name: found.output.cpu().contiguous() for name, found in factors.items()}
        partial = file.with_suffix(".partial")
        save_file(tensors, partial)
        partial.rename(file)
        return file


def portions(sites: Sequence[Site], limit: int) -> list[list[str]]:
    """Module names cut into runs whose factors, held twice, stay below ``limit`` bytes."""
    found: list[list[str]] = [[]]
    size = 0
    for site in sites:
        rows, columns = site.shape
        needed = 8 * (rows * rows + columns * columns)
        if found[-1] and size + needed > limit:
            found.append([])
            size = 0
        found[-1].append(site.module)
        size += needed
    return found
