"""Medusa: Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding
Heads", arXiv 2401.10774, section 2.1.

    p_k(x) = softmax(W2_k h_kn),   h_k0 = h,   h_kj = h_k(j-1) + SiLU(W1_kj h_k(j-1) + b_kj)

Head k predicts the token k positions after the next; h is what the target's own head reads, n the residual
layers of a head (the paper has 1). W1 and b begin at 0 and W2 as the target's head, so that every head begins
as the target's own prediction.

Differs from the paper: W2 may be one matrix for all heads (``shared``), because K of them outweigh a small
model, and may have the rows of the most frequent tokens alone (``draft_vocabulary``).

Letters: K heads, n residual layers, H hidden size, V vocabulary, v tokens that a head can propose.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attar.models.draft_heads.config import HeadConfig
from attar.models.draft_heads.static_tree import check_tree
from attar.models.draft_heads.vocabulary import register_vocabulary, tokens_of


@dataclass(frozen=True, kw_only=True)
class MedusaConfig(HeadConfig):
    """K is ``drafts``.

    Attributes:
        residual_layers: n.
        shared: one W2 for all heads.
        tree: paths of the drafts, each the ranks of its tokens from 0, of head 1, 2, ...; empty: the chain of
            likeliest tokens.
    """

    kind: ClassVar[str] = "medusa"
    residual_layers: int = 1
    shared: bool = False
    tree: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "tree", tuple(map(tuple, self.tree)))
        check_tree(self.tree)


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
    """K heads: ``blocks.k.j.linear`` is W1_kj, ``heads.k`` is W2_k; a shared W2 is ``heads.0``."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        size, head_count = config.draft_vocabulary or config.vocabulary, 1 if config.shared else config.drafts
        # a module made for each place: ``[block] * n`` would be one block n times
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(config.hidden) for _ in range(config.residual_layers)))
            for _ in range(config.drafts)
        )
        self.heads = nn.ModuleList(nn.Linear(config.hidden, size, bias=False) for _ in range(head_count))
        register_vocabulary(self, config.draft_vocabulary)

    def start_from(self, weight: Tensor) -> None:
        """Begin as the target's head, W (V, H)."""
        chosen = tokens_of(self)
        with torch.no_grad():
            for head in self.heads:
                head.weight.copy_(weight if chosen is None else weight[chosen.to(weight.device)])

    def weight(self, k: int) -> Tensor:
        """W2 (v, H) of head k, from 0 on."""
        weight: Tensor = self.heads[0 if self.config.shared else k].weight
        return weight

    def output_weights(self) -> Iterator[Tensor]:
        """Every W2."""
        return (head.weight for head in self.heads)

    def states(self, h: Tensor, k: int) -> Tensor:
        """What W2 of head k, from 0 on, reads: (..., H) of states (..., H)."""
        block: nn.Module = self.blocks[k]
        out: Tensor = block(h)
        return out

    def logits(self, h: Tensor, k: int) -> Tensor:
        """(..., v) of head k, from 0 on."""
        return F.linear(self.states(h, k), self.weight(k))
