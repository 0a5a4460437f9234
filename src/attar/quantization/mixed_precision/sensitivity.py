"""How sensitive a model is to the quantization of each part: the KL of each group alone on each grid, as
sensitivity/weight_changes.py measures it.

Weights are rounded as the method will round them (rounded_options.py), or to nearest with scales searched for
the smallest squared error.
:func:`attar.quantization.mixed_precision.search.interaction` measures how far a whole mix is from the sum of
its groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from attar.checkpoint.processes import SINGLE_PROCESS, Processes
from attar.models.anatomy.parts import weight_of
from attar.progress import SILENT, Progress
from attar.quantization.grids import Grid, QuantizedTensor
from attar.quantization.grids.scales import choose_scales
from attar.sensitivity.measurements import Measurement, SensitivityKey
from attar.sensitivity.reference import MEMORY
from attar.sensitivity.weight_changes import NewWeight, WeightChange, changed, measure_changes

CandidateGrid = Callable[[torch.dtype], Grid]
"""A grid for weights of a storage type."""

RoundFunction = Callable[[str, Tensor, Grid], QuantizedTensor]
"""Rounds the weight (N, K) of a module on a grid."""


def nearest_mse(module: str, weight: Tensor, grid: Grid) -> QuantizedTensor:
    """Round to nearest, each tile's scale searched for the smallest squared error."""
    return grid.quantize(weight, choose_scales(weight, grid, how="mse"))


def falling(kl: float, error: float, others: Iterable[tuple[float, float]]) -> float:
    """The loss of an option in a model with other errors too: it falls at least as fast as the output error.

    In a dense model a group's KL is in proportion to its output error. In a mixture of experts a group alone
    also changes the choice of experts for some tokens, as often as its error is large, so that its KL falls
    with the root of the energy; but choices change by the errors of all groups together, which add up in
    quadrature, and there each group's part is in proportion to its energy again.

    Args:
        kl, error: of the group on one grid, as measured.
        others: of the same group on other grids; those with a larger error count.
    """
    return min([kl, *(loss * error / energy for loss, energy in others if energy > error > 0)])


def measure(
    model: nn.Module,
    groups: Mapping[str, Sequence[str]],
    candidates: Mapping[str, CandidateGrid],
    batches: Sequence[Tensor],
    file: Path,
    *,
    key: SensitivityKey,
    blocks: Sequence[str] = (),
    after_blocks: Sequence[str] = (),
    dtype: torch.dtype | None = None,
    fits: Callable[[Grid, tuple[int, int]], bool] = lambda grid, shape: True,
    rounding: RoundFunction = nearest_mse,
    memory: int = MEMORY,
    processes: Processes = SINGLE_PROCESS,
    progress: Progress = SILENT,
) -> list[Measurement]:
    """The sensitivity of every group to every candidate, group by group.

    Args:
        model, batches, file, key, blocks, after_blocks, memory, processes: as in
            :func:`attar.sensitivity.weight_changes.measure_changes`.
        groups: names of Linears (or Conv1D, or Embedding) by group.
        dtype: of the stored weights; None: as loaded.
        fits: whether a grid suits an (N, K) weight; a candidate is left out for a group where it does not.

    Raises:
        ModelError: the file belongs to another model or text.
        CheckpointError: the file is damaged.
        DataError: there are no batches.
    """
    return measure_changes(
        model,
        list(_changes(model, groups, candidates, dtype, fits, rounding)),
        batches,
        file,
        key=key,
        blocks=blocks,
        after_blocks=after_blocks,
        processes=processes,
        memory=memory,
        progress=progress,
    )


def _changes(
    model: nn.Module,
    groups: Mapping[str, Sequence[str]],
    candidates: Mapping[str, CandidateGrid],
    dtype: torch.dtype | None,
    fits: Callable[[Grid, tuple[int, int]], bool],
    rounding: RoundFunction,
) -> Iterator[WeightChange]:
    for group, modules in groups.items():
        weights = [weight_of(model.get_submodule(module)) for module in modules]
        shapes = [(int(weight.shape[0]), int(weight.shape[1])) for weight in weights]
        for name, candidate in candidates.items():
            grid = candidate(dtype or weights[0].dtype)
            if all(fits(grid, shape) for shape in shapes):
                bits = sum(round(grid.bits_per_weight(shape) * shape[0] * shape[1]) for shape in shapes)
                definition = f"{rounding.__name__} {grid!r}"
                count = sum(rows * columns for rows, columns in shapes)
                blank = Measurement(group, tuple(modules), name, definition, bits, count, 0.0, 0.0)
                yield WeightChange(blank, new_weights(dict.fromkeys(modules, grid), rounding))


def rounded(
    model: nn.Module, grids: Mapping[str, Grid], rounding: RoundFunction = nearest_mse
) -> AbstractContextManager[dict[str, list[float]]]:
    """Matrices on grids while the context lasts, see :func:`attar.sensitivity.weight_changes.changed`."""
    return changed(model, new_weights(grids, rounding))


def new_weights(grids: Mapping[str, Grid], rounding: RoundFunction) -> dict[str, NewWeight]:
    """What rounding makes of modules on grids."""

    def decoded(weight: Tensor, module: str, grid: Grid) -> Tensor:
        return rounding(module, weight, grid).dequantize()

    return {module: partial(decoded, module=module, grid=grid) for module, grid in grids.items()}
