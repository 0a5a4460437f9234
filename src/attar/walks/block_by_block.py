"""A language model larger than memory: each pass reads its blocks from the checkpoint, one after the other.

    hidden = embeddings(tokens)
    for block in blocks:  load it, hidden = block(hidden), drop it
    logits = head(norm(hidden))

In memory: one block in float32, the embedding's used rows, the head, hidden states and logits of a pass. A
pass reads all weights once, so it pays with many tokens; for decoding token by token it is far too slow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attar.errors import ModelError
from attar.walks.offloaded_model import HiddenStates, OffloadedModel


@dataclass(frozen=True)
class Output:
    """What a pass returns: logits (B, S, V), float32."""

    logits: Tensor


class BlockByBlock:
    """A causal language model that is called as those of transformers are, without a cache.

    Args:
        checkpoint: with dense tensors, or a view that decodes packed ones.
        prepare: called with the model (parameters on meta) before it runs, to attach the rounding of
            activations of its scheme.
        dtype: of the products, float32 or bfloat16; everything else is float32.

    Raises:
        ModelError: the model has no head that predicts tokens.
    """

    def __init__(
        self,
        checkpoint: Any,
        *,
        prepare: Callable[[Any], None] = lambda model: None,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        self.device, self.dtype = torch.device(device), dtype
        self.offloaded = OffloadedModel(checkpoint, self.device)
        self.config = self.offloaded.model.config
        if not self.offloaded.anatomy.causal or not self.offloaded.anatomy.head:
            kind = type(self.offloaded.model).__name__
            raise ModelError(f"{checkpoint.path.name} is a {kind}, which does not predict next tokens")
        prepare(self.offloaded.model)

    def get_output_embeddings(self) -> Any:
        """The head, on the meta device: its shape counts."""
        return self.offloaded.model.get_submodule(self.offloaded.anatomy.head)

    def __call__(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any) -> Output:
        """Logits of a batch.

        Args:
            input_ids: int64 (B, S).
            attention_mask: (B, S), 0 where there is no token, whose logits are 0.
        """
        real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        rows = [ids[kept.bool()][None] for ids, kept in zip(input_ids, real, strict=True)]
        batches = [input_ids] if attention_mask is None else [row for row in rows if row.numel()]
        parts = iter(self._logits(batches))
        if attention_mask is None:
            return Output(next(parts))
        width = int(self.get_output_embeddings().weight.shape[0])
        logits = torch.zeros(*input_ids.shape, width, device=self.device)
        for number, row in enumerate(rows):
            if row.numel():
                logits[number][real[number].bool()] = next(parts)[0]
        return Output(logits)

    def _logits(self, batches: list[Tensor]) -> list[Tensor]:
        """Logits (B, S, V) of batches without padding, in one walk over the blocks."""
        offloaded = self.offloaded
        store = HiddenStates(Path(), 2**62)  # all in memory
        with torch.no_grad():
            calls = offloaded.trace(batches, store)
            for index in range(len(offloaded.blocks)):
                offloaded.advance(index, store, calls, fast=self.dtype == torch.bfloat16)
            used = torch.cat([batch.flatten() for batch in batches]).unique()
            with offloaded.with_lm_head(used):
                return [self._head(batch, store[number]) for number, batch in enumerate(batches)]

    def _head(self, batch: Tensor, hidden: Tensor) -> Tensor:
        logits = self.offloaded.logits(batch, hidden.to(self.device))
        assert logits is not None, "a model with a head gives logits"
        return logits.float()
