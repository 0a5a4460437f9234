"""Medusa-1: the heads learn from the text, the target is frozen (Cai et al. 2024, arXiv 2401.10774, eq. 1).

    L = sum over k of decay^k CE(p_k at s, token s + 1 + k),   k from 1: the target's own head predicts s + 1

Letters: B rows, S tokens a row, K heads, H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attar.data.packing import PADDING
from attar.distillation.fused import head_loss
from attar.distillation.head_settings import MedusaSettings
from attar.distillation.heads.draft_vocabulary import draft_labels
from attar.distillation.heads.target_pass import TargetPass
from attar.distillation.objectives import hard
from attar.distillation.objectives.chunked import ChunkLoss, blockwise
from attar.models.anatomy import discover
from attar.models.draft_heads.medusa import MedusaConfig, MedusaHeads
from attar.models.draft_heads.vocabulary import set_vocabulary, tokens_of
from attar.models.head import Head


def make(target: Any, own: Head, settings: MedusaSettings, chosen: Tensor | None) -> MedusaHeads:
    """The heads before their first step."""
    vocabulary, hidden = own.weight.shape
    config = MedusaConfig(
        hidden=hidden,
        vocabulary=vocabulary,
        layers=(len(discover(target).blocks),),
        drafts=settings.drafts,
        draft_vocabulary=0 if chosen is None else len(chosen),
        residual_layers=settings.residual_layers,
        shared=settings.shared_head,
    )
    heads = MedusaHeads(config)
    set_vocabulary(heads, chosen)
    heads.start_from(own.weight.detach().cpu().float() * own.scale)
    return heads


def loss(heads: MedusaHeads, target: TargetPass, settings: MedusaSettings) -> Tensor:
    """The mean over the positions of each head, weighted and summed."""
    total = target.final.new_zeros((), dtype=torch.float32)
    chosen = tokens_of(heads)
    for k in range(heads.config.drafts):
        labels = draft_labels(_later(target.batch.targets, k + 1), chosen, heads.config.vocabulary)
        where = labels != PADDING
        states = heads.states(target.final[where], k)
        value = head_loss(states, Head(heads.weight(k)), _hard(labels[where]))
        total = total + settings.decay ** (k + 1) * value
    return total


def _hard(labels: Tensor) -> ChunkLoss:
    """Cross-entropy of labels (n,)."""
    return lambda z, part: blockwise(hard.slopes, z, labels[part], out=z)


def _later(targets: Tensor, k: int) -> Tensor:
    """Targets (B, S) k positions later, where all up to there count."""
    rest = targets[:, k:]
    for back in range(k):
        rest = torch.where(targets[:, back : back + rest.shape[1]] == PADDING, PADDING, rest)
    return torch.nn.functional.pad(rest, (0, k), value=PADDING)
