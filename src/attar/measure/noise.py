"""The noise floor of a KL: a model against itself with its matrix products in bfloat16.

bfloat16 keeps 8 bits of a number. Processors with such products round both factors to it, add in float32 and
round the sum; that is computed here with float32's products, so that it takes little longer than float32 on
any processor. Norms, activations and residuals stay in float32, as under autocast.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from attar.measure.uncertainty import row_stderr

PRODUCTS = frozenset(
    {
        functional.linear,
        functional.scaled_dot_product_attention,
        torch.addmm,
        torch.baddbmm,
        torch.bmm,
        torch.einsum,
        torch.matmul,
        torch.mm,
        Tensor.__matmul__,
        Tensor.bmm,
        Tensor.matmul,
        Tensor.mm,
    }
)


class Bfloat16Products(TorchFunctionMode):  # type: ignore[misc]
    """A context in which products of float32 tensors are those of bfloat16: factors and results rounded."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function not in PRODUCTS:
            return function(*args, **(kwargs or {}))
        return _rounded(function(*map(_rounded, args), **(kwargs or {})))


def _rounded(value: Any) -> Any:
    """A float32 tensor to the precision of bfloat16; anything else as it is."""
    is_float32 = isinstance(value, Tensor) and value.dtype == torch.float32
    return value.bfloat16().float() if is_float32 else value


def noise_floor(distances: Sequence[Tensor]) -> dict[str, Any]:
    """The fields of a :class:`attar.measure.comparison.Divergence`.

    Args:
        distances: KL (n,) of each row between a model and itself with products in bfloat16.
    """
    mean = float(torch.cat(list(distances)).mean())
    return {"kl_noise_floor": mean, "kl_noise_floor_row_stderr": row_stderr(distances)}
