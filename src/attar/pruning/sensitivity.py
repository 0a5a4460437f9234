"""Fractions of zeros for each layer, by the KL that pruning its group alone costs the model
(sensitivity/weight_changes.py), under a total.

    minimise sum_g kl[g, s_g]    under   sum_g n_g s_g >= s sum_g n_g

Letters: g group of Linears with the same inputs (q, k and v; gate and up), n_g its weights, s_g its fraction
of zeros, s the fraction asked for. The choice is exact (mixed_precision/allocate.py). kl is measured at
tenths and interpolated between them, linear in its logarithm. Masks are magnitude's for magnitude,
Wanda's for all other methods: a better solver improves every fraction, so the order of the groups holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attar.pruning.criteria.magnitude import magnitude_scores
from attar.pruning.criteria.wanda import observe_norms, wanda_scores
from attar.pruning.linears import Linears
from attar.pruning.task import PruneTask
from attar.quantization.mixed_precision.allocate import Allocation, Option, allocate
from attar.sensitivity.measurements import Measurement
from attar.sensitivity.reference import MEMORY, reference_of
from attar.sensitivity.weight_changes import (
    NewWeight,
    SensitivityInputs,
    WeightChange,
    changed,
    load_inputs,
    measure_changes,
    shared_groups,
)
from attar.sparsity import Sparsity

REACH = 0.25  # fractions further from the one asked for are not measured
STEP = 0.02  # between two fractions to choose from
BLENDS = (0.0, 0.5, 1.0)  # shares of the choice in what is measured as a whole; the rest is equal fractions

Pruning = Callable[[str, float], NewWeight]
"""``pruning(module, fraction)``: what becomes of a module's weight."""


def measured_fractions(
    task: PruneTask, linears: Linears, sparsity: Sparsity
) -> tuple[dict[str, float], dict[str, Any]]:
    """The fraction of each layer by module name; for the card its KL, and the KL of equal fractions.

    The sum of the groups' KLs is an approximation, so the choice, equal fractions, and the middle of both are
    measured as a whole, and the best one is taken.

    Raises:
        DataError: there is not enough text.
    """
    inputs = load_inputs(task.source, task.settings)
    name, pruning = _pruning(task, inputs, linears)
    groups = shared_groups(inputs.anatomy.blocks, list(linears))
    sizes = {group: sum(linears[module].size for module in modules) for group, modules in groups.items()}
    fractions = measured_at(sparsity.zeros)
    measurements = measure_changes(
        inputs.model,
        list(_changes(groups, sizes, fractions, name, pruning)),
        inputs.batches,
        inputs.file,
        key=inputs.key,
        blocks=inputs.blocks,
        processes=task.output.processes,
        progress=task.progress,
    )
    chosen = choose(measurements, sizes, sparsity.zeros)
    by_module = {module: float(chosen.choice[group]) for group in groups for module in groups[group]}
    tried: dict[float, tuple[float, dict[str, float]]] = {}
    for part in BLENDS:
        blend = {
            name: sparsity.zeros + part * (fraction - sparsity.zeros) for name, fraction in by_module.items()
        }
        tried[part] = _kl(task, inputs, pruning, blend), blend
    best = min(tried, key=lambda part: tried[part][0])
    kl, same = tried[best][0], tried[0.0][0]
    task.progress.log(f"allocation: KL {kl:.4g}; with equal fractions {same:.4g}")
    report = {"predicted": chosen.loss, "gap": chosen.gap, "measurements": inputs.file.name}
    return tried[best][1], {"kl": kl, "kl_uniform": same, "blend": best, **report}


def measured_at(zeros: float) -> list[float]:
    """The fractions that are measured: tenths around the one asked for, 0.95 where it is near, and the one
    asked for where it lies beyond."""
    usual = [part for part in (*(tenth / 10 for tenth in range(1, 10)), 0.95) if abs(part - zeros) <= REACH]
    return sorted({*usual, zeros} if not usual[0] <= zeros <= usual[-1] else usual)


