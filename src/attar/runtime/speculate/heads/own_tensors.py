"""The target's own embedding and head, which draft heads share. They stay where its runner has them.

Rows of the embedding are as they are stored, also where the target scales them; so are those that heads are
trained with (``distillation/heads/target_pass.py``). A compiled target's head is multiplied as packed.

Letters: n tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attar.errors import ModelError
from attar.kernels.product import ThreadPool
from attar.runtime.runner.compiled import Compiled
from attar.runtime.runner.device.runner import Device


@dataclass(frozen=True, eq=False)
class OwnTensors:
    """What a draft head shares with its target.

    Attributes:
        embedding: (V, H), any float type.
        product: logits float32 (n, V) of states (n, H), before scale and cap.
        scale: of the logits.
        softcap: of the logits; 0: none.
    """

    embedding: Tensor
    product: Callable[[Tensor], Tensor]
    scale: float = 1.0
    softcap: float = 0.0

    def embed(self, tokens: Tensor) -> Tensor:
        """Rows float32 (..., H) of tokens int64 (...)."""
        return F.embedding(tokens.to(self.embedding.device), self.embedding).float()

    def logits(self, states: Tensor) -> Tensor:
        """The target's logits float32 (n, V) of what its head reads, (n, H)."""
        z = self.product(states) * self.scale
        return (z / self.softcap).tanh() * self.softcap if self.softcap else z


def own_tensors(runner: Any, name: str) -> OwnTensors:
    """Of a runner.

    Args:
        name: of the target, for the error.

    Raises:
        ModelError: the runner has no plain embedding or no head.
    """
    if isinstance(runner, Compiled):
        weights = runner.weights
        return OwnTensors(weights.embedding, _PackedProduct(runner), 1.0, weights.final_soft_cap)
    if isinstance(runner, Device):
        weights = runner.weights
        return OwnTensors(weights.embedding, runner.head_product, 1.0, weights.final_soft_cap)
    model = getattr(runner, "model", None)
    embedding = None if model is None else getattr(model.get_input_embeddings(), "weight", None)
    head = None if model is None else model.get_output_embeddings()
    if model is None or embedding is None or head is None or not embedding.is_floating_point():
        raise ModelError(f"{name}: draft heads share the embedding and the head, and its runner has none")
    config = model.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
    product = _ModuleProduct(head, embedding.dtype)
    return OwnTensors(embedding, product, scale, getattr(config, "final_logit_softcapping", None) or 0.0)


class _ModuleProduct:
    """The head of transformers' modules."""

    def __init__(self, head: Any, dtype: torch.dtype) -> None:
        self.head, self.dtype = head, dtype

    def __call__(self, states: Tensor) -> Tensor:
        logits: Tensor = self.head(states.to(self.dtype))
        return logits.float()


class _PackedProduct:
    """The packed head of a compiled runner, with threads of its own from the first product on."""

    def __init__(self, runner: Compiled) -> None:
        self.head, self.bits, self.threads = runner.weights.head, runner.bits, runner.facts["threads"]

    @cached_property
    def _pool(self) -> ThreadPool:
        pool = ThreadPool(self.threads)
        weakref.finalize(self, pool.close)
        return pool

    def __call__(self, states: Tensor) -> Tensor:
        return self._pool.multiply(states, self.head, bits=self.bits)
