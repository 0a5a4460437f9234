"""Static scales of activations: the ranges that inputs, keys and values have in the float model, from one
walk over the calibration text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attar.models.fake_quant import on_keys_and_values
from attar.progress import Progress
from attar.quantization.plan import QuantizationPlan, static_inputs
from attar.quantization.ranges import ActivationRange
from attar.walks.sweep import Nothing, sweep

if TYPE_CHECKING:
    from attar.checkpoint import Checkpoint


@dataclass(frozen=True)
class StaticScales:
    """What the scheme needs to know of activations beforehand.

    Attributes:
        inputs: scale by module name.
        caches: scales of keys and of values by the name of the attention module.
    """

    inputs: Mapping[str, float]
    caches: Mapping[str, tuple[float, float]]


def observe(
    checkpoint: Checkpoint,
    chosen: QuantizationPlan,
    batches: Sequence[Tensor],
    *,
    work: Path,
    precision: str,
    device: torch.device,
    progress: Progress,
) -> StaticScales:
    """Run the float model over the batches and note what the static rules of a plan need.

    Raises:
        NumericsError: an activation is not finite.
    """
    rules = static_inputs(list(chosen.sites.values()))
    inputs = {name: ActivationRange(rule) for name, rule in rules.items()}
    cache = chosen.kv_cache
    caches = (
        {name: (ActivationRange(cache), ActivationRange(cache)) for name in chosen.caches.values()}
        if cache is not None
        else {}
    )

    def prepare(model: nn.Module) -> None:
        for name, seen in inputs.items():
            hook = lambda _, args, seen=seen: _add(seen, args[0])  # noqa: E731
            model.get_submodule(name).register_forward_pre_hook(hook)
        for name, (keys, values) in caches.items():

            def look(k: Tensor, v: Tensor, keys: Any = keys, values: Any = values) -> tuple[Tensor, Tensor]:
                _add(keys, k)
                _add(values, v)
                return k, v

            on_keys_and_values(model.get_submodule(name), look)

    sweep(
        checkpoint,
        batches,
        Nothing(),
        work=work,
        select=lambda name: False,
        precision=precision,
        prepare=prepare,
        device=device,
        progress=progress,
        what="ranges",
    )
    return StaticScales(
        {name: seen.scale() for name, seen in inputs.items()},
        {name: (keys.scale(), values.scale()) for name, (keys, values) in caches.items()},
    )


def _add(seen: ActivationRange, x: Tensor) -> None:
    if not x.is_meta:
        seen.add(x)
