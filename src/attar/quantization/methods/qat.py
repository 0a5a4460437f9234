"""Quantization-aware training: the Linears of a model compute with quantized weights (and inputs) while the
train walk trains the underlying float weights, so that the result is what the packed checkpoint will compute.

    forward:   W' = s * (level(nearest(W / s + z)) - z) ,  x' likewise       lsq.py
    trained:   W and the scales ("weights"), or with the codes fixed the scales alone ("scales")

Letters as in lsq.py. Each scale is trained as a factor on its initial value: a vector (P * G,), initially 1.
One learning rate then fits all layers, and weight decay does not apply to it.

For the train walk the parametrized weights are ordinary parameters (``...parametrizations.weight.original``,
``...parametrizations.weight.0.factor``), so a killed run resumes from the walk's saved states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from attar.errors import ModelError, SettingsError
from attar.formats.rules import ActivationRule
from attar.models.fake_quant import quantize_activation as round_activation
from attar.progress import SILENT, Progress
from attar.quantization.calibration import ActivationRange
from attar.quantization.grids import Grid, IntGrid, QuantizedTensor
from attar.quantization.grids.float8 import Float8Grid, MXFP8Grid
from attar.quantization.grids.fp4 import MXFP4Grid
from attar.quantization.grids.straight_through import into_cells, limits, on_unit_scale, through
from attar.quantization.methods import lsq
from attar.walks.masks import Masks
from attar.walks.objectives import Loss, next_token
from attar.walks.settings import TrainSettings
from attar.walks.train import TrainHistory
from attar.walks.train import train as run

TRAINED = ("weights", "scales")
SMALLEST = 0.01  # lower bound of a factor
MARGIN = 0.1  # from a cell's edge to a weight moved into the cell of its code, in distances between levels
CALIBRATION = 8  # rows that initialize static activation scales


@dataclass(frozen=True)
class QATResult:
    """The result of quantization-aware training.

    Attributes:
        weights: codes and scales by module name.
        activations: ("scale", and "zero" where the rule is asymmetric) of each static rule, scalars, by
            module name.
        dense: the other trained parameters, by their name in the model; empty without ``others``.
    """

    weights: dict[str, QuantizedTensor]
    activations: dict[str, dict[str, Tensor]]
    dense: dict[str, Tensor]
    history: TrainHistory = field(default_factory=TrainHistory)


def learn(
    model: nn.Module,
    grids: Mapping[str, Grid],
    activations: Mapping[str, ActivationRule] | None,
    rows: Tensor,
    settings: TrainSettings,
    *,
    loss: Loss = next_token,
    train: str = "weights",
    others: bool = False,
    work: Path | None = None,
    held_out: Callable[[nn.Module], float] | None = None,
    progress: Progress = SILENT,
    start: Mapping[str, QuantizedTensor] | None = None,
    masks: Mapping[str, Tensor] | None = None,
) -> QATResult:
    """Train a model under quantization.

    Afterwards ``model`` holds the quantized weights as plain parameters; inputs are no longer rounded.

    Args:
        model: causal, float32, its original weights (also when a run is resumed); changed in place.
        grids: the number format of each Linear to quantize, by module name; one without minimums.
        activations: how inputs are rounded, by module name; static scales are learned.
        rows: int64 (R, S) training rows.
        loss: see attar.walks.train; distillation from the original model, say.
        train: "weights": weights and scales; "scales": scales alone, of fixed codes.
        others: train all other parameters too (norms, biases, embeddings).
        work: folder of resumable states.
        held_out: as in the train walk.
        start: initial codes and scales by module name; Linears without start from the grid's own choice.
        masks: bool (N, K) by module name, False where the weight under the quantizer stays zero.

    Raises:
        SettingsError: ``train`` is unknown, or a grid searches for its scales itself; scales alone of MX,
            which are powers of two, do not learn.
        ModelError: a name is no Linear of the model.
        NumericsError: training diverged.
    """
    if train not in TRAINED:
        raise SettingsError("train", train, " or ".join(TRAINED))
    if train == "scales" and any(isinstance(grid, MXFP4Grid | MXFP8Grid) for grid in grids.values()):
        raise SettingsError("train", train, "all with MXFP4 and MXFP8, whose scales are powers of two")
    linears = {name: linear_of(model, name) for name in grids}
    inputs = _calibrated(model, activations or {}, grids, rows)
    model.requires_grad_(others)
    quantizers = {name: attach(linears[name], grids[name], (start or {}).get(name), train) for name in grids}
    hooks = [_round_inputs(linear_of(model, name), quantizer) for name, quantizer in inputs.items()]
    options: dict[str, Any] = {"held_out": held_out, "progress": progress, "what": "qat"}
    try:
        history = run(model, loss, rows, settings, work=work, masks=_stored(masks or {}, linears), **options)
    finally:
        for hook in hooks:
            hook.remove()
    codes = {name: quantizer.quantized(_original(linears[name])) for name, quantizer in quantizers.items()}
    scales = {name: quantizer.stored() for name, quantizer in inputs.items() if quantizer.rule.static}
    _detach(model, linears, list(inputs))
    dense = {name: p.detach() for name, p in model.named_parameters() if others and p.requires_grad}
    for name in grids:
        dense.pop(f"{name}.weight", None)
    return QATResult(codes, scales, dense, history)


class WeightQuantizer(nn.Module):  # type: ignore[misc]
    """A parametrization of a Linear's weight: the quantized weight with LSQ's gradients.

    Args:
        weight: W (N, K), float32; not modified.
        start: initial codes and scales; None: the grid's own choice.
        fixed: the codes do not change.
        transposed: the module stores (K, N).
    """

    def __init__(
        self, weight: Tensor, grid: Grid, start: QuantizedTensor | None, *, fixed: bool, transposed: bool
    ) -> None:
        super().__init__()
        grid = grid if start is None else grid.shared_with(start.parameters)
        self.grid, self.shape, self.transposed = grid, (weight.shape[0], weight.shape[1]), transposed
        base = grid.choose(weight) if start is None else start.parameters
        lsq.stored(base.scale, grid, self.shape)  # refuses grids without free scales
        self.register_buffer("scale", _on(base.scale, weight), persistent=False)
        self.register_buffer("zero", _on(base.zero, weight), persistent=False)
        self.factor = nn.Parameter(torch.ones_like(self.scale).flatten())
        self.shift = None if self.zero is None or fixed else nn.Parameter(torch.zeros_like(self.factor))
        codes = (start or grid.quantize(weight, base)).codes.to(weight.device) if fixed else None
        self.register_buffer("codes", codes, persistent=False)

    def forward(self, weight: Tensor) -> Tensor:
        """W' as the module stores it."""
        scale, zero = self._soft()
        if self.codes is None:
            rows = weight.T if self.transposed else weight
            quantized = lsq.quantize_weight(rows, scale, self.grid, zero)
        else:
            quantized = lsq.decode_weight(self.codes, scale, self.grid, zero)
        return quantized.T if self.transposed else quantized

    def quantized(self, weight: Tensor) -> QuantizedTensor:
        """The codes and scales that forward computes with; weight (N, K)."""
        with torch.no_grad():
            scale, zero = self._soft()
            parameters = lsq.stored(scale, self.grid, self.shape, zero)
            if self.codes is not None:
                return QuantizedTensor(self.grid, self.codes, parameters)
            spread = parameters.map(lambda value: value[:, None, :, None])
            codes = self.grid.nearest(on_unit_scale(self.grid.tile(weight), spread))
            codes = self.grid.untile(codes, self.shape).to(self.grid.code_dtype).contiguous()
            return QuantizedTensor(self.grid, codes, parameters)

    def _soft(self) -> tuple[Tensor, Tensor | None]:
        """Scale and zero (P, G) before they are rounded to their stored forms."""
        scale = self.scale * self.factor.clamp(min=SMALLEST).view_as(self.scale)
        if self.shift is None:
            return scale, self.zero
        return scale, self.zero + self.shift.view_as(self.zero)


