"""Mixed precision: bits for each layer, chosen by the KL that rounding it alone costs the model."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attar.checkpoint.open import Checkpoint
from attar.checkpoint.processes import SINGLE_PROCESS, Processes
from attar.errors import ModelError, SettingsError
from attar.models.anatomy.parts import weight_of
from attar.models.loading.stored import stored_precision
from attar.progress import Progress
from attar.quantization.grids import Grid, IntGrid
from attar.quantization.mixed_precision.allocate import Option, allocate, frontier
from attar.quantization.mixed_precision.rounded_options import rounding_of
from attar.quantization.mixed_precision.sensitivity import (
    CandidateGrid,
    RoundFunction,
    falling,
    measure,
    nearest_mse,
    rounded,
)
from attar.quantization.plan import group_size, plan
from attar.quantization.settings import QuantizeSettings
from attar.sensitivity.measurements import Measurement
from attar.sensitivity.reference import MEMORY, reference_of
from attar.sensitivity.weight_changes import load_inputs, shared_groups


def choose_bits(
    checkpoint: Checkpoint,
    settings: QuantizeSettings,
    work: Path,
    progress: Progress,
    processes: Processes = SINGLE_PROCESS,
) -> tuple[dict[str, str], dict[str, Any]]:
    """The scheme of each Linear under the average bits of the settings. Returns scheme by module name, and
    for the card: the mix, its predicted and measured KL, the trade-off curve.

    Args:
        processes: they share the measurements.

    Raises:
        SettingsError: not even the smallest candidates fit the budget.
    """
    storage = settings.storage
    layers = {layer.module: layer for layer in plan(checkpoint, storage).sites.values()}
    shapes = {name: layer.shape for name, layer in layers.items()}
    dtype = stored_precision(checkpoint)
    candidates = integer_candidates(group_size(shapes, storage.group_size))
    inputs = load_inputs(checkpoint, settings)
    groups = shared_groups(
        inputs.anatomy.blocks,
        list(layers),
        apart=storage.moe_schemes == "apart",
        qkv=storage.qkv == "together",
    )
    with rounding_of(
        checkpoint,
        groups,
        candidates,
        settings.method,
        settings,
        fits=_fits,
        dtype=dtype,
        processes=processes,
        progress=progress,
    ) as rounding:
        measurements = measure(
            inputs.model,
            groups,
            candidates,
            inputs.batches,
            inputs.file,
            key=inputs.key,
            blocks=inputs.blocks,
            dtype=dtype,
            fits=_fits,
            rounding=rounding,
            processes=processes,
            progress=progress,
        )
        chosen = mix(with_falling(measurements), shapes, storage.bits)
        measured = interaction(
            inputs.model,
            chosen.schemes,
            chosen.kl,
            candidates,
            inputs.batches,
            work / "interaction",
            dtype=dtype,
            rounding=rounding,
        )
    report = {
        "bits_per_weight": chosen.bits_per_weight,
        "gap": chosen.gap,
        **asdict(measured),
        "curve": [list(point) for point in chosen.curve],
        "schemes": chosen.schemes,
        "measurements": inputs.file.name,
    }
    return chosen.schemes, report


def integer_candidates(group_size: int) -> dict[str, CandidateGrid]:
    """W2A16 to W8A16 at one group size."""

    def grid(bits: int) -> CandidateGrid:
        return lambda storage: IntGrid(bits, group_size, True, storage)

    return {f"W{bits}A16": grid(bits) for bits in (2, 3, 4, 5, 6, 8)}


def _fits(grid: Grid, shape: tuple[int, int]) -> bool:
    return not grid.group_size or shape[1] % grid.group_size == 0


@dataclass(frozen=True)
class SchemeMix:
    """A scheme for every module under a budget.

    Attributes:
        schemes: candidate's name by module.
        kl: the sum of the groups' KLs, nats a token: the predicted KL of the mix.
        gap: no mix within the budget has a sum below ``kl - gap``; 0: this is the best.
        bits: stored bits in all.
        bits_per_weight: the same for each weight.
        curve: (bits per weight, summed KL) from the smallest mix to the best, for the report.
    """

    schemes: dict[str, str]
    kl: float
    gap: float
    bits: int
    bits_per_weight: float
    curve: tuple[tuple[float, float], ...]


def mix(
    measurements: Sequence[Measurement], shapes: Mapping[str, tuple[int, int]], bits_per_weight: float
) -> SchemeMix:
    """The mix of the smallest summed KL whose stored bits, scales included, stay within the average.

    Args:
        measurements: of groups that cover the modules, each module in one group.
        shapes: (N, K) of every module that gets a scheme.
        bits_per_weight: the budget, over all these weights.

    Raises:
        ModelError: a module was not measured, or belongs to two groups.
        SettingsError: not even the smallest candidates fit; names the smallest possible average.
    """
    groups: dict[str, list[Option]] = {}
    members: dict[str, tuple[str, ...]] = {}
    for measurement in measurements:
        if all(name in shapes for name in measurement.modules):
            options = groups.setdefault(measurement.group, [])
            members[measurement.group] = measurement.modules
            if math.isfinite(measurement.kl):
                options.append(Option(measurement.option, measurement.bits, measurement.kl))
    _check_cover(members, shapes)
    groups = with_losses(groups)
    weights = sum(rows * columns for rows, columns in shapes.values())
    curve = tuple((point.bits / weights, point.loss) for point in frontier(groups))
    if curve[0][0] > bits_per_weight:
        least = math.ceil(curve[0][0] * 1000) / 1000
        raise SettingsError("bits", bits_per_weight, f"at least {least:g}, scales included")
    chosen = allocate(groups, math.floor(bits_per_weight * weights))
    schemes = {name: chosen.choice[group] for group, names in members.items() for name in names}
    ordered = {name: schemes[name] for name in shapes}
    return SchemeMix(ordered, chosen.loss, chosen.gap, chosen.bits, chosen.bits / weights, curve)


def with_falling(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Measurements with the losses of :func:`falling`."""
    points: dict[str, list[tuple[float, float]]] = {}
    for row in measurements:
        points.setdefault(row.group, []).append((row.kl, row.output_error))
    return [replace(row, kl=falling(row.kl, row.output_error, points[row.group])) for row in measurements]


