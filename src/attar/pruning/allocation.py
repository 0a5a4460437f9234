"""How many zeros each layer gets.

uniform     the same fraction, or N:M, in each
global      magnitude's one threshold over all layers                    (criteria/magnitude.py)
owl         blocks with outliers keep more                               (criteria/owl.py)
measured    groups of layers whose pruning costs more KL keep more       (sensitivity.py)

The zeros of all layers together are exactly the fraction asked for. The result stays in the work folder.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attar.checkpoint.atomic import write_json
from attar.checkpoint.jsonfile import read_json
from attar.models.loading.device import pick_device
from attar.pruning.criteria.magnitude import global_zeros
from attar.pruning.criteria.owl import block_zeros, outlier_share
from attar.pruning.criteria.wanda import InputNorms, observe_norms, wanda_scores
from attar.pruning.linears import Linears, PrunedLinear
from attar.pruning.sensitivity import measured_fractions
from attar.pruning.task import PruneTask
from attar.sparsity import Sparsity, parse_sparsity
from attar.walks.sweep import SweepOptions, observe


def amounts_of(
    task: PruneTask, linears: Linears, batches: Sequence[Tensor]
) -> tuple[dict[str, Sparsity], dict[str, Any]]:
    """The amount of each layer by module name, and what the card says of the choice.

    Raises:
        NumericsError: an activation is not finite.
    """
    sparsity, name = parse_sparsity(task.options.sparsity), task.options.allocation
    if getattr(task.options, "scope", "layer") == "global":
        name = "global"
    if name == "uniform":
        return dict.fromkeys(linears, sparsity), {}
    file, processes = task.output.shared / "allocation.json", task.output.processes
    if not processes.agreed(file.exists()):
        counts, chosen = ALLOCATIONS[name](task, linears, batches, sparsity)
        if processes.first:
            write_json(file, {"zeros": counts, "report": {"by": name, **chosen}})
        processes.wait()
    content = read_json(file)
    amounts = {name: Sparsity(content["zeros"][name] / linear.size) for name, linear in linears.items()}
    return amounts, content["report"]


def by_threshold(
    task: PruneTask, linears: Linears, batches: Sequence[Tensor], sparsity: Sparsity
) -> tuple[dict[str, int], dict[str, Any]]:
    """Zeros of each layer below one threshold."""
    loads = {name: lambda linear=linear: task.source.load(linear.stored) for name, linear in linears.items()}
    return global_zeros(loads, zeros_of(linears, sparsity)), {}  # type: ignore[arg-type]


def by_outliers(
    task: PruneTask, linears: Linears, batches: Sequence[Tensor], sparsity: Sparsity
) -> tuple[dict[str, int], dict[str, Any]]:
    """Zeros of each layer by the outliers of its block."""
    norms = dense_norms(task, linears, batches)
    blocks: dict[int, list[PrunedLinear]] = {}
    for linear in linears.values():
        blocks.setdefault(linear.block, []).append(linear)
    shares = torch.tensor([_outliers(task, members, norms) for members in blocks.values()])
    sizes = torch.tensor([sum(linear.size for linear in members) for members in blocks.values()])
    fractions = dict(zip(blocks, block_zeros(shares, sizes, sparsity.zeros).tolist(), strict=True))
    targets = {name: fractions[linear.block] * linear.size for name, linear in linears.items()}
    report = {"outliers": {str(block): float(share) for block, share in zip(blocks, shares, strict=True)}}
    return whole_counts(targets, linears, zeros_of(linears, sparsity)), report


def _outliers(task: PruneTask, members: Sequence[PrunedLinear], norms: Mapping[str, Tensor]) -> float:
    scores = []
    for linear in members:
        scores.append(wanda_scores(linear.turned(task.source.load(linear.stored)), norms[linear.module]))
    return outlier_share(scores)


def by_sensitivity(
    task: PruneTask, linears: Linears, batches: Sequence[Tensor], sparsity: Sparsity
) -> tuple[dict[str, int], dict[str, Any]]:
    """Zeros of each layer by the KL that pruning its group alone costs."""
    fractions, report = measured_fractions(task, linears, sparsity)
    targets = {name: fractions[name] * linear.size for name, linear in linears.items()}
    return whole_counts(targets, linears, zeros_of(linears, sparsity)), report


def zeros_of(linears: Linears, sparsity: Sparsity) -> int:
    """Zeros of all layers together."""
    return round(sum(linear.size for linear in linears.values()) * sparsity.zeros)


def whole_counts(targets: Mapping[str, float], linears: Linears, total: int) -> dict[str, int]:
    """Whole numbers of zeros near the targets, whose sum is exactly ``total``.

    What the targets miss is spread in proportion to the layers' sizes.
    """
    sizes = {name: linear.size for name, linear in linears.items()}

    def shifted(share: float) -> dict[str, float]:
        return {
            name: min(max(targets[name] + share * size, 0.0), float(size)) for name, size in sizes.items()
        }

    low, high = -1.0, 1.0
    for _ in range(100):  # bisection: the sum rises with the share
        middle = (low + high) / 2.0
        low, high = (middle, high) if sum(shifted(middle).values()) < total else (low, middle)
    exact = shifted(high)
    counts = {name: math.floor(value) for name, value in exact.items()}
    remainders = sorted(sizes, key=lambda name: counts[name] - exact[name])
    while missing := total - sum(counts.values()):
        for name in remainders[: abs(missing)]:
            counts[name] = min(max(counts[name] + (1 if missing > 0 else -1), 0), sizes[name])
    return counts


def dense_norms(task: PruneTask, linears: Linears, batches: Sequence[Tensor]) -> dict[str, Tensor]:
    """||X_j||_2 (K,) of each layer's inputs in the model before pruning, by module name."""
    inputs = {name: linear.shape[1] for name, linear in linears.items()}
    accumulators: dict[str, InputNorms] = {}
    observe(
        task.source,
        batches,
        SweepOptions(
            work=task.output.shared / "norms",
            processes=task.output.processes,
            precision=task.settings.precision,
            prepare=lambda model: accumulators.update(observe_norms(model, inputs)[0]),
            device=torch.device(pick_device(task.settings.device)),
            progress=task.progress,
            what="input norms",
        ),
    )
    for accumulator in accumulators.values():
        accumulator.reduce(task.output.processes.total)
    return {name: accumulator.value().cpu() for name, accumulator in accumulators.items()}


ALLOCATIONS = {"global": by_threshold, "owl": by_outliers, "measured": by_sensitivity}
"""Zeros by module name, and the report, of each choice that is not uniform."""