class InputQuantizer(nn.Module):  # type: ignore[misc]
    """Rounds a Linear's inputs: by their own range where the rule is dynamic, else with a learned scale.
    The global scale of NVFP4's groups is not learned.

    Args:
        rule: the number format.
        seen: the range of a static rule's inputs, which initializes its scale.
        storage: the type in which the scale is stored.
        device: of the scale.
    """

    def __init__(
        self, rule: ActivationRule, seen: ActivationRange | None, storage: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.rule = rule
        self.factor: nn.Parameter | None = None
        self.shift: nn.Parameter | None = None
        if seen is not None and rule.dynamic:
            self.register_buffer("scale", torch.tensor([seen.scale()], device=device), persistent=False)
        elif seen is not None:
            self.grid = _codes(rule, storage)
            first = torch.tensor([seen.scale()], device=device)
            self.register_buffer("scale", first, persistent=False)
            self.register_buffer("zero", torch.tensor([seen.zero()], device=device), persistent=False)
            self.factor = nn.Parameter(torch.ones_like(first))
            self.shift = None if rule.symmetric else nn.Parameter(torch.zeros_like(first))

    def forward(self, x: Tensor) -> Tensor:
        """x' of (..., K), in the type of x."""
        if self.factor is None:
            above = 1.0 / self.scale if self.rule.static else None
            return through(x, round_activation(x.detach(), self.rule, above))
        return lsq.quantize_activation(x, *self._soft()[:1], self.grid, self._soft()[1])

    def stored(self) -> dict[str, Tensor]:
        """The learned scale (and zero) in stored form, scalars."""
        if self.factor is None:
            return {"scale": self.scale}
        with torch.no_grad():
            scale, zero = self._soft()
            values = {"scale": scale.to(self.grid.storage).float()}
            if zero is not None:
                values["zero"] = zero.round().clamp(*limits(self.grid))
        return values

    def _soft(self) -> tuple[Tensor, Tensor | None]:
        assert self.factor is not None
        scale = self.scale * self.factor.clamp(min=SMALLEST)
        return scale, None if self.shift is None else self.zero + self.shift


def attach(module: nn.Module, grid: Grid, start: QuantizedTensor | None, train: str) -> WeightQuantizer:
    """Parametrize a Linear's weight with a quantizer; given codes first move the weight into their cells."""
    fixed, transposed = train == "scales", not isinstance(module, nn.Linear)
    parameter: Any = module.weight
    with torch.no_grad():
        weight = parameter.T if transposed else parameter
        if start is not None and not fixed:
            weight = _inside(weight, start)
            parameter.copy_(weight.T if transposed else weight)
    parameter.requires_grad_(not fixed)
    quantizer = WeightQuantizer(weight.detach(), grid, start, fixed=fixed, transposed=transposed)
    parametrize.register_parametrization(module, "weight", quantizer, unsafe=True)
    return quantizer


def _stored(masks: Mapping[str, Tensor], linears: Mapping[str, nn.Module]) -> Masks:
    """Masks (N, K) under the names of the parameters under the quantizers."""
    return Masks(
        {
            f"{name}.parametrizations.weight.original": mask
            if isinstance(linears[name], nn.Linear)
            else mask.T
            for name, mask in masks.items()
        }
    )


def _inside(weight: Tensor, start: QuantizedTensor) -> Tensor:
    """The weight (N, K), each value moved to the nearest point that rounds to its given code."""
    if start.g_idx is not None:
        raise SettingsError("act_order", "group", "off or static where training follows")
    grid, shape = start.grid, (weight.shape[0], weight.shape[1])
    plain = start.parameters.map(lambda value: value.detach().to(weight.device)[:, None, :, None])
    u = on_unit_scale(grid.tile(weight), plain)
    u = into_cells(grid, u, grid.tile(start.codes.to(weight.device)), MARGIN)
    moved = (u if plain.zero is None else u - plain.zero) * plain.scale
    return grid.untile(moved, shape)


def _detach(model: nn.Module, linears: Mapping[str, nn.Module], inputs: list[str]) -> None:
    """Replace the parametrizations by the quantized weights; remove the input quantizers."""
    for module in linears.values():
        parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)
    for name in inputs:
        del model.get_submodule(name).input_quantizer


