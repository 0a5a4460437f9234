"""Calibration: the text that a model is quantized with, and the static scales that its activations get.

    s = 2 max|x| / (high - low)                                     symmetric
    s = max|x| / (448 high)                                         scale of the scales of NVFP4's groups
    s = (max x - min x) / (high - low) ,  z = round(low - min x / s)    asymmetric, 0 counted among the x

Letters: x every number seen; s scale; z zero; low, high the ends of the codes: -128 and 127 of int8, -448 and
448 of float8_e4m3fn, -6 and 6 of FP4. As compressed-tensors computes them from its minimum and maximum.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attar.checkpoint.open import Checkpoint
from attar.checkpoint.processes import SINGLE_PROCESS, Processes
from attar.data.sources import COMPRESSION
from attar.errors import NumericsError
from attar.formats.rules import ActivationRule
from attar.models.fake_quant import on_keys_and_values
from attar.models.loading.calibration import calibration_text
from attar.models.loading.device import pick_device
from attar.progress import Progress
from attar.quantization.grids.fp4 import E4M3_LARGEST
from attar.quantization.plan import QuantizationPlan, static_inputs
from attar.quantization.settings import QuantizeSettings
from attar.walks.sweep import SweepOptions, observe


def batches_of(checkpoint: Checkpoint, settings: QuantizeSettings) -> list[Tensor]:
    """The calibration batches, int64 (B, S)."""
    return calibration_text(checkpoint, settings, split=COMPRESSION)


class ActivationRange:
    """The smallest and the largest number seen, over any number of batches.

    Attributes:
        rule: how the activation will be rounded.
        low, high: smallest and largest number, 0 included.
        tokens: vectors seen.
    """

    def __init__(self, rule: ActivationRule) -> None:
        self.rule = rule
        self.low = self.high = torch.zeros(())
        self.tokens = 0

    def add(self, x: Tensor) -> None:
        """Add a batch (..., K). Does not modify it, and does not wait for its device."""
        if not x.numel():  # an expert that no token of this batch chose
            return
        low, high = torch.aminmax(x.detach())
        self.low = torch.minimum(self.low.to(x.device), low.float())
        self.high = torch.maximum(self.high.to(x.device), high.float())
        self.tokens += x[..., 0].numel()

    def reduce(self, processes: Processes) -> None:
        """The range over what several processes have seen."""
        lows, highs, tokens = zip(*processes.of_all((self.low, self.high, self.tokens)), strict=True)
        self.low, self.high, self.tokens = torch.stack(lows).min(), torch.stack(highs).max(), sum(tokens)

    def scale(self) -> float:
        """s; 1 where only zeros were seen. Of ``tensor_group`` the scale of the scales.

        Raises:
            NumericsError: nothing was seen, or NaN or infinity.
        """
        if not self.tokens:
            raise NumericsError("no activation was seen", hint="calibrate with more samples")
        if not torch.isfinite(self.high - self.low):
            raise NumericsError(
                "an activation holds NaN or infinity", hint="check the model, or its number type"
            )
        low, high = self.rule.limits
        if self.rule.strategy == "tensor_group":
            return float(torch.maximum(-self.low, self.high)) / (E4M3_LARGEST * high) or 1.0
        top = torch.maximum(-self.low, self.high) * 2 if self.rule.symmetric else self.high - self.low
        return float(top / (high - low)) or 1.0

    def zero(self) -> float:
        """z, a whole number; 0 where the rule is symmetric."""
        if self.rule.symmetric:
            return 0.0
        low, high = self.rule.limits
        return float((low - self.low / self.scale()).round().clamp(low, high))


@dataclass(frozen=True)
class StaticScales:
    """Static scales of activations.

    Attributes:
        inputs: scale by module name.
        caches: scales of keys and of values by the name of the attention module.
    """

    inputs: Mapping[str, float] = field(default_factory=dict)
    caches: Mapping[str, tuple[float, float]] = field(default_factory=dict)


def static_scales(
    checkpoint: Checkpoint,
    plan: QuantizationPlan,
    settings: QuantizeSettings,
    work: Path,
    progress: Progress,
    processes: Processes = SINGLE_PROCESS,
) -> StaticScales:
    """The static scales of a plan, from the ranges in the float model over the calibration batches.

    Raises:
        NumericsError: an activation is not finite.
    """
    rules = static_inputs(list(plan.sites.values()))
    if not plan.caches and not rules:
        return StaticScales()
    inputs = {name: ActivationRange(rule) for name, rule in rules.items()}
    cache = plan.kv_cache
    caches = (
        {name: (ActivationRange(cache), ActivationRange(cache)) for name in plan.caches.values()}
        if cache is not None
        else {}
    )

    def prepare(model: nn.Module) -> None:
        for name, seen in inputs.items():
            hook = lambda _, args, seen=seen: _add(seen, args[0])  # noqa: E731
            model.get_submodule(name).register_forward_pre_hook(hook)
        for name, (keys, values) in caches.items():

            def record(k: Tensor, v: Tensor, keys: Any = keys, values: Any = values) -> tuple[Tensor, Tensor]:
                _add(keys, k)
                _add(values, v)
                return k, v

            on_keys_and_values(model.get_submodule(name), record)

    observe(
        checkpoint,
        batches_of(checkpoint, settings),
        SweepOptions(
            work=work / "ranges",
            processes=processes,
            precision=settings.calibration.precision,
            prepare=prepare,
            device=torch.device(pick_device(settings.device)),
            progress=progress,
            what="ranges",
        ),
    )
    for seen in [*inputs.values(), *(tensor for pair in caches.values() for tensor in pair)]:
        seen.reduce(processes)
    return StaticScales(
        input_scales(inputs),
        {name: (keys.scale(), values.scale()) for name, (keys, values) in caches.items()},
    )


def input_scales(ranges: Mapping[str, ActivationRange]) -> dict[str, float]:
    """Static scales by module name; an expert that saw no token gets the largest of its mixture's others.

    Raises:
        NumericsError: nothing was seen, by no expert of a mixture.
    """

    def siblings(name: str) -> list[ActivationRange]:
        pattern = re.compile(re.sub(r"\\.experts\\.\d+\\.", r"\.experts\.\\d+\.", re.escape(name)))
        return [seen for other, seen in ranges.items() if pattern.fullmatch(other) and seen.tokens]

    scales = {}
    for name, seen in ranges.items():
        others = [] if seen.tokens else [other.scale() for other in siblings(name)]
        scales[name] = max(others) if others else seen.scale()
    return scales


def _add(seen: ActivationRange, x: Tensor) -> None:
    if not x.is_meta:
        seen.add(x)
