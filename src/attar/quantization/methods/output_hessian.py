"""H_O, the output side of the model's KL Hessian for YAQA: collected before the sweep with the model loaded
once, for as many Linears at a time as memory allows, and kept in the work folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from attar.checkpoint.atomic import save_tensors
from attar.checkpoint.open import Checkpoint
from attar.models.loading.device import free_memory, resolve
from attar.models.loading.experts import unstack
from attar.models.loading.load import load_model
from attar.progress import Progress
from attar.quantization.plan import LayerPlan, QuantizationPlan
from attar.sensitivity.kronecker import output_hessians
from attar.walks.settings import curvature_rows

LEAST = 2 * 2**30  # bytes of H_O collected in one pass at least, however little memory is free


class OutputHessian:
    """H_O (N, N) of every layer of a plan, loaded on demand. H_I comes from the sweep, whose inputs are
    those after the quantized layers.

    Args:
        checkpoint: the dense model, which must fit in memory in float32.
        batches: int64 (B, S) calibration batches.
        work: its work folder; one file for each Linear is kept there.
        seed: of the labels.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        plan: QuantizationPlan,
        batches: Sequence[Tensor],
        work: Path,
        progress: Progress,
        *,
        seed: int,
        device: torch.device,
    ) -> None:
        self.checkpoint, self.seed, self.device = checkpoint, seed, device
        self.layers = list(plan.sites.values())
        rows = torch.cat(list(batches))
        self.rows = rows[: curvature_rows(len(rows))].split(1)  # memory of one row's logits
        self.folder, self.progress = work / "curvature", progress

    def __call__(self, name: str) -> Tensor:
        """H_O of one Linear, float32, on the device, after :meth:`collect`."""
        return load_file(self._file(name))["output"].to(self.device)

    def collect(self, precision: str = "auto") -> None:
        """Collect the matrices that the work folder lacks, with products in ``precision``. How many Linears
        share a pass does not change them: every pass draws the same labels."""
        missing = [layer for layer in self.layers if not self._file(layer.module).exists()]
        if not missing:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        model = unstack(load_model(self.checkpoint, dtype=torch.float32, device=self.device))
        parts = portions(missing, max(LEAST, free_memory(self.device) // 2))
        passes = len(parts) * len(self.rows)
        self.progress.log(
            f"yaqa: {passes} backward passes over the whole model: {len(missing)} layers in {len(parts)} "
            f"portion{'s' if len(parts) > 1 else ''}, {len(self.rows)} sequences each"
        )
        for names in parts:
            self._collect(model, names, precision)

    def _collect(self, model: Any, names: list[str], precision: str) -> None:
        fast = resolve(precision, self.device, self.folder) == "bf16"
        hessians = output_hessians(
            model,
            self.rows,
            names,
            seed=self.seed,
            autocast=torch.bfloat16 if fast else None,
            progress=self.progress,
            device=self.device,
        )
        for name, H_O in hessians.items():
            save_tensors(self._file(name), {"output": H_O.cpu().contiguous()})

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"


def portions(layers: Sequence[LayerPlan], limit: int) -> list[list[str]]:
    """Module names in lists whose H_O need at most ``limit`` bytes."""
    parts: list[list[str]] = [[]]
    size = 0
    for layer in layers:
        needed = 4 * layer.shape[0] ** 2
        if parts[-1] and size + needed > limit:
            parts.append([])
            size = 0
        parts[-1].append(layer.module)
        size += needed
    return parts
