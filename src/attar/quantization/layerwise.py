"""The roundings that work on one Linear at a time, as the sweep walk calls them.

Here a method's name meets its solver; what the solvers have in common (scales, masks, static activation
ranges, the report with round to nearest beside) is done once, around them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attar.quantization.gptaq import gptaq
from attar.quantization.gptq import Rounded, gptq_shared
from attar.quantization.grids import Grid, Parameters, Quantized
from attar.quantization.grids.scales import choose_scales
from attar.quantization.hessian import CrossHessian, Hessian, output_error
from attar.quantization.qronos import qronos
from attar.quantization.ranges import ActivationRange
from attar.quantization.rtn import rtn
from attar.quantization.scheme import Site
from attar.quantization.settings import QuantizeSettings
from attar.quantization.yaqa import yaqa
from attar.walks.sweep import Solution

ASYMMETRIC = ("gptaq", "qronos")


@dataclass
class Seen:
    """What a group of Linears has been fed.

    Attributes:
        hessian: H, with C for the asymmetric methods.
        ranges: of inputs that are quantized with a static scale, by module name.
    """

    hessian: Hessian
    ranges: dict[str, ActivationRange]

    def add(self, x: Tensor, original: Tensor | None = None) -> None:
        """Inputs (B, S, K) behind the quantized prefix, and in the original model."""
        if isinstance(self.hessian, CrossHessian):
            self.hessian.add(x, original)
        else:
            self.hessian.add(x)
        for found in self.ranges.values():
            found.add(x)


@dataclass(frozen=True)
class LayerSolver:
    """Rounds each Linear on its grid by the settings' method.

    Attributes:
        sites: by module name.
        settings: the method and its numbers.
        curvature: H_O and H_I of the whole model's KL by module name, for yaqa.
    """

    sites: Mapping[str, Site]
    settings: QuantizeSettings
    curvature: Mapping[str, Any] = field(default_factory=dict)

    @property
    def original(self) -> bool:
        """The asymmetric methods compare with the original model's inputs."""
        return self.settings.rounding in ASYMMETRIC

    def accumulator(self, names: Sequence[str], inputs: int) -> Seen:
        """Empty statistics of a group."""
        ranges = {
            name: ActivationRange(rule)
            for name in names
            if (rule := self.sites[name].scheme.activations) is not None and not rule.dynamic
        }
        return Seen(CrossHessian(inputs) if self.original else Hessian(inputs), ranges)

    def solve(self, weights: dict[str, Tensor], seen: Seen) -> dict[str, Solution]:
        """Round the weights (N, K) of a group; those on one grid share the work."""
        H = seen.hessian.value()
        solved: dict[str, Solution] = {}
        for grid in dict.fromkeys(self.sites[name].grid for name in weights):
            part = {name: weights[name] for name in weights if self.sites[name].grid == grid}
            for name, rounded in self._round(part, grid, H, seen).items():
                solved[name] = self._solution(name, weights[name], rounded, H, seen)
        return solved

    def restore(self, name: str, tensors: dict[str, Tensor]) -> Tensor:
        """The weight (N, K) that stored codes stand for."""
        return Quantized.from_tensors(self.sites[name].grid, tensors).dequantize()

    def _round(self, weights: Mapping[str, Tensor], grid: Grid, H: Tensor, seen: Seen) -> dict[str, Rounded]:
        settings = self.settings
        masks = {name: mask_of(weight, settings.keep_zeros) for name, weight in weights.items()}
        parameters = {
            name: None if settings.act_order == "group" else self._parameters(weight, grid, H)
            for name, weight in weights.items()
        }
        if settings.rounding == "gptq":
            rounded = gptq_shared(
                list(weights.values()),
                H,
                grid,
                parameters=list(parameters.values()),
                damp=settings.damp,
                act_order=settings.act_order,
                masks=list(masks.values()),
            )
            return dict(zip(weights, rounded, strict=True))
        made = {}
        for name, weight in weights.items():
            made[name] = self._round_one(name, weight, grid, H, seen, parameters[name])
            if (mask := masks[name]) is not None:
                made[name] = Rounded(masked(made[name].quantized, mask), made[name].damp, made[name].dead)
        return made

    def _round_one(
        self, name: str, weight: Tensor, grid: Grid, H: Tensor, seen: Seen, parameters: Parameters | None
    ) -> Rounded:
        settings = self.settings
        if settings.rounding in ASYMMETRIC:
            assert isinstance(seen.hessian, CrossHessian)
            solver = gptaq if settings.rounding == "gptaq" else qronos
            made = solver(
                weight,
                H,
                seen.hessian.cross(),
                grid,
                parameters=parameters,
                damp=settings.damp,
                act_order=settings.act_order != "off",
            )
        elif settings.rounding == "yaqa":
            factors = self.curvature[name]
            made = yaqa(
                weight, factors.output, factors.input, grid, parameters=parameters, damp=settings.damp
            )
        else:
            return Rounded(rtn(weight, grid, parameters), 0.0, 0)
        return Rounded(made.quantized, made.damp, made.dead)

    def _parameters(self, weight: Tensor, grid: Grid, H: Tensor) -> Parameters:
        return choose_scales(weight, grid, how=scale_choice(self.settings, grid), importance=H.diagonal())

    def _solution(self, name: str, weight: Tensor, rounded: Rounded, H: Tensor, seen: Seen) -> Solution:
        dense = rounded.quantized.dequantize()
        grid = self.sites[name].grid
        report = {
            "error": output_error(weight, dense, H),
            "rtn_error": output_error(weight, rtn(weight, grid).dequantize(), H),
            "damp": rounded.damp,
            "dead": rounded.dead,
            "tokens": seen.hessian.tokens,
        }
        tensors = rounded.quantized.tensors()
        if name in seen.ranges:
            tensors["input_scale"] = seen.ranges[name].scale()
        return Solution(dense, tensors, report)


def scale_choice(settings: QuantizeSettings, grid: Grid) -> str:
    """How scales are chosen on a grid: what the settings say, or for "auto" a search where few bits make it
    pay."""
    if settings.scales != "auto":
        return settings.scales
    levels = grid.bits_per_weight((4096, 4096))
    return "mse" if settings.method not in ("rtn", "smoothquant") and levels < 5 else "absmax"


def mask_of(weight: Tensor, keep_zeros: bool) -> Tensor | None:
    """bool (N, K), False where a pruned weight has to stay zero; None where nothing is kept."""
    return weight != 0 if keep_zeros and bool((weight == 0).any()) else None


def masked(quantized: Quantized, mask: Tensor) -> Quantized:
    """The same codes with the code nearest to zero where the mask is False."""
    zero = quantized.grid.quantize(torch.zeros_like(mask, dtype=torch.float32), quantized.parameters)
    codes = torch.where(mask, quantized.codes.float(), zero.codes.float()).to(quantized.codes.dtype)
    return Quantized(quantized.grid, codes, quantized.parameters, quantized.g_idx)
