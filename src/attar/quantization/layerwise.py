"""The roundings that work on one Linear at a time, as the sweep walk calls them.

Here a method's name meets its solver; what the solvers have in common (scales, refinement, zeros that stay,
the report with round to nearest beside) is done once, around them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attar.quantization.gates import code_numbers
from attar.quantization.grids import Grid, NVFP4Grid, QuantizedTensor, TileParameters, choose_scales
from attar.quantization.hessian import CrossHessian, Hessian, energy
from attar.quantization.methods.gptaq import gptaq
from attar.quantization.methods.gptq import HessianFactor, factorize, gptq_shared
from attar.quantization.methods.qronos import least_squares_weight, qronos
from attar.quantization.methods.refine import refine
from attar.quantization.methods.rtn import rtn
from attar.quantization.methods.yaqa import yaqa
from attar.quantization.plan import LayerPlan
from attar.quantization.rounded import RoundingResult
from attar.quantization.settings import QuantizeSettings
from attar.quantization.transforms.awq import search_clip
from attar.walks.sweep import Solution

ASYMMETRIC = ("gptaq", "qronos", "yaqa")
DAMP_OUTPUT = 0.1  # yaqa: lambda of H_O
SEARCH_BELOW = 5.0  # bits a weight under which a searched scale pays


@dataclass(frozen=True)
class LayerSolver:
    """Rounds each Linear on its grid by the settings' method.

    Attributes:
        sites: by module name.
        settings: the method and its numbers.
        curvature: gives H_O (N, N) of a module, for yaqa.
    """

    sites: Mapping[str, LayerPlan]
    settings: QuantizeSettings
    curvature: Callable[[str], Tensor] | None = None

    @property
    def original(self) -> bool:
        """The asymmetric methods compare with the original model's inputs."""
        return self.settings.rounding in ASYMMETRIC

    def accumulator(self, names: Sequence[str], inputs: int) -> Hessian:
        """Empty statistics of a group."""
        return CrossHessian(inputs) if self.original else Hessian(inputs)

    def solve(self, weights: dict[str, Tensor], seen: Hessian) -> dict[str, Solution]:
        """Round the weights (N, K) of a group; those on one grid share the work."""
        H, order = seen.value(), None
        if self.settings.act_order == "group":
            order = torch.argsort(H.diagonal(), descending=True, stable=True)
        sorted_H, sorted_seen = (H, seen) if order is None else (H[order][:, order], seen.ordered(order))
        inputs = self._factorized(sorted_H)
        solved: dict[str, Solution] = {}
        for grid in dict.fromkeys(self.sites[name].grid for name in weights):
            part = {name: weights[name] for name in weights if self.sites[name].grid == grid}
            columns = part if order is None else {name: weight[:, order] for name, weight in part.items()}
            made = self._round(columns, fused(grid, part.values()), sorted_H, sorted_seen, inputs)
            for name, rounded in made.items():
                if order is not None:
                    rounded = replace(rounded, quantized=rounded.quantized.restored(order))
                solved[name] = self._solution(weights[name], rounded, H, seen)
        return solved

    def _factorized(self, H: Tensor) -> HessianFactor | None:
        """H's factor, once for all grids of a group."""
        if self.settings.rounding != "gptq":
            return None
        return factorize(H, self.settings.damp, self.settings.act_order != "off")

    def restore(self, name: str, tensors: dict[str, Tensor]) -> Tensor:
        """The weight (N, K) that stored codes stand for."""
        return QuantizedTensor.from_tensors(self.sites[name].grid, tensors).dequantize()

    def _round(
        self,
        weights: Mapping[str, Tensor],
        grid: Grid,
        H: Tensor,
        seen: Hessian,
        inputs: HessianFactor | None,
    ) -> dict[str, RoundingResult]:
        """Round weights with one input; for act-order "group" their columns stand sorted by H_ii, so that
        every method forms its groups of columns that matter alike."""
        settings = self.settings
        masks = {name: mask_of(weight, settings.keep_zeros) for name, weight in weights.items()}
        if settings.rounding == "gptq":
            rounded = gptq_shared(
                list(weights.values()),
                H,
                grid,
                parameters=[self._parameters(weight, grid, H) for weight in weights.values()],
                masks=list(masks.values()),
                inputs=inputs,
            )
            made = dict(zip(weights, rounded, strict=True))
        else:
            made = {
                name: self._round_one(name, weight, grid, H, seen, masks[name])
                for name, weight in weights.items()
            }
        if settings.rounding == "yaqa":
            return made
        return {name: self._refined(weights[name], one, H, seen, masks[name]) for name, one in made.items()}

    def _round_one(
        self, name: str, weight: Tensor, grid: Grid, H: Tensor, seen: Hessian, mask: Tensor | None
    ) -> RoundingResult:
        settings, ordered = self.settings, self.settings.act_order != "off"
        parameters = self._parameters(weight, grid, H)
        if settings.rounding == "yaqa":
            assert self.curvature is not None and isinstance(seen, CrossHessian)
            if settings.refine:
                one = qronos(
                    weight, H, seen.cross(), grid, parameters=parameters, damp=settings.damp, mask=mask
                )
                one = self._refined(weight, one, H, seen, mask)
                parameters = one.quantized.parameters
            return yaqa(
                weight,
                self.curvature(name),
                H,
                grid,
                parameters=parameters,
                target=least_squares_weight(weight, H, seen.cross(), settings.damp),
                damp=settings.damp,
                damp_output=DAMP_OUTPUT,
                act_order=ordered,
                mask=mask,
            )
        if settings.rounding in ASYMMETRIC:
            assert isinstance(seen, CrossHessian)
            solver = gptaq if settings.rounding == "gptaq" else qronos
            return solver(
                weight,
                H,
                seen.cross(),
                grid,
                parameters=parameters,
                damp=settings.damp,
                act_order=ordered,
                mask=mask,
            )
        nearest = rtn(weight, grid, parameters)
        return RoundingResult(nearest if mask is None else masked(nearest, mask), 0.0, 0)

    def _refined(
        self, weight: Tensor, rounded: RoundingResult, H: Tensor, seen: Hessian, mask: Tensor | None
    ) -> RoundingResult:
        settings = self.settings
        quantized = rounded.quantized
        if not settings.refine or settings.rounding not in ("gptq", *ASYMMETRIC):
            return rounded
        target = weight @ seen.cross() if isinstance(seen, CrossHessian) else None
        better = refine(
            quantized, H, target, sweeps=settings.refine, damp=settings.damp, weight=weight, mask=mask
        )
        return RoundingResult(better, rounded.damp, rounded.dead)

    def _parameters(self, weight: Tensor, grid: Grid, H: Tensor) -> TileParameters:
        how = scale_choice(self.settings, grid)
        if how == "output" and not grid.searches:
            return grid.choose(weight, search_clip(weight, H, grid).shrink)
        return choose_scales(weight, grid, "mse" if how == "output" else how, H.diagonal())

    def _solution(self, weight: Tensor, rounded: RoundingResult, H: Tensor, seen: Hessian) -> Solution:
        quantized, whole = rounded.quantized, max(energy(weight, H), 1e-30)
        dense, nearest = quantized.dequantize(), _nearest(weight, quantized)
        report = {
            "error": energy(weight - dense, H) / whole,
            "rtn_error": energy(weight - nearest, H) / whole,
            "damp": rounded.damp,
            "dead": rounded.dead,
            "tokens": seen.tokens,
            **code_numbers(quantized, weight, dense),
        }
        return Solution(dense, quantized.tensors(), report)