def choose(measurements: Sequence[Measurement], sizes: Mapping[str, int], zeros: float) -> Allocation:
    """The fraction of each group with the smallest summed KL.

    Args:
        measurements: at least one finite one for each group.
        sizes: number of weights by group.
        zeros: s.
    """
    curves: dict[str, dict[float, float]] = {group: {} for group in sizes}
    for measurement in measurements:
        if math.isfinite(measurement.kl):
            curves[measurement.group][float(measurement.option)] = max(measurement.kl, 1e-12)
    groups = {group: list(_options(curve, sizes[group])) for group, curve in curves.items()}
    total = sum(sizes.values())
    return allocate(groups, total - round(total * zeros))


def _options(curve: Mapping[float, float], size: int) -> Iterator[Option]:
    """The measured fractions of a group, and steps between them; bits are the weights that stay."""
    points = sorted(curve)
    for low, high in zip(points, points[1:] or points, strict=False):
        steps = max(round((high - low) / STEP), 1)
        for step in range(steps + (high == points[-1])):
            part = step / steps
            fraction = low + part * (high - low)
            loss = math.exp((1 - part) * math.log(curve[low]) + part * math.log(curve[high]))
            yield Option(f"{fraction:.4f}", size - round(size * fraction), loss)


def _pruning(task: PruneTask, inputs: SensitivityInputs, linears: Linears) -> tuple[str, Pruning]:
    """How weights are pruned for a measurement, and its name."""
    if task.settings.method == "magnitude":
        return "magnitude", lambda module, fraction: partial(_by_magnitude, amount=Sparsity(fraction))
    norms = _norms(inputs, linears)
    by_row = task.options.by_row
    name = "wanda by row" if by_row else "wanda by layer"
    return name, lambda module, fraction: partial(
        _by_wanda, norms=norms[module], amount=Sparsity(fraction), by_row=by_row
    )


def _norms(inputs: SensitivityInputs, linears: Linears) -> dict[str, Tensor]:
    """||X_j||_2 (K,) of each layer's inputs in the dense model."""
    widths = {name: linear.shape[1] for name, linear in linears.items()}
    accumulators, hooks = observe_norms(inputs.model, widths)
    with torch.no_grad():
        for batch in inputs.batches:
            inputs.model(input_ids=batch.to(inputs.model.device))
    for hook in hooks:
        hook.remove()
    return {name: accumulator.value() for name, accumulator in accumulators.items()}


def _by_magnitude(weight: Tensor, amount: Sparsity) -> Tensor:
    return weight.masked_fill(~amount.mask(magnitude_scores(weight)), 0.0)


def _by_wanda(weight: Tensor, norms: Tensor, amount: Sparsity, by_row: bool) -> Tensor:
    return weight.masked_fill(~amount.mask(wanda_scores(weight, norms), by_row=by_row), 0.0)


def _changes(
    groups: Mapping[str, Sequence[str]],
    sizes: Mapping[str, int],
    fractions: Sequence[float],
    name: str,
    pruning: Pruning,
) -> Iterator[WeightChange]:
    for group, modules in groups.items():
        for fraction in fractions:
            kept = sizes[group] - round(sizes[group] * fraction)
            definition = f"zeros by {name}, {fraction:g}"
            blank = Measurement(
                group, tuple(modules), f"{fraction:g}", definition, kept, sizes[group], 0.0, 0.0
            )
            yield WeightChange(blank, {module: pruning(module, fraction) for module in modules})


def _kl(
    task: PruneTask, inputs: SensitivityInputs, pruning: Pruning, fractions: Mapping[str, float]
) -> float:
    """KL of the model with all layers pruned at once."""
    work = task.output.work / "sensitivity"
    with (
        reference_of(inputs.model, (), inputs.batches, inputs.key.precision, MEMORY, work) as reference,
        changed(inputs.model, {name: pruning(name, part) for name, part in fractions.items()}),
    ):
        return reference.kl()
