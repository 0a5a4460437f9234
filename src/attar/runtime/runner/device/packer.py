"""Weights of a checkpoint as a device multiplies them: what ``model_weights`` builds a model of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attar.kernels.experts import MixtureWeights
from attar.kernels.packed import Kind, quantize
from attar.runtime.runner.codes import PackedCodes
from attar.runtime.runner.device.layout import DeviceWeight, device_codes, placed_bias, stacked
from attar.runtime.runner.device.product_times import dense_kernel, fastest
from attar.runtime.runner.device.shared_expert import with_shared_expert


@dataclass(frozen=True)
class DevicePacker:
    """Makes weights of a device; see :class:`attar.runtime.runner.compiled_weights.WeightPacker`.

    Args:
        dtype: of dense weights.
        kind: int8 or int4: dense weights are rounded to nearest, a scale for ``group`` inputs; None: they
            stay dense.
    """

    device: torch.device
    dtype: torch.dtype
    kind: Kind | None = None
    group: int = 32

    def codes(self, weight: PackedCodes, bias: Tensor | None, *, sparse: bool) -> DeviceWeight:
        """Of codes; zeros of 2:4 weights are stored."""
        return device_codes(weight, bias, self.device)

    def dense(self, weight: Tensor, bias: Tensor | None, *, sparse: bool) -> DeviceWeight:
        """Of a dense matrix."""
        if self.kind is None:
            moved = weight.to(self.device, self.dtype).contiguous()
            kernel = dense_kernel(fastest(self.device), *moved.shape)
            return DeviceWeight(moved, bias=placed_bias(bias, self.device), kernel=kernel)
        codes, scales = quantize(weight, self.kind, self.group)
        return device_codes(PackedCodes(codes, scales, None, self.kind), bias, self.device)

    def unrounded(self, weight: Tensor) -> DeviceWeight:
        """Of a dense matrix that is not rounded."""
        return DeviceWeight(weight.to(self.device, self.dtype).contiguous())

    def stack(self, experts: tuple[Any, ...]) -> DeviceWeight:
        """Of the experts of a layer."""
        return stacked(experts)

    def mixture(self, weights: MixtureWeights) -> MixtureWeights:
        """With the shared expert among the others, where it fits."""
        return with_shared_expert(weights)
