"""Rounding one Linear at a time, as the sweep walk calls it: scales, the solver, refinement, zeros that stay,
and the report with round to nearest for comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attar.models.surgery.zeros import zero_mask
from attar.quantization.columns import RoundingResult
from attar.quantization.gates import code_numbers
from attar.quantization.grids import Grid, NVFP4Grid, QuantizedTensor, TileParameters, choose_scales
from attar.quantization.grids.real import RealGrid
from attar.quantization.hessian import (
    CrossHessian,
    Hessian,
    HessianFactor,
    energy,
    factorize_,
    order_by_energy,
)
from attar.quantization.methods.gptq import gptq
from attar.quantization.methods.qronos import least_squares_weight, qronos
from attar.quantization.methods.refine import refine
from attar.quantization.methods.refine_kronecker import refine_kronecker
from attar.quantization.methods.rtn import rtn
from attar.quantization.methods.yaqa import yaqa
from attar.quantization.quantization_method import QuantizationMethod
from attar.quantization.settings import AWQSettings, CorrectingSettings, GPTQSettings, SparseGPTQSettings
from attar.quantization.transforms.awq import search_clip
from attar.sparsity import Sparsity
from attar.walks.solvers import LinearSolver, Solution

DAMP_OUTPUT = 0.1  # yaqa: lambda of H_O
STACKED = 1 << 26  # weights that are rounded in one call, at most: their copies take memory


@dataclass(frozen=True)
class LayerSolver(LinearSolver):
    """Rounds each Linear on its grid.

    Attributes:
        grids: by module name.
        method: the rounding; see rounding.METHODS.
        keep_zeros: which weights that are zero stay zero; see attar.models.surgery.zeros.
        output_hessian: gives H_O (N, N) of a module, for yaqa.
    """

    grids: Mapping[str, Grid]
    method: QuantizationMethod
    settings: AWQSettings | GPTQSettings
    keep_zeros: str = "false"
    output_hessian: Callable[[str], Tensor] | None = None

    @property
    def original(self) -> bool:
        """Whether the solver compares with the original model's inputs."""
        return self.method.original_inputs

    @property
    def sparsity(self) -> Sparsity | None:
        """How many weights become zero; None: the method does not choose."""
        return self.settings.amount if isinstance(self.settings, SparseGPTQSettings) else None

    @property
    def neighbours(self) -> int:
        """Columns that stay together in any order: M of N:M."""
        return self.sparsity.of or 1 if self.sparsity is not None else 1

    def accumulator(self, names: Sequence[str], inputs: int) -> Hessian:
        """Empty statistics of a group."""
        return CrossHessian(inputs) if self.original else Hessian(inputs)

    def solve(self, weights: dict[str, Tensor], statistics: Hessian) -> dict[str, Solution]:
        """Round the weights (N, K) of Linears that read the same inputs.

        For act-order "group" the columns are sorted by H_ii first, so that columns of similar H_ii share a
        group.
        """
        H, order = statistics.final(), None
        sorted_H, sorted_statistics = H, statistics
        if self.settings.act_order == "group":
            order = order_by_energy(H.diagonal(), self.neighbours)
            sorted_H = H[order][:, order]
            if isinstance(statistics, CrossHessian):
                sorted_statistics = statistics.ordered(order)
        shared = self._shared(sorted_H, sorted_statistics)
        results: dict[str, RoundingResult] = {}
        for stack in self._stacks(weights, shared, order):
            if self.method.solver is None:
                results |= stack.split(RoundingResult(_nearest_codes(stack), 0.0))
            else:
                results |= stack.split(self.method.solver(**shared, **self._layer_arguments(stack)))
        shared.pop("factor", None)  # as large as H
        solutions: dict[str, Solution] = {}
        for name, weight in weights.items():
            sorted_weight = weight if order is None else weight[:, order]
            rounded = self._refined(sorted_weight, results.pop(name), shared)
            if order is not None:
                rounded = rounded.restored(order)
            solutions[name] = self._solution(weight, rounded, H, statistics)
        return solutions

    def units(self, names: list[str]) -> list[list[str]]:
        """Linears that stay in one process: Linears with one global scale (:func:`fused`)."""
        together = [name for name in names if isinstance(self.grids[name], NVFP4Grid)]
        alone = [[name] for name in names if name not in together]
        return [*alone, together] if together else alone

    def restore(self, name: str, tensors: dict[str, Tensor]) -> Tensor:
        """The weight (N, K) of stored codes."""
        return QuantizedTensor.from_tensors(self.grids[name], tensors).dequantize()

    def _shared(self, H: Tensor, statistics: Hessian) -> dict[str, Any]:
        """The solver's arguments that are the same for all Linears of a group."""
        if self.method.solver is None:
            return {"H": H}
        assert isinstance(self.settings, GPTQSettings)
        damp, act_order = self.settings.damp, self.settings.act_order != "off"
        factor = factorize_(H, damp, act_order, self.neighbours)
        shared = {"H": H, "damp": damp, "act_order": act_order, "factor": factor}
        if self.sparsity is not None:
            shared["sparsity"] = self.sparsity
        if isinstance(statistics, CrossHessian):
            assert isinstance(self.settings, CorrectingSettings)
            shared["cross"] = statistics.cross().lerp_(H, 1.0 - self.settings.correct)
        return shared

    def _layer_arguments(self, stack: StackedLayers) -> dict[str, Any]:
        """The solver's arguments of one stack."""
        weight, grid, parameters, mask = stack.joined()
        arguments = {"weight": weight, "grid": grid, "parameters": parameters, "mask": mask}
        if self.output_hessian is None:
            return arguments
        assert isinstance(self.settings, GPTQSettings)
        (name,) = stack.weights
        return arguments | {"output_hessian": self.output_hessian(name), "sweeps": self.settings.refine}

    def _stacks(
        self, weights: Mapping[str, Tensor], shared: Mapping[str, Any], order: Tensor | None
    ) -> Iterator[StackedLayers]:
        """The weights that are rounded in one call: weights on one grid, where the method allows it. Each
        weight loses its own fraction."""
        stacked = self.method.stacked and (self.sparsity is None or bool(self.sparsity.of))
        for grid in dict.fromkeys(self.grids[name] for name in weights):
            names = [name for name in weights if self.grids[name] == grid]
            shared_grid = fused(grid, [weights[name] for name in names])
            few = sum(weights[name].numel() for name in names) <= STACKED
            for group in [names] if stacked and few else [[name] for name in names]:
                columns = {
                    name: weights[name] if order is None else weights[name][:, order] for name in group
                }
                masks = {name: zero_mask(weight, self.keep_zeros) for name, weight in columns.items()}
                scales = {
                    name: self._parameters(weight, shared_grid, shared, masks[name])
                    for name, weight in columns.items()
                }
                yield StackedLayers(shared_grid, columns, scales, masks)

    def _refined(self, weight: Tensor, rounded: RoundingResult, shared: Mapping[str, Any]) -> RoundingResult:
        """Codes after coordinate descent, for methods that have it."""
        if not self.method.refined or not isinstance(self.settings, GPTQSettings) or not self.settings.refine:
            return rounded
        target = weight @ shared["cross"] if "cross" in shared else None
        refined = refine(
            rounded.quantized,
            shared["H"],
            target,
            sweeps=self.settings.refine,
            damp=self.settings.damp,
            weight=weight,
            mask=zero_mask(weight, self.keep_zeros) if rounded.mask is None else rounded.mask,
        )
        return replace(rounded, quantized=refined)

    def _parameters(
        self, weight: Tensor, grid: Grid, shared: Mapping[str, Any], mask: Tensor | None
    ) -> TileParameters:
        """Scales for the weight; where weights become zero, for what a first pass without codes leaves."""
        H = shared["H"]
        if self.sparsity is not None:
            weight = gptq(weight, grid=RealGrid(), mask=mask, **shared).quantized.codes
        how = scale_choice(self.method, self.settings.scales, grid)
        if how == "output" and not grid.searches:
            return grid.choose(weight, search_clip(weight, H, grid).shrink)
        return choose_scales(weight, grid, "mse" if how == "output" else how, H.diagonal())

    def _solution(self, weight: Tensor, rounded: RoundingResult, H: Tensor, statistics: Hessian) -> Solution:
        quantized, total = rounded.quantized, max(energy(weight, H), 1e-30)
        kept = weight if rounded.mask is None else weight.masked_fill(~rounded.mask, 0.0)
        rtn_error = energy(weight, H, _nearest(kept, quantized)) / total
        dense = quantized.dequantize()
        report = {
            "error": energy(weight, H, dense) / total,
            "rtn_error": rtn_error,
            "damp": rounded.damp,
            "unseen": statistics.unseen,
            "tokens": statistics.tokens,
            **code_numbers(quantized, kept, dense),
        }
        if self.sparsity is not None:
            report["sparsity"] = float((dense == 0).float().mean())
        return Solution(dense, quantized.tensors(), report)


