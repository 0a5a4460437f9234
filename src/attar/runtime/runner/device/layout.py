"""Weights in the layout of the device's products (kernels/device/planes.py), from codes or dense matrices.

No code is rounded: codes become as narrow as their values allow (a grid of 2 bits arrives in lanes of 4), and
scales and zero points keep the narrowest type that holds them all exactly.

Letters: N outputs, K inputs, G inputs of a scale, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attar.errors import ModelError
from attar.kernels.device import planes
from attar.kernels.packed import BITS
from attar.runtime.runner.codes import PackedCodes

DENSE = 16  # "bits" of a weight without codes


@dataclass(frozen=True)
class DeviceWeight:
    """A weight (N, K), or with a first dimension E those of experts.

    Attributes:
        data: words int32 (..., K bits / 32, N); dense float (..., N, K).
        scales: float (..., K / G, N); None where dense.
        zeros: (..., K / G, N), uint8 or float; None: the middle, or dense.
        bias: float32 (..., N) or None.
        bits: of a code; DENSE: no codes.
        kernel: cublas: torch's own product; empty: the operator's (linears.py).
    """

    data: Tensor
    scales: Tensor | None = None
    zeros: Tensor | None = None
    bias: Tensor | None = None
    bits: int = DENSE
    kernel: str = ""

    @property
    def rows(self) -> int:
        """N."""
        return int(self.data.shape[-2 if self.bits == DENSE else -1])

    @property
    def columns(self) -> int:
        """K."""
        if self.bits == DENSE:
            return int(self.data.shape[-1])
        return int(self.data.shape[-2]) * planes.WORD // self.bits

    @property
    def experts(self) -> int:
        """E; 1 of a weight by itself."""
        return int(self.data.shape[0]) if self.data.dim() == 3 else 1

    @property
    def tensors(self) -> list[Tensor]:
        """All that it holds."""
        parts = (self.data, self.scales, self.zeros, self.bias)
        return [tensor for tensor in parts if tensor is not None]

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def label(self) -> str:
        """As descriptions have it."""
        if self.bits == DENSE:
            return str(self.data.dtype).removeprefix("torch.")
        return f"int{self.bits}"

    def dense(self) -> Tensor:
        """W float32 (..., N, K), as a product multiplies it."""
        if self.scales is None:
            return self.data.float()
        return planes.dense(self.data, self.scales, self.zeros, self.bits)


def device_codes(weight: PackedCodes, bias: Tensor | None, device: torch.device) -> DeviceWeight:
    """A weight of codes on a device.

    Raises:
        ModelError: the inputs do not fill words.
    """
    if weight.codes.shape[1] % planes.WORD:
        raise ModelError(f"codes of {weight.codes.shape[1]} inputs do not fill words of {planes.WORD}")
    codes, bits = _narrowed(weight)
    words = planes.join(codes.to(device), bits)
    scales = _narrowest(weight.scales, torch.float16, torch.bfloat16).T.contiguous()
    zeros = None
    if weight.zeros is not None:
        zeros = _narrowest(weight.zeros, torch.uint8, torch.float16).T.contiguous().to(device)
    return DeviceWeight(words, scales.to(device), zeros, placed_bias(bias, device), bits)


def stacked(experts: Sequence[DeviceWeight]) -> DeviceWeight:
    """Weights of one shape as one, in the widest codes and types among them."""
    bits = max(expert.bits for expert in experts)
    if bits != DENSE:
        explicit = any(expert.zeros is not None for expert in experts)
        experts = [_widened(expert, bits, explicit) for expert in experts]
    scales, zeros, bias = (
        _stack([part for part in parts if part is not None])
        for parts in zip(*((x.scales, x.zeros, x.bias) for x in experts), strict=True)
    )
    return DeviceWeight(torch.stack([expert.data for expert in experts]), scales, zeros, bias, bits)


def unstacked(weight: DeviceWeight) -> list[DeviceWeight]:
    """Each of the experts (E, ...) of a weight: views."""
    parts = {name: getattr(weight, name) for name in ("data", "scales", "zeros", "bias")}
    tensors = {name: part for name, part in parts.items() if part is not None}

    def of(expert: int) -> dict[str, Any]:
        return {name: part[expert] for name, part in tensors.items()}

    return [replace(weight, **of(expert)) for expert in range(len(weight.data))]


def _stack(given: list[Tensor]) -> Tensor | None:
    if not given:
        return None
    dtype = given[0].dtype
    for part in given:
        dtype = torch.promote_types(dtype, part.dtype)
    return torch.stack([part.to(dtype) for part in given])


def _widened(weight: DeviceWeight, bits: int, explicit: bool) -> DeviceWeight:
    """The same values with codes of more bits, and with zero points if they are to be explicit."""
    if weight.bits == bits and (weight.zeros is not None) >= explicit:
        return weight
    codes, zeros = planes.cut(weight.data, weight.bits), weight.zeros
    assert weight.scales is not None, "codes have scales"
    if zeros is None and explicit:
        zeros = torch.full_like(weight.scales, 2 ** (weight.bits - 1), dtype=torch.uint8)
    elif zeros is None:
        codes = codes + (2 ** (bits - 1) - 2 ** (weight.bits - 1))
    return DeviceWeight(planes.join(codes, bits), weight.scales, zeros, weight.bias, bits)


def _narrowed(weight: PackedCodes) -> tuple[Tensor, int]:
    """Codes and the fewest bits, at least 2, that hold them."""
    if weight.zeros is not None:
        return weight.codes, max(int(weight.codes.max()).bit_length(), 2)
    middle = 1 << (BITS[weight.kind] - 1)
    low, high = int(weight.codes.min()) - middle, int(weight.codes.max()) - middle
    bits = next(bits for bits in range(2, 9) if -(1 << (bits - 1)) <= low and high < 1 << (bits - 1))
    return weight.codes - (middle - (1 << (bits - 1))), bits


def _narrowest(numbers: Tensor, *types: torch.dtype) -> Tensor:
    """Float32 numbers in the first of the types that holds them, else as they are."""
    for dtype in types:
        if dtype == torch.uint8 and not bool(((numbers >= 0) & (numbers <= 255)).all()):
            continue
        if torch.equal(numbers.to(dtype).float(), numbers):
            return numbers.to(dtype)
    return numbers


def placed_bias(bias: Tensor | None, device: torch.device) -> Tensor | None:
    """A bias (N,) as a weight has it: float32."""
    return None if bias is None else bias.to(device, torch.float32).contiguous()
