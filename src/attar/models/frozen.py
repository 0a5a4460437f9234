"""A frozen model in less memory where products are in bf16.

Autocast rounds a Linear's weight to bf16 before each product. A weight that is not trained can be rounded
once: the same numbers, half the memory, and no rounding in each pass. Embeddings, norms and what is tied to
an embedding stay as they are: they are not rounded under autocast.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from attar.models.anatomy.roles import is_linear


def round_frozen(model: Any) -> int:
    """Keep the weights of Linears in bf16, in place. Returns the bytes that became free.

    Args:
        model: frozen, and run under autocast to bf16 from now on.
    """
    parameters = [parameter for _, parameter in model.named_parameters(remove_duplicate=False)]
    shared = {id(p) for p in parameters if sum(other is p for other in parameters) > 1}
    freed = 0
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, nn.Parameter) or not is_linear(module) or id(weight) in shared:
            continue
        if weight.dtype == torch.float32 and not weight.requires_grad:
            freed += weight.nbytes // 2
            weight.data = weight.data.to(torch.bfloat16)
    return freed
