"""How often tokens count by their position in the Hessians of a rounding: as the setting says, or measured
where the model fits in memory as a whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from attar.checkpoint.atomic import save_tensors
from attar.checkpoint.units import bytes_text
from attar.errors import NumericsError
from attar.models.head import output_linear
from attar.models.loading.device import free_memory, pick_device
from attar.models.loading.empty import empty_model
from attar.models.loading.experts import unstack
from attar.models.loading.load import load_model
from attar.quantization.quantization_method import RoundingTask
from attar.sensitivity.positions import position_weights
from attar.walks.positions import FIRST, PositionWeights
from attar.walks.settings import FIRST_WEIGHT, MEASURED_ROWS

NEEDED = 8  # bytes a parameter: float32, and as much for what a backward pass keeps and for other programs


def positions_of(task: RoundingTask, batches: Sequence[Tensor], precision: str) -> PositionWeights:
    """The weights for a sweep that rounds Linear by Linear; of several processes the first measures.

    Args:
        batches: int64 (B, S) calibration batches; the first rows are measured.
        precision: of the products: "bf16" or "fp32".
    """
    calibration = task.settings.calibration
    if task.settings.amount:  # where zeros are chosen, all tokens count once
        return PositionWeights()
    if calibration.first_tokens >= 0:
        return PositionWeights(calibration.first_tokens)
    file = task.work / "positions.safetensors"
    if task.processes.first and not file.exists():
        task.work.mkdir(parents=True, exist_ok=True)
        save_tensors(file, _measured(task, batches, precision))
    task.processes.wait()
    return PositionWeights(FIRST_WEIGHT, load_file(file))


def _measured(task: RoundingTask, batches: Sequence[Tensor], precision: str) -> dict[str, Tensor]:
    """By Linear; empty for a model without a head of logits, and with a line for one that does not fit or has
    no gradient."""
    checkpoint, device = task.checkpoint, torch.device(pick_device(task.settings.device))
    if output_linear(empty_model(checkpoint.config)) is None:
        return {}
    needed = NEEDED * sum(math.prod(info.shape) for info in checkpoint.tensors.values())
    if needed > (free := free_memory(device)):
        why = f"that would need {bytes_text(needed)} of memory, and {bytes_text(free)} are free"
        return _usual(task, why)
    model: Any = unstack(load_model(checkpoint, dtype=torch.float32, device=device))
    try:
        return position_weights(
            model,
            torch.cat(list(batches))[:MEASURED_ROWS],
            [layer.module for layer in task.plan.sites.values()],
            seed=task.settings.seed,
            autocast=torch.bfloat16 if precision == "bf16" else None,
            progress=task.progress,
            device=device,
        )
    except (RuntimeError, NumericsError) as error:  # no backward of an operation, no memory on a GPU
        return _usual(task, str(error).partition("\n")[0])


def _usual(task: RoundingTask, why: str) -> dict[str, Tensor]:
    """No weights, with a line."""
    task.progress.log(
        f"note: the first {FIRST} tokens of a row count {FIRST_WEIGHT:g} times; what each position counts "
        f"was not measured: {why}"
    )
    return {}
