"""Codes for every site of a plan, by whatever method the settings name: which walk it takes, what it leaves.

rtn with scales that need no data              streams: codes are made as tensors pass by
gptq, gptaq, qronos, yaqa, awq's clipping      sweep, one Linear at a time     (layerwise.py)
autoround                                      sweep, one block at a time      (autoround_solver.py)
qat                                            the train walk                  (qat.py)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attar.data.packing import pack, row_length
from attar.errors import NumericsError
from attar.models.anatomy import discover
from attar.models.device import pick_device, resolve
from attar.models.load import empty_model, load_model, load_tokenizer
from attar.progress import Progress
from attar.quantization.gates import code_numbers
from attar.quantization.grids import NVFP4Grid, QuantizedTensor, choose_scales
from attar.quantization.hessian import all_finite
from attar.quantization.layerwise import LayerSolver, fused, mask_of, masked, scale_choice
from attar.quantization.methods import qat
from attar.quantization.methods.autoround_solver import AutoRoundSolver, gptq_start
from attar.quantization.methods.output_hessian import OutputHessian
from attar.quantization.mixed_precision.sensitivity import shared_groups
from attar.quantization.observe import StaticScales, observe
from attar.quantization.plan import LayerPlan, QuantizationPlan
from attar.quantization.settings import QuantizeSettings
from attar.quantization.transforms.preparation import calibration
from attar.quantization.write import CodeSource
from attar.walks.objectives import distillation_loss, soft_loss
from attar.walks.settings import TrainSettings
from attar.walks.sweep import AfterBlocks, SweepResult, sweep

if TYPE_CHECKING:
    from attar.checkpoint import Checkpoint

CHUNK = 1 << 20  # weights compared at a time: temporaries stay in the cache


@dataclass(frozen=True)
class RoundedModel:
    """What a rounding leaves.

    Attributes:
        codes: see attar.quantization.write.
        reports: one row a layer, once all codes have been asked for.
        input_scales: static scales of inputs, by module name.
        kv_scales: of keys and values, by the name of the attention module.
        curve: of a training run.
        precision: in which the calibration or the training multiplied: ``bf16`` or ``fp32``; empty where
            there was none.
    """

    codes: CodeSource
    reports: Callable[[], list[dict[str, Any]]]
    input_scales: Mapping[str, float] = field(default_factory=dict)
    kv_scales: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    curve: list[dict[str, float]] = field(default_factory=list)
    precision: str = ""


def round_all(
    checkpoint: Checkpoint,
    chosen: QuantizationPlan,
    settings: QuantizeSettings,
    work: Path,
    progress: Progress,
    after_blocks: AfterBlocks | None = None,
) -> RoundedModel:
    """Round every site of a plan.

    Args:
        checkpoint: dense; the plan was made for it.
        work: where finished parts survive a kill.
        after_blocks: called after the last block, where a sweep rounds (walks/sweep.py).

    Raises:
        NumericsError: a weight, an activation or a result is not finite.
    """
    seen = _static_scales(checkpoint, chosen, settings, work, progress)
    if settings.rounding == "qat":
        made = _trained(checkpoint, chosen, settings, work, progress)
    elif settings.method == "rtn" or (settings.rounding == "rtn" and settings.method != "awq"):
        nearest = StreamedCodes(checkpoint, chosen, settings, work / "errors.jsonl")
        made = RoundedModel(nearest, nearest.reports)
    else:
        swept = SweepCodes(chosen, _sweep(checkpoint, chosen, settings, work, progress, after_blocks))
        made = RoundedModel(swept, swept.reports, precision=swept.swept.precision)
    inputs = {**seen.inputs, **made.input_scales}
    return replace(made, input_scales=inputs, kv_scales=seen.caches)


def _static_scales(
    checkpoint: Checkpoint,
    chosen: QuantizationPlan,
    settings: QuantizeSettings,
    work: Path,
    progress: Progress,
) -> StaticScales:
    if not chosen.caches and not any(site.static for site in chosen.sites.values()):
        return StaticScales({}, {})
    return observe(
        checkpoint,
        chosen,
        calibration(checkpoint, settings),
        work=work / "ranges",
        precision=settings.precision,
        device=torch.device(pick_device(settings.device)),
        progress=progress,
    )


def _sweep(
    checkpoint: Checkpoint,
    chosen: QuantizationPlan,
    settings: QuantizeSettings,
    work: Path,
    progress: Progress,
    after_blocks: AfterBlocks | None = None,
) -> SweepResult:
    batches = calibration(checkpoint, settings)
    sites = {site.module: site for site in chosen.sites.values()}
    device, blocks = torch.device(pick_device(settings.device)), work / "blocks"
    settings = replace(settings, precision=resolve(settings.precision, device, blocks))
    solver: LayerSolver | AutoRoundSolver
    if settings.rounding == "autoround":
        solver = _autoround(checkpoint, chosen, settings)
    else:
        curvature = None
        if settings.rounding == "yaqa":
            curvature = OutputHessian(checkpoint, chosen, batches, settings, work / "curvature", progress)
            curvature.collect()
        solver = LayerSolver(sites, settings, curvature)
    return sweep(
        checkpoint,
        batches,
        solver,
        work=blocks,
        select=sites.__contains__,
        precision=settings.precision,
        after_blocks=after_blocks,
        device=device,
        progress=progress,
        what=settings.method,
    )


def _autoround(
    checkpoint: Checkpoint, chosen: QuantizationPlan, settings: QuantizeSettings
) -> AutoRoundSolver:
    masks = {}
    for stored, site in chosen.sites.items() if settings.keep_zeros else ():
        mask = mask_of(dense_weight(checkpoint.load(stored), site), True)
        if mask is not None:
            masks[site.module] = mask
    return AutoRoundSolver(
        {site.module: site.grid for site in chosen.sites.values()},
        iterations=settings.iterations,
        batch=settings.batch_size,
        precision=settings.precision,
        seed=settings.seed,
        update="adam",
        start=gptq_start if settings.start in ("gptq", "qronos") else None,
        masks=masks or None,
    )


def _trained(
    checkpoint: Checkpoint,
    chosen: QuantizationPlan,
    settings: QuantizeSettings,
    work: Path,
    progress: Progress,
) -> RoundedModel:
    """Quantization-aware training, from the codes of another rounding."""
    sites = {site.module: site for site in chosen.sites.values()}
    first = replace(settings, method="gptq" if settings.start == "auto" else settings.start, smooth="none")
    start = SweepCodes(chosen, _sweep(checkpoint, chosen, first, work / "start", progress)).all()
    device = pick_device(settings.device)
    model, teacher = (load_model(checkpoint, dtype=torch.float32, device=device) for _ in range(2))
    teacher.requires_grad_(False)
    schedule = TrainSettings(
        steps=settings.steps,
        batch_size=settings.batch_size,
        sequence_length=settings.sequence_length,
        learning_rate=settings.learning_rate,
        weight_decay=0.0,
        precision=settings.precision,
        data=settings.data,
        bos=settings.bos,
        seed=settings.seed,
        device=settings.device,
    )
    rows = pack(
        load_tokenizer(checkpoint),
        settings.data,
        "train",
        length=row_length(settings.sequence_length, checkpoint.config),
        rows=settings.steps * settings.batch_size,
        seed=settings.seed,
        bos=settings.bos,
    )
    rules = {name: site.scheme.activations for name, site in sites.items()}
    learned = qat.learn(
        model,
        {name: site.grid for name, site in sites.items()},
        {name: rule for name, rule in rules.items() if rule is not None},
        rows,
        schedule,
        loss=distillation_loss(soft_loss(teacher), settings.distill),
        train="scales" if settings.train == "scales" else "weights",
        work=work / "train",
        progress=progress,
        start=start,
    )
    held = TrainedCodes(chosen, learned.weights, teacher, settings)
    scales = {name: float(found["scale"]) for name, found in learned.activations.items()}
    history = learned.history
    return RoundedModel(
        held, held.reports, input_scales=scales, curve=history.curve, precision=history.precision
    )


class SweepCodes:
    """Codes that a sweep left on disk; one block's are held at a time, because tensors are asked for in file
    order."""

    def __init__(self, chosen: QuantizationPlan, swept: SweepResult) -> None:
        self.chosen, self.swept = chosen, swept
        self.held: tuple[int, dict[str, dict[str, Tensor]]] = (-1, {})

    def __call__(self, stored: str, load: Callable[[], Tensor]) -> QuantizedTensor:
        site = self.chosen.sites[stored]
        number = self.swept.block_of[site.module]
        if self.held[0] != number:
            self.held = (number, self.swept.tensors(number))
        return QuantizedTensor.from_tensors(site.grid, self.held[1][site.module])

    def all(self) -> dict[str, QuantizedTensor]:
        """Every site's codes at once, by module name."""
        return {site.module: self(stored, Tensor) for stored, site in self.chosen.sites.items()}

    def reports(self) -> list[dict[str, Any]]:
        """One row a layer, in the order of the blocks."""
        return list(self.swept.reports)


