"""The rotation of a model's keys and queries, found and proven: what StreamingLLM needs to move the sinks.

    turned(x, a): in each pair (x_i, x_{i + m}) of the first 2m numbers, an angle of a f_i        f = inv_freq

That a model rotates in this way is not believed of its config: a token that is alone has hidden states that
do not depend on its position, so its key at position 7 must be its key at position 0, turned by 7, in each
layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attar.errors import ModelError
from attar.runtime.runner.probe import shown

AT = 7  # the position of the proof


class Rotary:
    """The frequencies of each layer.

    Args:
        model: taken over by a runner.
        layers: how many.

    Raises:
        ModelError: its keys are not rotated in this way.
    """

    def __init__(self, model: Any, layers: int) -> None:
        self.frequencies = [_frequencies(model, layer) for layer in range(layers)]
        zero, far = (shown(model, position)[0].keys for position in (0, AT))
        for layer in range(layers):
            shift = torch.tensor([AT], device=zero[layer].device)
            want = self.turned(zero[layer].float(), shift, layer)
            if not torch.allclose(
                far[layer].float(), want, atol=1e-3 * float(want.abs().max()) * _loose(model)
            ):
                raise ModelError(
                    f"{type(model).__name__}: layer {layer} does not rotate its keys by position"
                )

    def turned(self, x: Tensor, positions: Tensor, layer: int) -> Tensor:
        """x (t, heads, d) turned by positions int64 (t,), which may be negative; computed in float32."""
        f = self.frequencies[layer]
        angles = positions.to(torch.float64)[:, None] * f.to(torch.float64)
        cos, sin = angles.cos().float()[:, None], angles.sin().float()[:, None]  # (t, 1, m)
        m = len(f)
        one, two, rest = x[..., :m].float(), x[..., m : 2 * m].float(), x[..., 2 * m :]
        turned = torch.cat([one * cos - two * sin, two * cos + one * sin], dim=-1)
        return torch.cat([turned.to(x.dtype), rest], dim=-1)


def _frequencies(model: Any, layer: int) -> Tensor:
    kinds = getattr(model.config.get_text_config(), "layer_types", None)
    names = (f"{kinds[layer]}_inv_freq", "inv_freq") if kinds else ("inv_freq",)
    for name in names:
        for module in model.modules():
            found = getattr(module, name, None)
            if isinstance(found, torch.Tensor):
                return found.detach()
    raise ModelError(f"{type(model).__name__} has no rotary positions")


def _loose(model: Any) -> float:
    """How much rounder a model's numbers are than float32's, for the proof."""
    return 1.0 if model.dtype == torch.float32 else 30.0
