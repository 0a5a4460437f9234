"""The expert that all tokens share as further experts of its mixture, so that it costs no operators.

    shared(x) = sum_j down_j(act(gate_j x) up_j x)      neurons [j n, (j + 1) n), zeros fill the last

Its weight stays apart where that would make others larger: codes of more bits than the experts' or of other
groups, a dense weight where theirs are codes. Then a layer has three operators more.

Letters: n neurons of an expert, s of the shared one, J parts, N outputs, K inputs, G inputs of a scale.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attar.kernels.device import planes
from attar.kernels.experts import MixtureWeights
from attar.runtime.runner.device.layout import DENSE, DeviceWeight, stacked, unstacked


def with_shared_expert(mixture: MixtureWeights) -> MixtureWeights:
    """A mixture whose stacked experts (E + J) end with the parts of the shared one, where they fit."""
    weights: Any = (mixture.gate_up, mixture.down)
    shared: Any = (mixture.shared_gate_up, mixture.shared_down)
    if None in shared or not all(map(_fits, weights, shared)):
        return mixture
    neurons: int = weights[1].columns
    joined: list[Any] = [
        stacked([*unstacked(weight), *unstacked(divide(part, neurons))])
        for weight, part, divide in zip(weights, shared, (_of_outputs, _of_inputs), strict=True)
    ]
    return replace(mixture, gate_up=joined[0], down=joined[1], shared_gate_up=None, shared_down=None)


def _fits(experts: DeviceWeight, shared: DeviceWeight) -> bool:
    if experts.bias is not None or shared.bias is not None:
        return False
    if experts.scales is None or shared.scales is None:
        return experts.data.dtype == shared.data.dtype and experts.bits == shared.bits
    groups = experts.columns // experts.scales.shape[-2]
    return groups * shared.scales.shape[-2] == shared.columns and shared.bits <= experts.bits


def _of_outputs(weight: DeviceWeight, neurons: int) -> DeviceWeight:
    """Gate and up (2 s outputs) as experts (J, 2 n)."""
    if weight.bits == DENSE:
        return replace(weight, data=_divided(weight.data.mT, 2, neurons).mT.contiguous())
    scales, zeros = (None if x is None else _divided(x, 2, neurons) for x in (weight.scales, weight.zeros))
    return replace(weight, data=_divided(weight.data, 2, neurons), scales=scales, zeros=zeros)


def _of_inputs(weight: DeviceWeight, neurons: int) -> DeviceWeight:
    """Down (s inputs) as experts (J, n inputs)."""
    if weight.scales is None:
        return replace(weight, data=_divided(weight.data, 1, neurons))
    codes = _divided(planes.cut(weight.data, weight.bits), 1, neurons)
    groups = neurons * len(weight.scales) // weight.columns
    scales, zeros = (
        None if x is None else _divided(x.mT, 1, groups).mT.contiguous()
        for x in (weight.scales, weight.zeros)
    )
    data = torch.stack([planes.join(part, weight.bits) for part in codes])
    return replace(weight, data=data, scales=scales, zeros=zeros)


def _divided(x: Tensor, halves: int, size: int) -> Tensor:
    """(X, halves s) as (J, X, halves size), the end of every half filled with zeros: scales of codes too."""
    x = x.unflatten(-1, (halves, -1))
    x = pad(x, (0, -x.shape[-1] % size)).unflatten(-1, (-1, size))  # (X, halves, J, size)
    return x.movedim(-2, 0).flatten(-2).contiguous()