def _round_inputs(module: nn.Module, quantizer: InputQuantizer) -> Any:
    """Make a Linear round its inputs; the quantizer is its submodule, so that its parameters are trained."""
    module.input_quantizer = quantizer
    return module.register_forward_pre_hook(lambda _, args: (quantizer(args[0]), *args[1:]))


def _calibrated(
    model: nn.Module, rules: Mapping[str, ActivationRule], grids: Mapping[str, Grid], rows: Tensor
) -> dict[str, InputQuantizer]:
    """A quantizer for each module with a rule; static scales are initialized from the first rows."""
    seen = {name: ActivationRange(rule) for name, rule in rules.items() if rule.static}
    hooks = [
        linear_of(model, name).register_forward_pre_hook(lambda _, args, to=range_: to.add(args[0]))
        for name, range_ in seen.items()
    ]
    device = next(model.parameters()).device
    try:
        if seen:
            with torch.no_grad():
                model(input_ids=rows[:CALIBRATION].clamp(min=0).to(device))
    finally:
        for hook in hooks:
            hook.remove()
    storage = {name: grids[name].storage if name in grids else torch.float32 for name in rules}
    return {name: InputQuantizer(rule, seen.get(name), storage[name], device) for name, rule in rules.items()}


def _codes(rule: ActivationRule, storage: torch.dtype) -> IntGrid | Float8Grid:
    """The number format of a static rule."""
    if rule.kind == "int":
        return IntGrid(rule.bits, 0, rule.symmetric, storage)
    return Float8Grid("e4m3fn", storage=storage)


def linear_of(model: nn.Module, name: str) -> nn.Module:
    """The Linear or Conv1D of a name.

    Raises:
        ModelError: the name is none.
    """
    try:
        module: nn.Module = model.get_submodule(name)
    except AttributeError:
        module = nn.Identity()
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or isinstance(module, nn.Embedding):
        raise ModelError(f"{name} is not a Linear of the model", hint="names are paths in the module tree")
    return module


def _original(module: nn.Module) -> Tensor:
    """The float weight (N, K) under a parametrization."""
    weight: Tensor = module.parametrizations["weight"].original  # type: ignore[index,union-attr]
    return weight.detach() if isinstance(module, nn.Linear) else weight.detach().T


def _on(value: Tensor | None, like: Tensor) -> Tensor | None:
    return None if value is None else value.detach().to(like.device)
