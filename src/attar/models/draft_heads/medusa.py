"""Medusa: Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding
Heads", arXiv 2401.10774, section 2.1.

    p_k(x) = softmax(W2_k (h + SiLU(W1_k h + b_k)))      head k predicts the token k positions after the next

h is what the target's own head reads. W1 and b begin at 0 and W2 as the target's head, so that every head
begins as the target's own prediction.

Letters: K heads, n positions, H hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attar.models.draft_heads.config import HeadConfig


@dataclass(frozen=True, kw_only=True)
class MedusaConfig(HeadConfig):
    """K is ``drafts``."""

    kind: ClassVar[str] = "medusa"


class ResidualBlock(nn.Module):  # type: ignore[misc]
    """h + SiLU(W1 h + b)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, h: Tensor) -> Tensor:
        """(..., H) to (..., H)."""
        return h + F.silu(self.linear(h))


class MedusaHeads(nn.Module):  # type: ignore[misc]
    """K heads."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        size = config.draft_vocabulary or config.vocabulary
        self.blocks = nn.ModuleList(ResidualBlock(config.hidden) for _ in range(config.drafts))
        self.heads = nn.ModuleList(nn.Linear(config.hidden, size, bias=False) for _ in range(config.drafts))

    def start_from(self, weight: Tensor) -> None:
        """Begin as the target's head, W (V, H)."""
        with torch.no_grad():
            for head in self.heads:
                head.weight.copy_(weight)

    def states(self, h: Tensor, k: int) -> Tensor:
        """What head k, from 0 on, reads: (..., H) of states (..., H)."""
        block: nn.Module = self.blocks[k]
        out: Tensor = block(h)
        return out

    def logits(self, h: Tensor, k: int) -> Tensor:
        """(..., V) of head k, from 0 on."""
        head: nn.Module = self.heads[k]
        out: Tensor = head(self.states(h, k))
        return out
