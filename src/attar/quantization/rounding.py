"""Codes for every layer of a plan: the table of methods, and the walks that they take over a checkpoint.

stream_nearest   codes are made while the tensors are written; needs no data
round_layers     one Linear at a time, with calibration activations         (layerwise.py)
learn_blocks     one block at a time, learned                               (methods/autoround.py)
train            the whole model under quantization                         (methods/qat.py)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any

import torch
from torch import Tensor

from attar.data.packing import pack, row_length
from attar.errors import NumericsError
from attar.models.anatomy.discover import discover
from attar.models.loading.device import pick_device
from attar.models.loading.empty import empty_model
from attar.models.loading.experts import unstack
from attar.models.loading.load import load_model, load_tokenizer
from attar.models.surgery.zeros import zero_mask
from attar.quantization.blockwise import AutoRoundSolver, solved_start
from attar.quantization.gates import code_numbers
from attar.quantization.grids import Grid, NVFP4Grid, QuantizedTensor, choose_scales
from attar.quantization.hessian import all_finite
from attar.quantization.layerwise import LayerSolver, fused, masked, scale_choice, solve_yaqa
from attar.quantization.methods import qat
from attar.quantization.methods.gptaq import gptaq
from attar.quantization.methods.gptq import gptq
from attar.quantization.methods.output_hessian import OutputHessian
from attar.quantization.methods.qronos import qronos
from attar.quantization.mtp_rounding import HeadRounding
from attar.quantization.plan import LayerPlan, QuantizationPlan
from attar.quantization.position_weights import positions_of
from attar.quantization.quantization_method import QuantizationMethod, RoundedModel, RoundingTask
from attar.quantization.settings import (
    GPTQ_KIN,
    AutoRoundSettings,
    AWQSettings,
    CalibrationSettings,
    CorrectingSettings,
    GPTQSettings,
    QATSettings,
    QuantizeSettings,
    RTNSettings,
    SmoothQuantSettings,
    SparseGPTQSettings,
)
from attar.walks.distributed import agreed_precision
from attar.walks.expert_inputs import ExpertTokens
from attar.walks.objectives import distillation_loss, soft_loss
from attar.walks.settings import TrainSettings
from attar.walks.sweep import SweepOptions, SweepResult, sweep_blocks, sweep_linears

CHUNK = 1 << 20  # weights compared at a time: temporaries stay in the cache
FEW = 5.0  # bits a weight under which a searched scale pays


def stream_nearest(task: RoundingTask) -> RoundedModel:
    """Round to nearest while the tensors are written."""
    codes = StreamedCodes(task)
    return RoundedModel(codes, codes.reports)


def round_layers(task: RoundingTask) -> RoundedModel:
    """Round one Linear at a time, each with the inputs that it gets after the layers rounded before it."""
    settings = task.settings
    method, options = METHODS[settings.method], settings.rounding
    assert isinstance(options, AWQSettings | GPTQSettings)
    precision = _precision(task)
    layers = {layer.module: layer for layer in task.plan.sites.values()}
    grids = {module: layer.grid for module, layer in layers.items()}
    batches, hessian = task.batches(), None
    if method.model_hessian:
        hessian = OutputHessian(
            task.checkpoint,
            task.plan,
            batches,
            task.work,
            task.progress,
            seed=settings.seed,
            device=torch.device(pick_device(settings.device)),
        )
        if task.processes.first:
            hessian.collect(precision)
        task.processes.wait()
    solver = LayerSolver(grids, method, options, settings.storage.keep_zeros, hessian)
    sweep, head = _sweep_options(task, layers, batches, precision), None
    if rounds_mtp(settings) and task.plan.mtp:
        sites = {layer.module: layer.grid for layer in task.plan.mtp.values()}
        file = task.work / "mtp.safetensors"
        of_head = replace(solver, grids=sites)
        if hessian is not None:  # the model's KL does not depend on the head
            of_head = replace(of_head, method=METHODS["gptq"], output_hessian=None)
        head = HeadRounding(task.checkpoint, task.plan.mtp, of_head, file, task.progress)
        sweep = replace(sweep, after_blocks=head)
    swept = _swept(task, sweep_linears(task.checkpoint, batches, solver, sweep))
    return swept if head is None else replace(swept, mtp=head.codes(), mtp_reports=head.reports())


def rounds_mtp(settings: QuantizeSettings) -> bool:
    """Whether the Linears of a multi-token prediction head are rounded by the method: where it rounds one
    Linear at a time by its inputs alone, and chooses no zeros."""
    return METHODS[settings.method].walk is round_layers and settings.amount is None


def learn_blocks(task: RoundingTask) -> RoundedModel:
    """Learn the rounding of one block at a time."""
    settings, options = task.settings, task.settings.rounding
    assert isinstance(options, AutoRoundSettings)
    precision = _precision(task)
    layers = {layer.module: layer for layer in task.plan.sites.values()}
    grids = _fused_grids(task)
    layers = {name: replace(layer, grid=grids[name]) for name, layer in layers.items()}
    start = None
    if options.start == "gptq":  # with its searched scales and refinement
        start = solved_start(
            LayerSolver(grids, METHODS["gptq"], SparseGPTQSettings(), settings.storage.keep_zeros)
        )
    solver = AutoRoundSolver(
        grids,
        iterations=options.iterations,
        batch=settings.calibration.batch_size,
        precision=precision,
        seed=settings.seed,
        update=options.update,
        start=start,
        masks=_masks(task) or None,
    )
    batches = task.batches()
    sweep = _sweep_options(task, grids, batches, precision)
    return _swept(task, sweep_blocks(task.checkpoint, batches, solver, sweep))


def _fused_grids(task: RoundingTask) -> dict[str, Grid]:
    """The grid of each layer by module name, with the global scale of all that engines fuse with it."""
    together = fused_names(task)
    layers = {layer.module: (stored, layer.grid) for stored, layer in task.plan.sites.items()}
    grids: dict[str, Grid] = {}
    for name, (_, grid) in layers.items():
        siblings = [layers[other][0] for other in together.get(name, [name])]
        grids[name] = fused(grid, (task.checkpoint.load(stored) for stored in siblings))
    return grids


def fused_names(task: RoundingTask) -> dict[str, list[str]]:
    """Linears that engines run as one matrix, by the module name of each; empty where no grid asks."""
    layers = {layer.module: layer for layer in task.plan.sites.values()}
    if not any(isinstance(layer.grid, NVFP4Grid) for layer in layers.values()):
        return {}
    blocks = discover(empty_model(task.checkpoint.config, unstacked=True)).blocks
    groups = [[name for name in group if name in layers] for block in blocks for group in block.fused()]
    return {name: names for names in groups for name in names}


def _sweep_options(
    task: RoundingTask, layers: Mapping[str, Any], batches: Sequence[Tensor], precision: str
) -> SweepOptions:
    """Of a sweep that rounds ``layers``, by module name."""
    return SweepOptions(
        work=task.work / "blocks",
        select=layers.__contains__,
        precision=precision,
        after_blocks=task.after_blocks,
        processes=task.processes,
        device=torch.device(pick_device(task.settings.device)),
        experts=counted_tokens(task.settings.calibration),
        positions=positions_of(task, batches, precision),
        progress=task.progress,
        what=task.settings.method,
    )


def counted_tokens(settings: CalibrationSettings) -> ExpertTokens:
    """Which tokens count for an expert of a mixture."""
    return ExpertTokens(settings.moe_floor, settings.moe_calibrate == "all")


def _swept(task: RoundingTask, result: SweepResult) -> RoundedModel:
    """The codes of a sweep."""
    codes = SweepCodes(task.plan, result)
    return RoundedModel(codes, codes.reports, precision=result.precision)


def train(task: RoundingTask) -> RoundedModel:
    """Quantization-aware training, from the codes of another rounding."""
    settings, checkpoint, options = task.settings, task.checkpoint, task.settings.rounding
    assert isinstance(options, QATSettings)
    method = "gptq" if options.start == "auto" else options.start
    of_start = settings.rounded_by(method) if method in GPTQ_KIN else replace(settings, method=method)
    first = replace(task, settings=of_start, work=task.work / "start")
    started = round_layers(first).codes
    device = pick_device(settings.device)
    model, teacher = (unstack(load_model(checkpoint, dtype=torch.float32, device=device)) for _ in range(2))
    teacher.requires_grad_(False)
    layers = {layer.module: layer for layer in task.plan.sites.values()}
    rules = {name: layer.scheme.activations for name, layer in layers.items()}
    sizes = settings.calibration
    packed = pack(
        load_tokenizer(checkpoint),
        settings.data,
        "train",
        length=row_length(sizes.sequence_length, checkpoint.config),
        rows=options.steps * sizes.batch_size,
        seed=settings.seed,
        bos=settings.bos,
    )
    learned = qat.learn(
        model,
        {name: layer.grid for name, layer in layers.items()},
        {name: rule for name, rule in rules.items() if rule is not None},
        packed.rows,
        _schedule(settings, options),
        loss=distillation_loss(soft_loss(teacher), options.distill),
        train="scales" if options.train == "scales" else "weights",
        work=task.work / "train",
        progress=task.progress,
        start={layer.module: started(stored, Tensor) for stored, layer in task.plan.sites.items()},
        masks=_masks(task),
    )
    codes = TrainedCodes(task, learned.weights, teacher)
    scales = {name: float(values["scale"]) for name, values in learned.activations.items()}
    history = learned.history
    return RoundedModel(codes, codes.reports, scales, history.curve, history.precision)


def _schedule(settings: QuantizeSettings, options: QATSettings) -> TrainSettings:
    return TrainSettings(
        steps=options.steps,
        batch_size=settings.calibration.batch_size,
        sequence_length=settings.calibration.sequence_length,
        learning_rate=options.learning_rate,
        weight_decay=0.0,
        precision=settings.calibration.precision,
        data=settings.data,
        seed=settings.seed,
        device=settings.device,
    )


def _precision(task: RoundingTask) -> str:
    """``bf16`` or ``fp32`` for the passes of a sweep; a resumed sweep keeps its own."""
    device = torch.device(pick_device(task.settings.device))
    precision = task.settings.calibration.precision
    return agreed_precision(task.processes, precision, device, task.work / "blocks")


def _masks(task: RoundingTask) -> dict[str, Tensor]:
    """Masks of the layers with weights that stay zero, by module name."""
    keep, masks = task.settings.storage.keep_zeros, {}
    for stored, layer in task.plan.sites.items() if keep != "false" else ():
        mask = zero_mask(dense_weight(task.checkpoint.load(stored), layer), keep)
        if mask is not None:
            masks[layer.module] = mask
    return masks


class SweepCodes:
    """Codes that a sweep wrote, one file a block. One block is kept in memory: tensors are read in file
    order."""

    def __init__(self, plan: QuantizationPlan, swept: SweepResult) -> None:
        self.plan, self.swept = plan, swept
        self.block: tuple[int, dict[str, dict[str, Tensor]]] = (-1, {})

    def __call__(self, stored: str, load: Callable[[], Tensor]) -> QuantizedTensor:
        layer = self.plan.sites[stored]
        number = self.swept.block_of[layer.module]
        if self.block[0] != number:
            self.block = (number, self.swept.tensors(number))
        return QuantizedTensor.from_tensors(layer.grid, self.block[1][layer.module])

    def reports(self) -> list[dict[str, Any]]:
        """One row a layer, in the order of the blocks."""
        return list(self.swept.reports)


class TrainedCodes:
    """Codes in memory, by module name, with the errors of their weights."""

    def __init__(self, task: RoundingTask, weights: Mapping[str, QuantizedTensor], original: Any) -> None:
        self.plan, self.weights, self.rows = task.plan, dict(weights), []
        for layer in task.plan.sites.values():
            weight = dense_weight(original.get_submodule(layer.module).weight.detach(), layer)
            mask = zero_mask(weight, task.settings.storage.keep_zeros)
            if mask is not None:
                self.weights[layer.module] = masked(self.weights[layer.module], mask)
            self.rows.append({"name": layer.module, **weight_numbers(weight, self.weights[layer.module])})

    def __call__(self, stored: str, load: Callable[[], Tensor]) -> QuantizedTensor:
        return self.weights[self.plan.sites[stored].module]

    def reports(self) -> list[dict[str, Any]]:
        """One row a layer, in the order of the file."""
        return self.rows


class StreamedCodes:
    """Codes rounded to nearest when a tensor is read. The numbers of each layer go to a file that survives a
    kill, of each process its own."""

    def __init__(self, task: RoundingTask) -> None:
        self.task, self.errors = task, task.work / f"errors-{task.processes.rank}.jsonl"
        self.method = METHODS[task.settings.method]
        self.stored = {layer.module: stored for stored, layer in task.plan.sites.items()}
        self.fused_with = fused_names(task)

    def __call__(self, stored: str, load: Callable[[], Tensor]) -> QuantizedTensor:
        layer, options = self.task.plan.sites[stored], self.task.settings.rounding
        assert isinstance(options, RTNSettings)
        weight = dense_weight(load(), layer)
        if not all_finite(weight):
            raise NumericsError(f"{stored} holds NaN or infinity", hint="the checkpoint is damaged")
        siblings = self.fused_with.get(layer.module, [layer.module])
        grid = fused(layer.grid, (self.task.checkpoint.load(self.stored[name]) for name in siblings))
        how = scale_choice(self.method, options.scales, grid)
        quantized = grid.quantize(weight, choose_scales(weight, grid, how))
        mask = zero_mask(weight, self.task.settings.storage.keep_zeros)
        if mask is not None:
            quantized = masked(quantized, mask)
        with self.errors.open("a") as file:
            file.write(json.dumps({"name": layer.module, **weight_numbers(weight, quantized)}) + "\n")
        return quantized

    def reports(self) -> list[dict[str, Any]]:
        """One row a layer, in the order of the file."""
        files = sorted(self.task.work.glob("errors-*.jsonl"))
        lines = [line for file in files for line in file.read_text().splitlines()]
        rows = {row["name"]: row for row in (json.loads(line) for line in lines if line.endswith("}"))}
        return [rows[name] for name in self.stored]


def dense_weight(stored: Tensor, layer: LayerPlan) -> Tensor:
    """A layer's weight (N, K) from the tensor as it is stored."""
    return stored.T.contiguous() if layer.transposed else stored


