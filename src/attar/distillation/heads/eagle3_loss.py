"""EAGLE-3 learns to draft after its own drafts (Li et al. 2025, arXiv 2503.01840, section 3.2).

    L = sum over steps j of decay^j KL(p_(i+1+j) || q^(j)_i)        i columns of the unrolled head (unroll.py)

p is the target's distribution over the head's vocabulary, renormalized; a position counts where the token
after it does, and where the target's likeliest token is in the head's vocabulary.

Differs from the paper: the divergence, which is its cross-entropy less the entropy of p, with the same
gradient; the mean is over the positions that count.

Letters: B rows, S tokens a row, m layers, H hidden size, V vocabulary of the target, v of the head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attar.data.packing import PADDING
from attar.distillation.fused import chunk_rows, head_loss
from attar.distillation.head_settings import EAGLE3_NORMS, Eagle3Settings
from attar.distillation.heads.start import layer_shape, start_eagle3
from attar.distillation.heads.target_pass import TargetPass
from attar.distillation.heads.unroll import unroll
from attar.distillation.objectives import forward_kl
from attar.distillation.objectives.chunked import ChunkLoss, blockwise
from attar.models.anatomy.discover import discover
from attar.models.draft_heads.eagle3_module import Eagle3Config, Eagle3Head
from attar.models.draft_heads.vocabulary import set_vocabulary, tokens_of
from attar.models.head import Head


def make(target: Any, target_head: Head, settings: Eagle3Settings, chosen: Tensor | None) -> Eagle3Head:
    """The head before its first step, the sizes of its layers those of the target's own."""
    V, H = target_head.weight.shape
    config = Eagle3Config(
        hidden=H,
        vocabulary=V,
        layers=read_layers(len(discover(target).blocks)),
        drafts=settings.drafts,
        draft_vocabulary=0 if chosen is None else len(chosen),
        shape=layer_shape(target, depth=settings.head_layers),
        branches=settings.branches,
        **EAGLE3_NORMS[settings.norms],
    )
    head = Eagle3Head(config)
    set_vocabulary(head, chosen)
    head.start_from(target_head.weight.detach().cpu().float() * target_head.scale)
    if settings.start == "target":
        start_eagle3(head, target)
    return head


def read_layers(blocks: int) -> tuple[int, ...]:
    """The published ones: what enters layers 2, L // 2 and L - 3; of a target with fewer than 8 layers, the
    first, the middle and the last."""
    if blocks >= 8:
        return (1, blocks // 2 - 1, blocks - 4)
    return tuple(sorted({0, blocks // 2, blocks - 1}))


def loss(head: Eagle3Head, target: TargetPass, settings: Eagle3Settings) -> Tensor:
    """The sum over steps of the weighted mean over positions."""
    counts = _counts(head, target)
    total = target.final.new_zeros((), dtype=torch.float32)
    states, S = head.project(target.states[:, :-1]), counts.shape[1] - 1
    embedded = F.embedding(target.tokens, target.embedding).to(states.dtype)
    for j, a in enumerate(unroll(head, embedded, states, min(settings.unrolled, S))):
        where = counts[:, 1 + j :]
        chunk_loss = _divergence(head, target, where, j)
        step = head_loss(head.norm(a[:, : S - j][where]), Head(head.lm_head.weight), chunk_loss)
        total = total + settings.decay**j * step
    return total


def _divergence(head: Eagle3Head, target: TargetPass, where: Tensor, j: int) -> ChunkLoss:
    """KL(p || q) of step j at positions bool (B, S - 1 - j)."""
    final, tokens = target.final[:, 1 + j :][where], tokens_of(head)

    def chunk_loss(z: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        return blockwise(forward_kl.loss_and_grad, z, _logits(target.head, final[part], tokens), out=z)

    return chunk_loss


def _logits(target_head: Head, final: Tensor, tokens: Tensor | None) -> Tensor:
    """The target's logits (n, v) of final states (n, H), over some tokens."""
    logits = target_head.logits(final.to(target_head.weight.dtype))
    return logits if tokens is None else logits[:, tokens]


def _counts(head: Eagle3Head, target: TargetPass) -> Tensor:
    """bool (B, S): at which positions the target's distribution is learned."""
    counts = target.batch.targets != PADDING
    tokens = tokens_of(head)
    if tokens is None:
        return counts
    final, likeliest = target.final[counts], list[Tensor]()
    for part in final.split(chunk_rows(len(final), target.head.weight)):
        likeliest.append(_logits(target.head, part, None).argmax(-1))
    known = torch.zeros(head.config.vocabulary, dtype=torch.bool, device=final.device)
    known[tokens] = True
    counts = counts.clone()
    counts[counts.clone()] = known[torch.cat(likeliest)]
    return counts
