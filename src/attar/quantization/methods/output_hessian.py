"""H_O, the output side of the model's KL Hessian that two-sided rounding wants: collected before the sweep
with the model loaded once, for as many Linears at a time as memory allows, and kept in the work folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from attar.checkpoint import atomic
from attar.models.device import free_memory, pick_device, resolve
from attar.models.load import load_model
from attar.progress import Progress
from attar.quantization.plan import LayerPlan, QuantizationPlan
from attar.quantization.settings import QuantizeSettings
from attar.walks.kronecker import collect

if TYPE_CHECKING:
    from attar.checkpoint import Checkpoint

ROWS = 32  # sequences that the factors are collected on: a backward pass costs three forward ones
LEAST = 2 * 2**30  # bytes of factors collected in one go, however little memory is free


class OutputHessian:
    """H_O (N, N) of every site's Linear, read when asked for. The input side H_I comes from the sweep, which
    sees what reaches the layer behind the quantized prefix.

    Args:
        checkpoint: the dense model, which must fit in memory in float32.
        chosen: whose sites are collected.
        batches: int64 (B, S) calibration batches.
        work: folder of the files, one for each Linear; a killed run keeps those that are finished.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        chosen: QuantizationPlan,
        batches: Sequence[Tensor],
        settings: QuantizeSettings,
        work: Path,
        progress: Progress,
    ) -> None:
        self.checkpoint, self.settings = checkpoint, settings
        self.sites = list(chosen.sites.values())
        self.batches = batches[: max(ROWS // settings.batch_size, 1)]
        self.work, self.progress = work, progress

    def __call__(self, name: str) -> Tensor:
        """H_O of one Linear, float32, after :meth:`collect`."""
        return load_file(self._file(name))["output"]

    def collect(self) -> None:
        """Collect what is not in the work folder yet. How many Linears share a pass changes nothing in the
        factors: every pass draws the same labels."""
        missing = [site for site in self.sites if not self._file(site.module).exists()]
        if not missing:
            return
        self.work.mkdir(parents=True, exist_ok=True)
        device = torch.device(pick_device(self.settings.device))
        model = load_model(self.checkpoint, dtype=torch.float32, device=device)
        parts = portions(missing, max(LEAST, free_memory(device) // 2))
        passes = len(parts) * self.settings.rounds * len(self.batches)
        self.progress.log(
            f"yaqa: {passes} backward passes over the whole model: {len(missing)} layers in {len(parts)} "
            f"portion{'s' if len(parts) > 1 else ''}, {len(self.batches)} batches each"
        )
        for names in parts:
            self._collect(model, names, device)

    def _collect(self, model: Any, names: list[str], device: torch.device) -> None:
        fast = resolve(self.settings.precision, device, self.work) == "bf16"
        factors = collect(
            model,
            self.batches,
            names,
            rounds=self.settings.rounds,
            seed=self.settings.seed,
            autocast=torch.bfloat16 if fast else None,
            progress=self.progress,
            device=device,
        )
        for name, found in factors.items():
            atomic.save_tensors(self._file(name), {"output": found.output.cpu().contiguous()})

    def _file(self, name: str) -> Path:
        return self.work / f"{name}.safetensors"


def portions(sites: Sequence[LayerPlan], limit: int) -> list[list[str]]:
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
