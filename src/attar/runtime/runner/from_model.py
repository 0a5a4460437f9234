"""A runner of a model that is in memory, as a training loop has it: no checkpoint is written.

The compiled step packs the weights anew, rounded to bfloat16: that is the refresh after a training step.
Where it does not run the model (another family, a GPU, no compiler), transformers' modules do: a copy of the
module tree that shares every parameter and buffer with the model, so that it always has the model's weights,
while its own attention is replaced and the model itself stays as it is.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from attar.errors import ModelError, UsageError
from attar.kernels.product import default_activation_bits
from attar.kernels.structures import library
from attar.runtime.runner.compiled import Compiled, compiled
from attar.runtime.runner.modules import Modules

BLOCK = 16  # tokens of a block


def runner_of(model: Any, *, sequences: int, length: int, exact: bool = False) -> Compiled | Modules:
    """A runner with a pool for some sequences at a time. It does not follow the model's weights: make a new
    one after they change.

    Args:
        model: a causal language model of transformers, peft's wrapper included; left as it is.
        length: tokens of a sequence.
        exact: weights must not be rounded: the compiled step only where bfloat16 holds them.

    Raises:
        ModelError: its attention is not supported, with its name.
    """
    blocks = sequences * -(-length // BLOCK)
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    if model.device.type == "cpu" and library() is not None and not (exact and _rounds(model)):
        try:
            return _compiled(model, blocks, length)
        except (ModelError, UsageError):  # the modules run every family
            pass
    return Modules(shared_copy(model).eval(), blocks=blocks, block_size=BLOCK)


def _compiled(model: Any, blocks: int, length: int) -> Compiled:
    context = min(length, getattr(model.config, "max_position_embeddings", None) or length)
    bits = default_activation_bits()
    kv_dtype = {8: "bfloat16", 16: "float16"}[bits]
    options: dict[str, Any] = {"context": context, "blocks": blocks, "block_size": BLOCK, "bits": bits}
    with torch.no_grad():
        return compiled(model.config, model.state_dict(), kv_dtype=kv_dtype, **options)


def _rounds(model: Any) -> bool:
    """Whether bfloat16 changes a matrix of a model."""
    matrices = (p for p in model.parameters() if p.dim() > 1)
    return any(not torch.equal(p, p.to(torch.bfloat16).to(p.dtype)) for p in matrices)


def shared_copy(model: Any) -> Any:
    """A copy of a module tree with the same parameters and buffers."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)