class TrainedCodes:
    """Codes in memory, by module name."""

    def __init__(
        self,
        chosen: QuantizationPlan,
        weights: Mapping[str, QuantizedTensor],
        original: Any,
        settings: QuantizeSettings,
    ) -> None:
        self.chosen, self.weights, self.rows = chosen, dict(weights), []
        for site in chosen.sites.values():
            weight = dense_weight(original.get_submodule(site.module).weight.detach(), site)
            mask = mask_of(weight, settings.keep_zeros)
            if mask is not None:
                self.weights[site.module] = masked(self.weights[site.module], mask)
            made = self.weights[site.module]
            self.rows.append({"name": site.module, **weight_numbers(weight, made)})

    def __call__(self, stored: str, load: Callable[[], Tensor]) -> QuantizedTensor:
        return self.weights[self.chosen.sites[stored].module]

    def reports(self) -> list[dict[str, Any]]:
        """One row a layer, in the order of the file."""
        return self.rows


class StreamedCodes:
    """Codes rounded to nearest as the tensors stream by; notes each layer's numbers in a file that survives a
    kill."""

    def __init__(
        self, checkpoint: Checkpoint, chosen: QuantizationPlan, settings: QuantizeSettings, errors: Path
    ) -> None:
        self.checkpoint, self.chosen, self.settings, self.errors = checkpoint, chosen, settings, errors
        self.stored = {site.module: stored for stored, site in chosen.sites.items()}
        self.together: dict[str, list[str]] = {}
        if any(isinstance(site.grid, NVFP4Grid) for site in chosen.sites.values()):
            blocks = discover(empty_model(checkpoint.config)).blocks
            groups = shared_groups(blocks, list(self.stored)).values()
            self.together = {name: names for names in groups for name in names}

    def __call__(self, stored: str, load: Callable[[], Tensor]) -> QuantizedTensor:
        site = self.chosen.sites[stored]
        weight = dense_weight(load(), site)
        if not all_finite(weight):
            raise NumericsError(f"{stored} holds NaN or infinity", hint="the checkpoint is damaged")
        siblings = self.together.get(site.module, ())
        grid = fused(site.grid, (self.checkpoint.load(self.stored[name]) for name in siblings))
        made = grid.quantize(weight, choose_scales(weight, grid, scale_choice(self.settings, grid)))
        mask = mask_of(weight, self.settings.keep_zeros)
        if mask is not None:
            made = masked(made, mask)
        with self.errors.open("a") as file:
            file.write(json.dumps({"name": site.module, **weight_numbers(weight, made)}) + "\n")
        return made

    def reports(self) -> list[dict[str, Any]]:
        """One row a layer, in the order of the file."""
        rows = [json.loads(line) for line in self.errors.read_text().splitlines() if line.endswith("}")]
        return list({row["name"]: row for row in rows}.values())


def dense_weight(stored: Tensor, site: LayerPlan) -> Tensor:
    """A site's weight (N, K) from the tensor as it is stored."""
    return stored.T.contiguous() if site.transposed else stored


def weight_numbers(weight: Tensor, made: QuantizedTensor) -> dict[str, Any]:
    """A report where no inputs were seen: the relative squared error of the weight, and what the gates want
    to know of the codes."""
    lost = whole = 0.0
    rows = max(CHUNK // max(weight.shape[1], 1), 1)
    for part, decoded in zip(weight.split(rows), made.dequantize().split(rows), strict=True):
        part = part.float()
        lost += _energy(part - decoded)
        whole += _energy(part)
    return {"weight_error": lost / max(whole, 1e-30), **code_numbers(made, weight)}


def _energy(weight: Tensor) -> float:
    """The sum of squares of a weight (N, K)."""
    return float(torch.linalg.vector_norm(weight, dim=1).double().square().sum())