def with_losses(groups: Mapping[str, list[Option]]) -> dict[str, list[Option]]:
    """The groups, with a loss for groups that seem to cost nothing in any format.

    The measured text never switched on their inputs, which says nothing of other text: each of their options
    has its median cost over the other groups.
    """
    informed = [options for options in groups.values() if any(option.loss > 0 for option in options)]
    losses: dict[str, list[float]] = {}
    for option in (option for options in informed for option in options):
        losses.setdefault(option.name, []).append(option.loss)
    medians = {name: statistics.median(values) for name, values in losses.items()}
    return {
        group: options
        if any(options is group for group in informed)
        else [replace(option, loss=medians.get(option.name, option.loss)) for option in options]
        for group, options in groups.items()
    }


def _check_cover(members: Mapping[str, tuple[str, ...]], shapes: Mapping[str, Any]) -> None:
    owners: dict[str, list[str]] = {name: [] for name in shapes}
    for group, names in members.items():
        for name in names:
            owners[name].append(group)
    for name, groups in owners.items():
        if len(groups) != 1:
            what = f"is in the groups {' and '.join(groups)}" if groups else "was not measured"
            raise ModelError(f"{name} {what}", hint="measure groups that hold each Linear once")


@dataclass(frozen=True)
class Interaction:
    """How well the sum of the groups' KLs predicts the KL of their mix.

    Attributes:
        predicted: the sum.
        measured: the KL of the model with all groups rounded at once, in the same way on the same text.
    """

    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        """Measured over predicted: above 1 the groups' errors reinforce each other."""
        return self.measured / max(self.predicted, 1e-30)


def interaction(
    model: nn.Module,
    schemes: Mapping[str, str],
    predicted: float,
    candidates: Mapping[str, CandidateGrid],
    batches: Sequence[Tensor],
    work: Path,
    *,
    dtype: torch.dtype | None = None,
    rounding: RoundFunction = nearest_mse,
) -> Interaction:
    """Measure a mix as a whole, as :func:`measure` measures its groups one by one; same arguments.

    Args:
        schemes: candidate's name by module.
        predicted: the sum of the groups' KLs.
        work: folder for what does not fit in memory; removed afterwards.
    """
    grids = {
        name: candidates[scheme](dtype or weight_of(model.get_submodule(name)).dtype)
        for name, scheme in schemes.items()
    }
    with (
        reference_of(model, (), batches, "fp32", MEMORY, work) as reference,
        rounded(model, grids, rounding),
    ):
        return Interaction(predicted, reference.kl())
