"""Reconstruction as a sweep over the original model, whose Linears become the pruned ones block by block: linear
(linear.py), or linear and then the block as a whole (block.py). A killed run continues at its block."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attar.models.device import pick_device, resolve
from attar.models.load import empty_model
from attar.models.stored import stored_names
from attar.pruning.reconstruction.block import BlockReconstructor
from attar.pruning.reconstruction.linear import LinearReconstructor, PrunedSource
from attar.pruning.task import PruneTask
from attar.walks.sweep import SweepResult, sweep

if TYPE_CHECKING:
    from attar.checkpoint import Checkpoint

STEP_TOKENS = 512  # tokens in a step of training, at least one row


class ReconstructedLinears:
    """New weights and biases by module name, from a sweep's files; those of one block are in memory."""

    def __init__(self, result: SweepResult) -> None:
        self.result = result
        self.block: tuple[int, dict[str, dict[str, Tensor]]] = (-1, {})

    def __contains__(self, name: object) -> bool:
        return name in self.result.block_of

    def weight(self, name: str) -> Tensor:
        """(N, K) in its stored type."""
        return self._tensors(name)["weight"]

    def bias(self, name: str) -> Tensor | None:
        """(N,) in the same type; None where the Linear has none."""
        return self._tensors(name).get("bias")

    def _tensors(self, name: str) -> dict[str, Tensor]:
        number = self.result.block_of[name]
        if self.block[0] != number:
            self.block = (number, self.result.tensors(number))
        return self.block[1][name]


def reconstruct(
    task: PruneTask,
    kind: str,
    pruned: PrunedSource,
    names: Container[str],
    batches: Sequence[Tensor],
    *,
    originals: bool = True,
) -> ReconstructedLinears:
    """Weights of the pruned Linears that give back part of what was lost; their zeros stay.

    Args:
        kind: "linear", or "block".
        pruned: the pruned weights (N, K), by module name.
        names: of the Linears of the blocks that change.
        batches: int64 (B, S), the calibration text.
        originals: see :class:`LinearReconstructor`.

    Raises:
        NumericsError: an output or a loss is not finite.
    """
    biases = _biases(task.source, names)
    device = pick_device(task.settings.device)
    common: dict[str, Any] = {
        "select": names.__contains__,
        "precision": resolve(task.settings.precision, device, task.output.work),
        "device": device,
        "progress": task.progress,
    }
    linear = ReconstructedLinears(
        sweep(
            task.source,
            batches,
            LinearReconstructor(pruned, biases, originals),
            work=task.output.work / "linear",
            what="reconstruct linear",
            **common,
        )
    )
    if kind == "linear":
        return linear
    solver = BlockReconstructor(
        linear.weight,
        linear.bias,
        epochs=task.settings.reconstruct_epochs,
        fast=common["precision"] == "bf16",
        seed=task.settings.seed,
    )
    rows = max(STEP_TOKENS // batches[0].shape[1], 1)
    parts = [part for batch in batches for part in batch.split(rows)]
    return ReconstructedLinears(
        sweep(task.source, parts, solver, work=task.output.work / "block", what="reconstruct block", **common)
    )


def _biases(checkpoint: Checkpoint, names: Container[str]) -> dict[str, Tensor]:
    """The biases of Linears, by module name."""
    stored = stored_names(empty_model(checkpoint.config), checkpoint)
    owners = {name: name.removesuffix(".bias") for name in stored if name.endswith(".bias")}
    return {owner: checkpoint.load(stored[name]) for name, owner in owners.items() if owner in names}