def _nearest(weight: Tensor, quantized: QuantizedTensor) -> Tensor:
    """The weight rounded to nearest; on a grid that searches for its scales with those that are there."""
    grid = quantized.grid
    return rtn(weight, grid, quantized.parameters if grid.searches else None).dequantize()


def fused(grid: Grid, weights: Iterable[Tensor]) -> Grid:
    """The grid for weights that engines run as one matrix: NVFP4 has one global scale for all of them."""
    if not isinstance(grid, NVFP4Grid):
        return grid
    return replace(grid, peak=max(float(weight.abs().max()) for weight in weights))


def scale_choice(settings: QuantizeSettings, grid: Grid) -> str:
    """How scales are chosen on a grid: what the settings say, or for "auto" a search where few bits make it
    pay."""
    if settings.scales != "auto":
        return settings.scales
    if settings.method == "awq":
        return "output"
    few = grid.bits_per_weight((4096, 4096)) < SEARCH_BELOW
    return "output" if few and settings.rounding != "rtn" else "absmax"


def mask_of(weight: Tensor, keep_zeros: bool) -> Tensor | None:
    """bool (N, K), False where a pruned weight has to stay zero; None where nothing is kept."""
    return weight != 0 if keep_zeros and bool((weight == 0).any()) else None


def masked(quantized: QuantizedTensor, mask: Tensor) -> QuantizedTensor:
    """The same codes with the code nearest to zero where the mask is False."""
    zero = quantized.grid.quantize(torch.zeros(mask.shape, device=mask.device), quantized.parameters)
    codes = torch.where(mask, quantized.codes.float(), zero.codes.float()).to(quantized.codes.dtype)
    return QuantizedTensor(quantized.grid, codes, quantized.parameters, quantized.g_idx)
