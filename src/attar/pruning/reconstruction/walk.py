"""Reconstruction as a sweep over the original model, whose Linears become the pruned ones block by block:
linear (linear.py), or linear and then block (block.py). A killed run continues at its block.

KL to the original on held-out text, in nats a token; calibrated on 32 rows of 256 tokens (benchmarks/prune.py
measures the same at the rows of the other tools):

                               none     linear   block
    attar:tiny   2:4 magnitude  0.705    0.201
                 2:4 wanda      0.991    0.235    0.218      (SparseGPT alone: 0.253)
                 2:4 sparsegpt  0.253    0.184
                 neurons 25 %   0.0282   0.0203   0.0192
                 heads 25 %     0.201    0.092    0.084
                 1 layer of 8   0.147    0.156    0.125
                 2 layers of 8  0.493    0.474
    SmolLM2-135M 2:4 wanda      1.757    0.961               (SparseGPT alone: 1.023)
                 neurons 25 %   0.484    0.409

Linear takes about as long as SparseGPT, block ten times as long: so ``auto`` is linear, but for layers none.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attar.models.loading.device import pick_device
from attar.models.loading.empty import empty_model
from attar.models.loading.stored import stored_names
from attar.pruning.reconstruction.block import BlockReconstructor
from attar.pruning.reconstruction.linear import LinearReconstructor, PrunedSource
from attar.pruning.task import PruneTask
from attar.walks.distributed import agreed_precision
from attar.walks.sweep import SweepOptions, SweepResult, sweep_blocks, sweep_linears

STEP_TOKENS = 512  # tokens in a step of training, at least one row


class SweptLinears:
    """Solved weights and biases by module name, from a sweep's files; one block's are in memory."""

    def __init__(self, result: SweepResult) -> None:
        self.result = result
        self.block: tuple[int, dict[str, dict[str, Tensor]]] = (-1, {})

    @property
    def names(self) -> list[str]:
        """Of the Linears that changed, in forward order."""
        return list(self.result.block_of)

    def __contains__(self, name: object) -> bool:
        return name in self.result.block_of

    def weight(self, name: str) -> Tensor:
        """(N, K) in its stored type."""
        return self._tensors(name)["weight"]

    def bias(self, name: str) -> Tensor | None:
        """(N,) in the same type; None where the Linear has none."""
        return self._tensors(name).get("bias")

    def biases(self) -> dict[str, Tensor]:
        """All new biases, by module name."""
        biases = {name: self.bias(name) for name in self.names}
        return {name: bias for name, bias in biases.items() if bias is not None}

    @property
    def reports(self) -> Sequence[dict[str, Any]]:
        """One row a Linear, with its ``name``."""
        return self.result.reports

    def _tensors(self, name: str) -> dict[str, Tensor]:
        number = self.result.block_of[name]
        if self.block[0] != number:
            self.block = (number, self.result.tensors(number))
        return self.block[1][name]


@dataclass(frozen=True)
class ReconstructionPlan:
    """What is reconstructed of a pruned model.

    Attributes:
        kind: "linear", or "block".
        pruned: the pruned weights (N, K) of all Linears of the blocks in their stored type, by module name.
        solved: names of the Linears that least squares change.
        trained: names of the tensors that the training of blocks changes.
        originals: least squares compare with the original model's inputs, see :class:`LinearReconstructor`.
        removed: numbers of the blocks that are gone.
    """

    kind: str
    pruned: PrunedSource
    solved: Collection[str]
    trained: Collection[str]
    originals: bool = True
    removed: Collection[int] = ()


def reconstruct(task: PruneTask, plan: ReconstructionPlan, batches: Sequence[Tensor]) -> SweptLinears:
    """New weights, and biases, for a pruned model's Linears; weights that are zero stay zero.

    Args:
        batches: int64 (B, S), the calibration text.

    Raises:
        NumericsError: an output or a loss is not finite.
    """
    source = task.source
    biases = _biases(source, {*plan.solved, *plan.trained})
    device = pick_device(task.settings.device)
    output = task.output
    precision = agreed_precision(
        output.processes, task.settings.precision, torch.device(device), output.shared
    )
    options = SweepOptions(
        work=output.shared / "reconstruct-linear",
        select=plan.solved.__contains__,
        skip=plan.removed,
        precision=precision,
        processes=output.processes,
        device=device,
        progress=task.progress,
        what="reconstruct linear",
    )
    least_squares = LinearReconstructor(plan.pruned, biases, plan.originals)
    linear = SweptLinears(sweep_linears(source, batches, least_squares, options))
    if plan.kind == "linear":
        return linear
    training = BlockReconstructor(
        lambda name: linear.weight(name) if name in linear else plan.pruned(name),
        lambda name: linear.bias(name) if name in linear else biases.get(name),
        epochs=task.settings.reconstruct_epochs,
        fast=precision == "bf16",
        seed=task.settings.seed,
    )
    rows = max(STEP_TOKENS // batches[0].shape[1], 1)
    parts = [part for batch in batches for part in batch.split(rows)]
    options = replace(
        options,
        work=output.shared / "reconstruct-block",
        select=plan.trained.__contains__,
        what="reconstruct block",
    )
    return SweptLinears(sweep_blocks(source, parts, training, options))


def _biases(checkpoint: Any, names: Container[str]) -> dict[str, Tensor]:
    """The biases of Linears, by module name."""
    stored = stored_names(empty_model(checkpoint.config, unstacked=True), checkpoint)
    owners = {name: name.removesuffix(".bias") for name in stored if name.endswith(".bias")}
    return {owner: checkpoint.load(stored[name]) for name, owner in owners.items() if owner in names}
