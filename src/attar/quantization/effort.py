"""What an effort means for a model: the rounding that "auto" is, and the steps of tuning behind it."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from attar.checkpoint.open import Checkpoint
from attar.data.packing import row_length
from attar.errors import AttarError, SettingsError
from attar.memory import check_memory
from attar.models.head import output_linear
from attar.models.loading.device import pick_device
from attar.models.loading.empty import empty_model
from attar.progress import Progress
from attar.quantization.plan import QuantizationPlan
from attar.quantization.settings import BEST_SAMPLES, QuantizeSettings, tuning_memory


def with_effort(
    settings: QuantizeSettings, plan: QuantizationPlan, checkpoint: Checkpoint, progress: Progress
) -> QuantizeSettings:
    """The settings with the method and the steps of tuning that the effort means for this model. Before any
    work, what ``tune`` asks for is refused where it cannot be; what only follows from the effort is left out
    with a line.

    Raises:
        SettingsError: the model has no head of logits (an encoder, say).
        MemoryNeededError: the model does not fit in memory as a whole.
    """
    calibration, bits = settings.calibration, plan.code_bits
    length = row_length(calibration.sequence_length, checkpoint.config)
    steps = settings.tuning.steps(settings.method, bits, length)
    if settings.tuning.effort == "best" and calibration.samples < BEST_SAMPLES:
        settings = replace(settings, calibration=replace(calibration, samples=BEST_SAMPLES))
    chosen = settings.with_method(bits, differentiable=not plan.experts)
    if steps or chosen.method == "yaqa" != settings.method:
        try:
            _check_differentiable(settings, plan, checkpoint)
        except AttarError as error:
            if settings.tuning.tune > 0:
                raise
            what = "rounded by gptq alone" if settings.method == "auto" else "scales and norms are not tuned"
            progress.log(f"note: {what}: {error}")
            steps, chosen = 0, settings.with_method(bits, differentiable=False)
    return replace(chosen, tuning=replace(settings.tuning, tune=steps))


def _check_differentiable(settings: QuantizeSettings, plan: QuantizationPlan, checkpoint: Checkpoint) -> None:
    """Refuse what a backward pass through the whole model cannot be had for."""
    if getattr(settings.rounding, "act_order", "off") == "group":
        raise SettingsError("act_order", "group", "off or static with tuning")
    if output_linear(empty_model(checkpoint.config)) is None:
        why, tuning = "this model has no head of logits to compare", settings.tuning
        if tuning.tune > 0:
            raise SettingsError("tune", tuning.tune, f"0: {why}")
        raise SettingsError("effort", tuning.effort, f"fast: {why}")
    if torch.device(pick_device(settings.device)).type == "cpu":
        everything = sum(math.prod(info.shape) for info in checkpoint.tensors.values())
        needed = tuning_memory(everything, sum(math.prod(layer.shape) for layer in plan.sites.values()))
        check_memory(f"tuning of {checkpoint.name}", needed, hint="--effort fast or --tune 0")
