"""EAGLE learns the next state of its target (Li et al. 2024, arXiv 2401.15077, section 4.2).

    L = SmoothL1(f^_(i+1), f_(i+1)) + weight CE(p_(i+2), q_(i+2)),  p, q = softmax(head(f)), softmax(head(f^))

SmoothL1 is the mean over a state's channels. While it trains, the states that it reads have uniform noise of
(-0.5, 0.5) noise 512 / S, because the states that it drafts from will be its own.

Differs from the paper: the second term is KL(p || q), with the same gradient.

Letters: S tokens a row, H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attar.data.packing import PADDING
from attar.distillation.fused import head_loss
from attar.distillation.head_settings import EagleSettings
from attar.distillation.heads.start import layer_shape
from attar.distillation.heads.target_pass import TargetPass
from attar.distillation.heads.unroll import unroll
from attar.distillation.objectives import forward_kl
from attar.distillation.objectives.chunked import blockwise
from attar.models.anatomy.discover import discover
from attar.models.draft_heads.eagle_module import EagleConfig, EagleHead
from attar.models.head import Head

TOKEN_WEIGHT = 0.1  # of the predicted tokens, by that of the predicted states
LENGTH = 512  # tokens of a row that ``noise`` is for


def make(target: Any, target_head: Head, settings: EagleSettings, chosen: Tensor | None) -> EagleHead:
    """The head before its first step, the sizes of its layers those of the target's own."""
    assert chosen is None, "it drafts with its target's head"
    vocabulary, hidden = target_head.weight.shape
    config = EagleConfig(
        hidden=hidden,
        vocabulary=vocabulary,
        layers=(len(discover(target).blocks),),
        drafts=settings.drafts,
        shape=layer_shape(target, depth=settings.head_layers),
        branches=settings.branches,
    )
    head = EagleHead(config)
    head.start_near()
    return head


def loss(head: EagleHead, target: TargetPass, settings: EagleSettings) -> Tensor:
    """The mean over the positions that count."""
    states = head.project(target.states[:, :-1])
    if head.training and settings.noise:
        size = settings.noise * LENGTH / target.tokens.shape[1]
        states = states + (torch.rand_like(states) - 0.5) * size
    embedded = F.embedding(target.tokens, target.embedding).to(states.dtype)
    where = target.batch.targets[:, 1:] != PADDING
    (predicted,) = (a[where] for a in unroll(head, embedded, states, 1))
    wanted = target.final[:, 1:][where]

    def divergence(z: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        logits = target.head.logits(wanted[part].to(target.head.weight.dtype))
        return blockwise(forward_kl.loss_and_grad, z, logits, out=z)

    wide = torch.promote_types(predicted.dtype, torch.float32)
    distance = F.smooth_l1_loss(predicted.to(wide), wanted.to(wide), reduction="sum")
    distance = distance / max(predicted.numel(), 1)
    return distance + TOKEN_WEIGHT * head_loss(predicted, target.head, divergence)