def weight_numbers(weight: Tensor, quantized: QuantizedTensor) -> dict[str, Any]:
    """A report where no inputs were seen: the relative squared error of the weight, and the numbers of its
    codes that the gates check."""
    lost = total = 0.0
    rows = max(CHUNK // max(weight.shape[1], 1), 1)
    for part, decoded in zip(weight.split(rows), quantized.dequantize().split(rows), strict=True):
        part = part.float()
        lost += _energy(part - decoded)
        total += _energy(part)
    return {"weight_error": lost / max(total, 1e-30), **code_numbers(quantized, weight)}


def _energy(weight: Tensor) -> float:
    """The sum of squares of a weight (N, K)."""
    return float(torch.linalg.vector_norm(weight, dim=1).double().square().sum())


METHODS: dict[str, QuantizationMethod] = {
    "rtn": QuantizationMethod(RTNSettings, stream_nearest, sees_text=False),
    "smoothquant": QuantizationMethod(SmoothQuantSettings, stream_nearest, sees_text=False),
    "awq": QuantizationMethod(AWQSettings, round_layers, search_below=inf),
    "gptq": QuantizationMethod(
        SparseGPTQSettings, round_layers, gptq, stacked=True, refined=True, search_below=FEW
    ),
    "gptaq": QuantizationMethod(
        CorrectingSettings, round_layers, gptaq, original_inputs=True, refined=True, search_below=FEW
    ),
    "qronos": QuantizationMethod(
        CorrectingSettings, round_layers, qronos, original_inputs=True, refined=True, search_below=FEW
    ),
    "yaqa": QuantizationMethod(
        CorrectingSettings,
        round_layers,
        solve_yaqa,
        original_inputs=True,
        model_hessian=True,
        search_below=FEW,
    ),
    "autoround": QuantizationMethod(AutoRoundSettings, learn_blocks),
    "qat": QuantizationMethod(QATSettings, train),
}
"""The methods by name, with the same names and settings classes as settings.METHOD_SETTINGS."""