@dataclass(frozen=True)
class StackedLayers:
    """Weights with the same inputs on one grid, rounded in one call.

    Attributes:
        weights: (N, K) by name.
        parameters: of each.
        masks: bool (N, K), False where a weight stays zero; None: no such weight.
    """

    grid: Grid
    weights: dict[str, Tensor]
    parameters: dict[str, TileParameters]
    masks: dict[str, Tensor | None]

    def joined(self) -> tuple[Tensor, Grid, TileParameters, Tensor | None]:
        """Weight, grid, parameters and mask of all rows; several weights have parameters by row."""
        weights, masks = list(self.weights.values()), list(self.masks.values())
        parameters = list(self.parameters.values())
        if len(weights) == 1:
            return weights[0], self.grid, parameters[0], masks[0]
        grid = self.grid if self.grid.rows == 1 else replace(self.grid, rows=1)  # type: ignore[type-var]
        rows = [self.grid.by_row(tiled, len(W)) for tiled, W in zip(parameters, weights, strict=True)]
        mask = None
        if any(mask is not None for mask in masks):
            pairs = zip(masks, weights, strict=True)
            mask = torch.cat(
                [torch.ones_like(W, dtype=torch.bool) if mask is None else mask for mask, W in pairs]
            )
        return torch.cat([W.float() for W in weights]), grid, _joined_parameters(rows), mask

    def split(self, result: RoundingResult) -> Iterator[tuple[str, RoundingResult]]:
        """The result of each weight."""
        if len(self.weights) == 1:
            yield next(iter(self.weights)), result
            return
        start = 0
        for name, parameters in self.parameters.items():
            rows = slice(start, start + len(self.weights[name]))
            codes = result.quantized.codes[rows].contiguous()
            mask = None if result.mask is None else result.mask[rows]
            yield name, replace(result, quantized=QuantizedTensor(self.grid, codes, parameters), mask=mask)
            start = rows.stop


