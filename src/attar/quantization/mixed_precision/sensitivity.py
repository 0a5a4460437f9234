"""How sensitive a model is to the quantization of each part, measured once.

    kl[g, c] = mean over tokens of KL(p || p_gc)      p the model; p_gc the model with group g alone on grid c

Letters: g a group of matrices that share a scheme: Linears, or the embedding; c a candidate grid; W (N, K)
weight; x (K,) its input (of an embedding, the unit vector of a token). An embedding that is the head too is
measured as one, in both uses at once.

Weights are rounded to nearest with scales searched for the smallest squared error: a better rounding improves
every grid, so the order of the grids holds. The sum of the groups' KLs approximates the KL of the whole mix
(Taylor's second order without its mixed terms; it fails when a few groups at few bits dominate);
:func:`attar.quantization.mixed_precision.mixture.interaction` measures the difference for one mix.

The file (measurements.py) is replaced after every measurement: a killed run resumes after the last one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attar.errors import DataError
from attar.models.parts import weight_of
from attar.progress import SILENT, Progress
from attar.quantization.grids import Grid, QuantizedTensor
from attar.quantization.grids.scales import choose_scales
from attar.quantization.mixed_precision.measurements import Measurement, SensitivityKey, read, write
from attar.walks.reference import MEMORY, ReferenceModel, reference_of

CandidateGrid = Callable[[torch.dtype], Grid]
"""A grid for weights of a storage type."""

RoundFunction = Callable[[Tensor, Grid], QuantizedTensor]
"""Rounds a weight (N, K) on a grid."""


def shared_groups(blocks: Sequence[Any], modules: Sequence[str]) -> dict[str, list[str]]:
    """Linears that must share a scheme, because runtimes fuse them: q, k and v; gate and up. Returns modules
    by group, in the order of the blocks; a group is named after its modules.

    Args:
        blocks: those of an Anatomy.
        modules: names of the Linears that will be quantized.
    """
    groups: dict[str, list[str]] = {}
    for block in blocks:
        attention, mlp = block.attention, block.mlp
        families = [[attention.q, attention.k, attention.v], [mlp.gate, mlp.up]]
        together = [[part.name for part in family if part is not None] for family in families]
        done: dict[str, None] = {}
        for name in block.linears:
            mates = next((family for family in together if name in family), [name])
            members = [mate for mate in dict.fromkeys(mates) if mate in modules and mate not in done]
            if members:
                done.update(dict.fromkeys(members))
                leaves = "+".join(member.rpartition(".")[2] for member in members)
                groups[".".join(filter(None, [members[0].rpartition(".")[0], leaves]))] = members
    return groups


def nearest_mse(weight: Tensor, grid: Grid) -> QuantizedTensor:
    """Round to nearest, each tile's scale searched for the smallest squared error."""
    return grid.quantize(weight, choose_scales(weight, grid, how="mse"))


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
    progress: Progress = SILENT,
) -> list[Measurement]:
    """The sensitivity of every group to every candidate; what the file holds is not measured again. Returns
    the measurements of these groups and candidates, group by group.

    Args:
        model: loaded dense, in evaluation mode. Its weights are changed while this runs and restored to the
            same bytes afterwards, also after an error.
        groups: names of Linears (or Conv1D, or Embedding) by group.
        batches: int64 (B, S), none padded.
        file: of the measurements; may not exist yet.
        key: of the measurements; must be the file's.
        blocks: names of the model's blocks in order. With them only the part of the model from the group's
            block on is run, which gives the same numbers in about half the time.
        after_blocks: names of modules that run after the last block, such as an untied head; for them the
            blocks are not run at all.
        dtype: of the stored weights; None: that of the loaded ones.
        fits: whether a grid suits an (N, K) weight; a candidate is left out for a group where it does not.
        memory: bytes of reference logits kept in memory; more are spilled to disk.

    Raises:
        ModelError: the file belongs to another model or text.
        CheckpointError: the file is damaged.
        DataError: there are no batches.
    """
    if not batches:
        raise DataError("no text to measure sensitivities with", hint="more --samples")
    known = {one.identity: one for one in read(file, key)} if file.exists() else {}
    requests = list(_requests(model, groups, candidates, dtype, fits, rounding))
    todo = [request for request in requests if request.blank.identity not in known]
    done = len(requests) - len(todo)
    with progress.task("sensitivity", total=len(requests), done=done) as task:
        if todo:
            work = file.with_name(f".{file.name}.work")
            with reference_of(model, blocks, batches, key.precision, memory, work, after_blocks) as reference:
                for request in sorted(todo, key=lambda one: reference.first_block(one.blank.modules)):
                    measurement = _measure_one(reference, request, rounding)
                    known[measurement.identity] = measurement
                    write(file, key, list(known.values()))
                    task.advance(kl=measurement.kl)
    return [known[request.blank.identity] for request in requests]


@dataclass(frozen=True)
class _MeasurementRequest:
    """A measurement without its numbers, and the grid."""

    blank: Measurement
    grid: Grid


def _requests(
    model: nn.Module,
    groups: Mapping[str, Sequence[str]],
    candidates: Mapping[str, CandidateGrid],
    dtype: torch.dtype | None,
    fits: Callable[[Grid, tuple[int, int]], bool],
    rounding: RoundFunction,
) -> Iterator[_MeasurementRequest]:
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
                yield _MeasurementRequest(blank, grid)


def _measure_one(
    reference: ReferenceModel, request: _MeasurementRequest, rounding: RoundFunction
) -> Measurement:
    """One measurement: the group rounded, the rest of the model run, the weights put back."""
    modules = request.blank.modules
    reference.move(reference.first_block(modules))
    with rounded(reference.model, dict.fromkeys(modules, request.grid), rounding) as energy:
        kl = reference.kl()
    lost, total = (sum(sums[part] for sums in energy.values()) for part in (0, 1))
    error = lost / max(total, 1e-30) if math.isfinite(lost) else math.inf
    return replace(request.blank, kl=kl, output_error=error)


@contextmanager
def rounded(
    model: nn.Module, grids: Mapping[str, Grid], rounding: RoundFunction = nearest_mse
) -> Iterator[dict[str, list[float]]]:
    """Matrices on grids for the length of the context; afterwards their weights are the same bytes as before.

    Yields:
        by module, the sums of ||(W - W') x||^2 and ||W x||^2 over its inputs x so far.
    """
    energy: dict[str, list[float]] = {name: [0.0, 0.0] for name in grids}
    with torch.no_grad(), ExitStack() as stack:
        for name, grid in grids.items():
            module = model.get_submodule(name)
            original = weight_of(module).clone()
            stack.callback(weight_of(module).copy_, original)
            weight_of(module).copy_(rounding(original, grid).dequantize().to(original.dtype))
            hook = module.register_forward_pre_hook(_error_hook(original, energy[name]))
            stack.callback(hook.remove)
        yield energy


def _error_hook(original: Tensor, energy: list[float]) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    """A hook that adds up the output error of a changed matrix."""

    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        W, changed = original.float(), weight_of(module).float()
        with torch.autocast(W.device.type, enabled=False):
            lost, output = (_output(module, args[0], weight) for weight in (W - changed, W))
            energy[0] += float(lost.square().sum(dtype=torch.float64))
            energy[1] += float(output.square().sum(dtype=torch.float64))

    return hook


def _output(module: nn.Module, x: Tensor, weight: Tensor) -> Tensor:
    """The output of a module with this weight, without bias: rows of an embedding, products otherwise."""
    return weight[x] if isinstance(module, nn.Embedding) else F.linear(x.flatten(0, -2).float(), weight)
