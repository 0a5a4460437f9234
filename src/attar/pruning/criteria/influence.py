"""Importance of layers from how much each turns the residual stream.

ShortGPT: Men et al. 2024, arXiv 2403.03853, eq. 1, block influence:

    BI_l = 1 - E_t  h_l,t . h_l+1,t / ( ||h_l,t|| ||h_l+1,t|| )

Letters: h_l,t the hidden state of token t before block l. One forward pass without the head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from attar.pruning.scoring import UnitScoring


def influence(scoring: UnitScoring) -> Tensor:
    """BI, float64 (1, layers). Does not modify the model; a block that is skipped has none."""

    def measure(batch: Tensor) -> Tensor:
        states = block_states(scoring, batch)
        pairs = zip(states, states[1:], strict=False)
        return torch.stack([turned(before, after) for before, after in pairs])[None]

    tokens = sum(batch.numel() for batch in scoring.batches)
    return scoring.total("influence", measure) / tokens


def turned(before: Tensor, after: Tensor) -> Tensor:
    """sum_t (1 - cos(h_t, h'_t)) over all tokens, float64 scalar."""
    return (1 - F.cosine_similarity(before.double(), after.double(), dim=-1)).sum()


def block_states(scoring: UnitScoring, batch: Tensor) -> Sequence[Tensor]:
    """The hidden states (B, S, D) before every block and after the last, float32."""
    blocks = [block.module for block in scoring.anatomy.blocks]
    states: list[Tensor] = []

    def note(_: object, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        states.append((args[0] if args else kwargs["hidden_states"]).float())

    hooks = [block.register_forward_pre_hook(note, with_kwargs=True) for block in blocks]
    try:
        last = scoring.outputs(batch, blocks[-1:], lambda y: y)
    finally:
        for hook in hooks:
            hook.remove()
    return [*states, last[0].reshape(states[0].shape)]