def _joined_parameters(rows: Sequence[TileParameters]) -> TileParameters:
    """Parameters of several weights, one under the other."""

    def joined(values: list[Tensor | None]) -> Tensor | None:
        return None if values[0] is None else torch.cat([value for value in values if value is not None])

    scale = torch.cat([tiled.scale for tiled in rows])
    return TileParameters(
        scale, joined([tiled.zero for tiled in rows]), joined([tiled.minimum for tiled in rows])
    )


def solve_yaqa(
    weight: Tensor,
    H: Tensor,
    cross: Tensor,
    grid: Grid,
    *,
    parameters: TileParameters,
    damp: float,
    act_order: bool,
    mask: Tensor | None,
    factor: HessianFactor,
    output_hessian: Tensor,
    sweeps: int,
) -> RoundingResult:
    """YAQA towards the least-squares weight after quantized layers, with the scales of refined Qronos codes;
    its codes are refined in turn.

    Args:
        weight, H, cross, grid, parameters, damp, act_order, mask, factor: as in qronos.
        output_hessian: H_O (N, N).
        sweeps: passes of each refinement; 0: neither, the scales stay.
    """
    if sweeps:
        started = qronos(
            weight,
            H,
            cross,
            grid,
            parameters=parameters,
            damp=damp,
            mask=mask,
            factor=factor if act_order else None,
        )
        target = weight @ cross
        refined = refine(started.quantized, H, target, sweeps=sweeps, damp=damp, weight=weight, mask=mask)
        parameters = refined.parameters
    target = least_squares_weight(weight, H, cross, damp)
    rounded = yaqa(
        weight,
        output_hessian,
        H,
        grid,
        parameters=parameters,
        target=target,
        damp=damp,
        damp_output=DAMP_OUTPUT,
        act_order=act_order,
        mask=mask,
    )
    codes = refine_kronecker(
        rounded.quantized,
        output_hessian,
        H,
        target,
        sweeps=sweeps,
        damp=damp,
        damp_output=DAMP_OUTPUT,
        mask=mask,
    )
    return replace(rounded, quantized=codes)


def _nearest_codes(stack: StackedLayers) -> QuantizedTensor:
    """Round to nearest with the stack's parameters."""
    weight, grid, parameters, mask = stack.joined()
    quantized = rtn(weight, grid, parameters)
    return quantized if mask is None else masked(quantized, mask)


def _nearest(weight: Tensor, quantized: QuantizedTensor) -> Tensor:
    """The weight rounded to nearest; on a grid that searches for its scales with the given ones."""
    grid = quantized.grid
    return rtn(weight, grid, quantized.parameters if grid.searches else None).dequantize()


def fused(grid: Grid, weights: Iterable[Tensor]) -> Grid:
    """The grid for weights that engines run as one matrix: NVFP4 has one global scale for all of them."""
    if not isinstance(grid, NVFP4Grid):
        return grid
    return replace(grid, peak=max(grid.peak, *(float(weight.abs().max()) for weight in weights)))


def scale_choice(method: QuantizationMethod, scales: str, grid: Grid) -> str:
    """How scales are chosen on a grid; "auto" searches where the method sees data and bits are few."""
    if scales != "auto":
        return scales
    return "output" if grid.bits_per_weight((4096, 4096)) < method.search_below else "absmax"


def masked(quantized: QuantizedTensor, mask: Tensor) -> QuantizedTensor:
    """The same codes with the code nearest to zero where the mask is False."""
    zero = quantized.grid.quantize(torch.zeros(mask.shape, device=mask.device), quantized.parameters)
    codes = torch.where(mask, quantized.codes.float(), zero.codes.float()).to(quantized.codes.dtype)
    return QuantizedTensor(quantized.grid, codes, quantized.parameters, quantized.g_idx)
