"""Linears that keep a quantized weight as small as its file has it, in place of transformers' own.

    PackedLinear    codes on an even grid: y = x W^T in the compiled library, rows of x rounded to int16 or
                    int8 with a scale for each group of inputs; in torch where there is no library, and then
                    not rounded
    DecodedLinear   any other layout (FP8, NF4, EXL2): the stored tensors are held, and decoded for each
                    product, one weight at a time

Both give the type of their input. The activations of W8A8 are those of the first; other rounding of
activations that a scheme asks for is not done (``dtype="float32"`` loads a model that does it).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from attar.kernels.product import ThreadPool
from attar.runtime.runner.codes import PackedCodes


class PackedLinear(nn.Module):  # type: ignore[misc]
    """y = x W^T + bias, W as codes.

    Args:
        codes: of W (N, K).
        bias: (N,) or None.
        team: who multiplies; shared by all Linears of a model.
        bits: that rows of x are rounded to.
    """

    def __init__(self, codes: PackedCodes, bias: Tensor | None, team: ThreadPool, bits: int = 16) -> None:
        super().__init__()
        self.packed, self.order, self.bits, self._team = codes.pack(bias), codes.order, bits, team
        self.in_features, self.out_features = self.packed.columns, self.packed.rows

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if self.order is not None:
            rows = rows[:, self.order]
        return (
            self._team.multiply(rows, self.packed, bits=self.bits)
            .to(x.dtype)
            .view(*x.shape[:-1], self.out_features)
        )


class DecodedLinear(nn.Module):  # type: ignore[misc]
    """y = x W^T + bias, W decoded each time.

    Args:
        weight: decodes W (N, K), or (K, N) where ``turned``.
        bias: (N,) or None.
        turned: W is that of a Conv1D.
    """

    def __init__(self, weight: Callable[[], Tensor], bias: Tensor | None, turned: bool) -> None:
        super().__init__()
        self._weight, self._bias, self._turned = weight, bias, turned

    def forward(self, x: Tensor) -> Tensor:
        weight = self._weight().to(x.dtype)
        bias = None if self._bias is None else self._bias.to(x.dtype)
        return torch.nn.functional.linear(x, weight.T if self._turned else weight, bias)
