"""A pass of a frozen target over a batch: what a draft head learns from.

Letters: B rows a batch, S tokens a row, m layers, H hidden size, V vocabulary, n positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attar.data.examples import Examples
from attar.models.head import Head, without_logits
from attar.models.hidden_states import recording_states
from attar.models.inputs import model_inputs


@dataclass(frozen=True)
class TargetPass:
    """What the target makes of a batch.

    Attributes:
        batch: ``targets[b, s]`` is the token after ``inputs[b, s]``, PADDING where it does not count.
        states: (B, S, m, H) of the layers that the head reads.
        final: (B, S, H) what the target's own head reads.
        head: the target's own.
        embedding: (V, H) the target's own, as it is stored.
    """

    batch: Examples
    states: Tensor
    final: Tensor
    head: Head
    embedding: Tensor

    @property
    def tokens(self) -> Tensor:
        """int64 (B, S)."""
        return self.batch.inputs

    def logits(self, where: Tensor) -> Tensor:
        """The target's logits (n, V) at positions: a bool mask (B, S)."""
        return self.head.logits(self.final[where].to(self.head.weight.dtype))


@torch.no_grad()  # type: ignore[untyped-decorator]
def run_target(target: Any, head: Head, layers: tuple[int, ...], batch: Examples) -> TargetPass:
    """Run the target over a batch, without its logits."""
    batch = batch.trimmed()
    with recording_states(target, layers) as states, without_logits(target) as final:
        target(**model_inputs(target, batch))
    embedding = target.get_input_embeddings().weight
    return TargetPass(batch, torch.stack(states, 2), final[-1], head, embedding)
