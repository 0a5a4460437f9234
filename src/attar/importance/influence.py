"""Importance of layers from how much each turns the residual stream.

ShortGPT: Men et al. 2024, arXiv 2403.03853, eq. 1, block influence:

    BI_l = 1 - E_t  h_l,t . h_l+1,t / ( ||h_l,t|| ||h_l+1,t|| )

Letters: h_l,t the hidden state of token t before block l. One forward pass without the head.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from attar.importance.scoring import UnitScoring


def influence(scoring: UnitScoring) -> Tensor:
    """BI, float64 (1, layers). Does not modify the model; a block that is skipped has none."""

    def measure(batch: Tensor) -> Tensor:
        pairs = pairwise(scoring.states(batch))
        return torch.stack([turned(before, after) for before, after in pairs])[None]

    tokens = sum(batch.numel() for batch in scoring.batches)
    return scoring.total("influence", measure) / tokens


def turned(before: Tensor, after: Tensor) -> Tensor:
    """sum_t (1 - cos(h_t, h'_t)) over all tokens, float64 scalar."""
    return (1 - F.cosine_similarity(before.double(), after.double(), dim=-1)).sum()
