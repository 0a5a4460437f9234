"""The phase behind every rounding: scales and norms learn end to end from the original; the codes stay.

Its text is what the rounding has not read, where there is enough, and the last rows of that text decide: a
tuned model that is no nearer to the original than the rounded one is given up. Only the model, one batch of
activations and the states of scales and norms are in memory. Several processes share the rows of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attar.data.packing import pack, row_length
from attar.data.sources import COMPRESSION
from attar.errors import DataError, SettingsError
from attar.models.head import head_of
from attar.models.loading.device import pick_device
from attar.models.loading.experts import unstack
from attar.models.loading.load import load_model, load_tokenizer
from attar.models.loading.stored import stored_of
from attar.quantization.grids import QuantizedTensor
from attar.quantization.methods.tune import RATE, RATES, WARMUP, original_states, tunable_norms, tune
from attar.quantization.quantization_method import RoundedModel, RoundingTask
from attar.quantization.settings import QuantizeSettings, tuning_rows
from attar.walks.distributed import agreed_precision
from attar.walks.settings import TrainSettings


@dataclass(frozen=True)
class TunedCodes:
    """The codes of a rounding with tuned scales, by module name."""

    stored: Mapping[str, str]
    weights: Mapping[str, QuantizedTensor]

    def __call__(self, stored: str, load: Callable[[], Tensor]) -> QuantizedTensor:
        return self.weights[self.stored[stored]]


def tuned(task: RoundingTask, rounded: RoundedModel) -> RoundedModel:
    """The rounding with tuned scales and norms, or as it was where tuning did not bring it nearer.

    Raises:
        SettingsError: the model's logits are not made by one plain Linear; a grid has no free scales.
        NumericsError: the training diverged.
    """
    settings, checkpoint, steps = task.settings, task.checkpoint, task.settings.tuning.tune
    device, work = torch.device(pick_device(settings.device)), task.work / "tune"
    model: Any = unstack(load_model(checkpoint, dtype=torch.float32, device=device))
    if head_of(model) is None:
        raise SettingsError("tune", steps, "0: the logits of this model are not made by one plain Linear")
    length = row_length(settings.calibration.sequence_length, checkpoint.config)
    rows, held_out, total = tuning_rows(steps, length)
    read = settings.calibration.samples
    packed = pack(
        load_tokenizer(checkpoint),
        settings.data,
        COMPRESSION,
        length=length,
        rows=read + total,
        seed=settings.seed,
        bos=settings.bos,
    ).rows
    packed = packed[read:] if len(packed) >= read + 2 * rows else packed  # fresh text where there is enough
    held_out = min(held_out, len(packed) // 2)
    if not held_out:
        hint = "more text, a smaller --sequence-length, or --tune 0"
        raise DataError(f"{settings.data}: one row of {length} tokens is too few to tune on", hint=hint)
    if len(packed) < total:
        task.progress.log(f"note: {len(packed)} of {total} rows to tune on: some are read again")
    precision = agreed_precision(task.processes, settings.calibration.precision, device, work)
    with torch.autocast(device.type, torch.bfloat16, precision == "bf16"):
        examples = original_states(model, packed, rows)
    norms = tunable_norms(model)
    stored_norms = stored_of(model, norms, checkpoint)
    result = tune(
        model,
        {layer.module: rounded.codes(name, _loader(task, name)) for name, layer in task.plan.sites.items()},
        examples[: len(packed) - held_out],
        examples[len(packed) - held_out :],
        _schedule(settings, rows, length, precision, task.plan.code_bits),
        norms=[name for name in norms if name in stored_norms],
        work=work,
        progress=task.progress,
    )
    numbers = {"steps": steps, "held_out_rows": held_out, "before": result.before, "after": result.after}
    if not result.after < result.before:
        task.progress.log(f"note: tuning brought KL {result.before:.4g} to {result.after:.4g}: not taken")
        return replace(rounded, tuning={**numbers, "taken": False})
    return replace(
        rounded,
        codes=TunedCodes({name: layer.module for name, layer in task.plan.sites.items()}, result.weights),
        norms={stored_norms[name]: norm for name, norm in result.norms.items()},
        curve=[*rounded.curve, *result.history.curve],
        precision=rounded.precision or precision,
        tuning={**numbers, "taken": True},
    )


def _loader(task: RoundingTask, stored: str) -> Callable[[], Tensor]:
    return lambda: task.checkpoint.load(stored)


def _schedule(settings: QuantizeSettings, rows: int, length: int, precision: str, bits: int) -> TrainSettings:
    steps = settings.tuning.tune
    return TrainSettings(
        steps=steps,
        batch_size=rows,
        sequence_length=length,
        learning_rate=RATES.get(bits, RATE),
        warmup=min(WARMUP / steps, 1.0),
        min_lr_ratio=0.0,
        weight_decay=0.0,
        precision=precision,
        data=settings.data,
        seed=settings.seed,
        device=settings.device,
    )
