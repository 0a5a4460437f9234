"""The walk of unstructured pruning: an ordinary dense checkpoint in, the same with zeros in its Linears out.

    amounts     how many zeros each layer gets                               (allocation.py)
    prune       magnitude: while the tensors are written, without text
                else: block by block with calibration activations            (layerwise.py, walks/sweep.py)
    reconstruct the weights that stay give back what was lost               (reconstruction/)
    write       pruned weights in their stored types, everything else as it is
    check       the zeros of each layer, counted in the files

A killed run resumes from the finished blocks and shards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attar.checkpoint.atomic import write_config
from attar.checkpoint.open import Checkpoint, check_finite, open_checkpoint
from attar.checkpoint.shards import TensorSpec
from attar.errors import NumericsError
from attar.models.loading.device import pick_device
from attar.models.loading.single_experts import SingleExperts, single_experts
from attar.pruning.allocation import amounts_of
from attar.pruning.criteria.magnitude import magnitude_scores
from attar.pruning.layerwise import LayerPruner, PruneSolver
from attar.pruning.linears import Amounts, Linears, PrunedLinear, PrunedWeights, pruned_linears
from attar.pruning.reconstruction.walk import ReconstructionPlan, SweptLinears, reconstruct
from attar.pruning.settings import PruneSettings, ZerosSettings
from attar.pruning.solvers.alps import alps
from attar.pruning.solvers.sparsegpt import sparsegpt
from attar.pruning.task import PruneTask
from attar.quantization.columns import BLOCK
from attar.quantization.gates import unseen_inputs
from attar.sparsity import NOTHING_PAYS, Sparsity, parse_sparsity, zeros_statement
from attar.walks.stream import stream
from attar.walks.sweep import SweepOptions, sweep_linears

Biases = Mapping[str, Tensor]
"""New biases, by module name."""

Reports = Mapping[str, Mapping[str, Any]]
"""What a walk says of each layer, by module name."""


@dataclass(frozen=True)
class ZerosMethod:
    """A method of unstructured pruning.

    Attributes:
        sees_text: the model is run on calibration text.
        solver: for LayerPruner; None: scores alone.
        factored: the solver takes the factor of the Hessian, which Linears with the same inputs share.
        arguments: options of the settings that the solver takes.
    """

    sees_text: bool = True
    solver: PruneSolver | None = None
    factored: bool = False
    arguments: tuple[str, ...] = ()


def prune_zeros(task: PruneTask) -> None:
    """Set the least important weights of the blocks' Linears to zero.

    Raises:
        AttarError: N:M does not fit, or a weight is not finite.
    """
    task = replace(task, source=single_experts(task.source))
    linears = pruned_linears(task.source, task.options)
    sparsity = parse_sparsity(task.options.sparsity)
    if not sparsity.two_of_four:
        task.progress.log(f"note: {NOTHING_PAYS}")
    batches = task.batches() if sees_text(task.settings) else []
    amounts, chosen = amounts_of(task, linears, batches)
    walk = prune_linears if ZEROS[task.settings.method].sees_text else stream_magnitude
    weights, reports = walk(task, linears, amounts, batches)
    biases: Biases = {}
    if task.settings.reconstruction != "none":
        weights, biases, reports = reconstruct_zeros(task, linears, weights, reports, batches)
    write(task, linears, weights, biases)
    task.output.exit_unless_rank0()
    rows = check(task, linears, amounts, reports)
    details = task.output.details
    zeros, of = sum(row["zeros"] for row in rows), sum(linear.size for linear in linears.values())
    details["zeros"] = zeros_statement(task.settings.method, sparsity, zeros, of)
    if chosen:
        details["allocation"] = chosen
    if unseen := unseen_inputs(rows):
        details["unseen"] = f"{unseen}: their weights are judged by their magnitude"
        task.progress.log(f"warning: {details['unseen']}")
    details["layers"] = [{name: row[name] for name in row if name != "zeros"} for row in rows]


def sees_text(settings: PruneSettings) -> bool:
    """Whether the model is run on calibration text."""
    options = settings.options
    assert isinstance(options, ZerosSettings)
    method = ZEROS[settings.method]
    return method.sees_text or options.allocation != "uniform" or settings.reconstruction != "none"


def stream_magnitude(
    task: PruneTask,
    linears: Linears,
    amounts: Amounts,
    batches: list[Tensor],
) -> tuple[PrunedWeights, Reports]:
    """The smallest weights of each layer become zero when it is written."""

    def pruned(linear: PrunedLinear) -> Tensor:
        weight = linear.turned(task.source.load(linear.stored))
        if not torch.isfinite(weight).all():
            raise NumericsError(f"{linear.stored} holds NaN or infinity", hint="the checkpoint is damaged")
        return weight.masked_fill(~amounts[linear.module].mask(magnitude_scores(weight)), 0.0)

    return pruned, {}


def prune_linears(
    task: PruneTask,
    linears: Linears,
    amounts: Amounts,
    batches: list[Tensor],
) -> tuple[PrunedWeights, Reports]:
    """One Linear at a time, each with the inputs that it gets after the layers pruned before it; where the
    weights stay as they are, one block at a time."""
    method = ZEROS[task.settings.method]
    options = {name: getattr(task.options, name) for name in method.arguments}
    pruner = LayerPruner(linears, amounts, method.solver, options, method.factored, task.options.by_row)
    walk = SweepOptions(
        work=task.output.shared / "blocks",
        processes=task.output.processes,
        select=linears.__contains__,
        precision=task.settings.precision,
        device=torch.device(pick_device(task.settings.device)),
        progress=task.progress,
        what=f"prune {task.settings.method}",
    )
    result = sweep_linears(task.source, batches, pruner, walk)
    task.output.details["precision"] = result.precision
    swept = SweptLinears(result)
    return lambda linear: swept.weight(linear.module), {row["name"]: row for row in swept.reports}


def reconstruct_zeros(
    task: PruneTask, linears: Linears, weights: PrunedWeights, reports: Reports, batches: list[Tensor]
) -> tuple[PrunedWeights, Biases, Reports]:
    """The weights that stay, and biases, changed to give back what the zeros lost."""
    plan = ReconstructionPlan(
        task.settings.reconstruction, lambda name: weights(linears[name]), linears, linears
    )
    solved = reconstruct(task, plan, batches)
    task.output.details["reconstruct"] = plan.kind
    rows = {row["name"]: {**reports.get(row["name"], {}), **row} for row in solved.reports}
    return lambda linear: solved.weight(linear.module), solved.biases(), rows


def write(task: PruneTask, linears: Linears, weights: PrunedWeights, biases: Biases) -> None:
    """Write config and tensors: the weights of the linears pruned, all other tensors unchanged."""
    source, output = task.source, task.output
    stored = {linear.stored: linear for linear in linears.values()}
    owners = {linear.stored.removesuffix("weight") + "bias": linear.module for linear in linears.values()}

    def changed(name: str, load: Callable[[], Tensor]) -> Tensor:
        if owners.get(name) in biases:
            return biases[owners[name]].to(load().dtype)
        linear = stored.get(name)
        if linear is not None:
            return linear.turned(weights(linear))
        other = load()
        check_finite(name, other, source.path)
        return other

    def transform(name: str, load: Callable[[], Tensor]) -> dict[str, Tensor]:
        if isinstance(source, SingleExperts) and name in source.stacks:
            return {name: source.filled(name, changed)}
        return {name: changed(name, load)}

    write_config(output.folder / "config.json", source.config)
    stream(
        source.stacked if isinstance(source, SingleExperts) else source,
        lambda info: [TensorSpec(info.name, info.dtype, info.shape)],
        transform,
        output.folder,
        work=output.shared / "shards",
        processes=output.processes,
        progress=task.progress,
    )


def check(
    task: PruneTask,
    linears: Linears,
    amounts: Amounts,
    reports: Reports,
) -> list[dict[str, Any]]:
    """One row a layer: its zeros as they are in the files, and the walk's report or the weight's error.

    Raises:
        NumericsError: a layer has fewer zeros than it must have.
    """
    written, rows = single_experts(open_checkpoint(task.output.folder)), []
    with task.progress.task("check", total=len(linears)) as bar:
        for name, linear in linears.items():
            pruned = linear.turned(written.load(linear.stored))
            amount, zeros = amounts[name], int((pruned == 0).sum())
            if not holds(pruned, amount):
                raise NumericsError(f"{name}: {zeros / linear.size:.4%} zeros, not {amount}")
            row = {"name": name, "sparsity": zeros / linear.size, "zeros": zeros}
            rows.append({**row, **(reports.get(name) or weight_error(task.source, linear, pruned))})
            bar.advance()
    return rows


def holds(weight: Tensor, amount: Sparsity) -> bool:
    """Whether a weight (N, K) has the zeros of an amount, and the pattern of N:M.

    A fraction may miss one zero in each block of columns, where solvers round it.
    """
    if amount.of:
        kept = (weight != 0).unflatten(1, (-1, amount.of)).sum(-1)
        return int(kept.max()) <= amount.kept
    missing = round(weight.numel() * amount.zeros) - int((weight == 0).sum())
    return bool(missing <= weight.shape[1] // BLOCK + 1)


def weight_error(source: Checkpoint, linear: PrunedLinear, pruned: Tensor) -> dict[str, float]:
    """The relative squared error of the weight, where no inputs were seen."""
    before = linear.turned(source.load(linear.stored)).float()
    lost, energy = (
        float(part.square().sum(dtype=torch.float64)) for part in (before - pruned.float(), before)
    )
    return {"weight_error": lost / max(energy, 1e-30)}


ZEROS: dict[str, ZerosMethod] = {
    "magnitude": ZerosMethod(sees_text=False),
    "wanda": ZerosMethod(),
    "sparsegpt": ZerosMethod(solver=sparsegpt, factored=True, arguments=("damp",)),
    "alps": ZerosMethod(solver=alps, arguments=("damp", "iterations")),
}
"""The methods by name; their options are in settings.METHOD_SETTINGS."""
