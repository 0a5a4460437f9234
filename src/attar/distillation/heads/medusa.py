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
from attar.distillation.heads.target_pass import TargetPass
from attar.distillation.objectives import hard
from attar.distillation.objectives.chunked import ChunkLoss, blockwise
from attar.models.anatomy import discover
from attar.models.draft_heads.medusa import MedusaConfig, MedusaHeads
from attar.models.head import Head


def make(target: Any, own: Head, options: MedusaSettings, tokens: Tensor) -> MedusaHeads:
    """Heads before their first step.

    Args:
        own: the target's head.
        tokens: not needed.
    """
    vocabulary, hidden = own.weight.shape
    layers = (len(discover(target).blocks),)
    config = MedusaConfig(hidden=hidden, vocabulary=vocabulary, layers=layers, drafts=options.drafts)
    heads = MedusaHeads(config)
    heads.start_from(own.weight.detach().float())
    return heads.to(own.weight.device)


def loss(heads: MedusaHeads, target: TargetPass, settings: MedusaSettings) -> Tensor:
    """The mean over the positions of each head, weighted and summed."""
    total = target.final.new_zeros((), dtype=torch.float32)
    for k, linear in enumerate(heads.heads):
        labels = _later(target.batch.targets, k + 1)
        where = labels != PADDING
        chosen, states = labels[where], heads.states(target.final[where], k)
        total = total + settings.decay ** (k + 1) * head_loss(states, Head(linear.weight), _hard(chosen))
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
