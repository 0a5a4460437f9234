"""DFlash and DSpark (``models/draft_heads/block_module.py``): a new drafter, and its loss.

    DFlash   sum over k of w_k CE(q_k, x_k)
    DSpark   sum over k of w_k (0.1 CE(q_k, x_k) + 0.9 |q_k - p_k|_1 + BCE(c_k, 1 - TV(q_k, p_k)))
    w_k = exp(-(k - 1) / gamma)

divided by the sum of the weights. x_(k-1), which the Markov head reads, is the text's own token; the label of
the confidence c_k is a number, through which no gradient flows. A block is predicted as far as its text goes.

Cheng et al. 2026, arXiv 2607.05147, section 3.4. Held-out loss has the same anchors each time.

Letters: k draft of a block from 1, x tokens, n predictions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attar.distillation.head_settings import BlockSettings, DSparkSettings
from attar.distillation.heads.anchors import BlockPredictions, choose_anchors
from attar.distillation.heads.draft_loss import DraftTargets, draft_loss
from attar.distillation.heads.draft_vocabulary import draft_labels
from attar.distillation.heads.report import DraftedChains
from attar.distillation.heads.start import layer_shape, start_block_drafter
from attar.distillation.heads.target_pass import TargetPass
from attar.errors import ModelError
from attar.models.anatomy.discover import discover
from attar.models.draft_heads.block_module import BlockDrafter, DFlashConfig, DSparkConfig
from attar.models.draft_heads.vocabulary import set_vocabulary
from attar.models.head import Head

HIGHEST_RANK = 256  # of the Markov head, by default
CE_WEIGHT, L1_WEIGHT = 0.1, 0.9  # DSpark's: of the text, and of the model's distribution
GAMMA = 4.0  # of the weights of positions


def make(target: Any, target_head: Head, options: BlockSettings, chosen: Tensor | None) -> BlockDrafter:
    """A drafter before its first step, its sizes those of the target's own layers.

    Args:
        own: the target's head.
        chosen: int64 (v,), the tokens of a reduced vocabulary; None: all.

    Raises:
        ModelError: a reduced vocabulary, and a head with a bias.
    """
    blocks, (V, H) = len(discover(target).blocks), target_head.weight.shape
    common: dict[str, Any] = {
        "hidden": H,
        "vocabulary": V,
        "layers": spread_layers(blocks, options.context_layers),
        "drafts": options.drafts,
        "draft_vocabulary": 0 if chosen is None else len(chosen),
        "shape": layer_shape(target, depth=options.head_layers, head_norms=True),
    }
    if isinstance(options, DSparkSettings):
        rank = min(H // 4, HIGHEST_RANK) if options.markov_rank is None else options.markov_rank
        markov: dict[str, Any] = {
            "markov_rank": rank,
            "markov": options.markov,
            "confidence": options.confidence > 0,
        }
        drafter = BlockDrafter(DSparkConfig(**common, **markov))
    else:
        drafter = BlockDrafter(DFlashConfig(**common))
    with torch.no_grad():
        drafter.mask_embedding.normal_(std=float(target.get_input_embeddings().weight.float().std()))
        if chosen is not None:
            if target_head.bias is not None:
                raise ModelError(
                    f"{target.config.model_type}: a reduced draft_vocabulary, and a head with a bias"
                )
            set_vocabulary(drafter, chosen)
            drafter.lm_head.weight.copy_(target_head.weight.detach()[chosen.to(target_head.weight.device)])
    if options.start == "target":
        start_block_drafter(drafter, target)
    drafter.to(target_head.weight.device)
    return drafter


def spread_layers(blocks: int, count: int) -> tuple[int, ...]:
    """Layers of the target that are read: from 1 to the third from the last, evenly, as the published
    drafters have; of a target with fewer, from the first to the last."""
    first, last = 1, blocks - 3
    if last - first < count - 1:
        first, last = 0, blocks - 1
    if count == 1:
        return (blocks // 2,)
    return tuple(sorted({round(first + (last - first) * i / (count - 1)) for i in range(count)}))


def loss(drafter: BlockDrafter, target: TargetPass, settings: BlockSettings) -> Tensor:
    """The weighted mean over the predictions of all blocks."""
    total, weights, *_ = _compared(drafter, target, settings)
    return total / weights.sum().clamp(min=torch.finfo(weights.dtype).tiny)


def chains(drafter: BlockDrafter, target: TargetPass, settings: BlockSettings) -> DraftedChains:
    """How the drafts of some blocks of a batch compare with the target."""
    _, _, accepted, agreed, confidence, counts = _compared(drafter, target, settings, compare=True)

    def table(values: Tensor) -> Tensor:
        rows = torch.full(counts.shape, torch.nan, dtype=torch.float32, device=values.device)
        rows[counts] = values.float()
        return rows.flatten(0, 1)

    confident = None if confidence is None else table(confidence)
    return DraftedChains(table(accepted), table(agreed), confident)


def _compared(
    drafter: BlockDrafter, target: TargetPass, settings: BlockSettings, compare: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """The loss as a sum, its weights (n,), acceptance, agreement and logits of the confidence (n,), and which
    predictions of the blocks they are, bool (b, A, K)."""
    alpha, beta, gain = 1.0, 0.0, 0.0
    if isinstance(settings, DSparkSettings):
        alpha, beta, gain = CE_WEIGHT, L1_WEIGHT, settings.confidence
    generator = None if drafter.training else torch.Generator(target.tokens.device).manual_seed(0)
    anchors, real = choose_anchors(target.batch.targets, settings.anchors, generator)
    blocks = BlockPredictions.of(drafter, target, anchors, real)
    counts, S = blocks.counts, target.tokens.shape[1]
    rows = torch.arange(len(anchors), device=anchors.device)[:, None, None]
    positions = (rows * S + blocks.positions)[counts]
    order = positions.argsort(stable=True)
    back = order.argsort()
    K = counts.shape[-1]
    decay = torch.exp(-torch.arange(K, device=counts.device) / GAMMA).expand_as(counts)[counts]
    weights = decay.to(torch.promote_types(blocks.hidden.dtype, torch.float32))
    markov, latent = drafter.markov_head, None
    if markov is not None:
        latent = markov.latents(blocks.tokens, blocks.hidden)[counts][order]
    total, accepted, agreed = draft_loss(
        blocks.hidden[counts][order],
        _head(drafter, target.head),
        DraftTargets(
            target.final.flatten(0, 1),
            positions[order],
            draft_labels(blocks.labels[counts], drafter.chosen, drafter.config.vocabulary)[order],
            target.head,
            drafter.chosen,
        ),
        weights[order],
        latent=latent,
        bias=None if markov is None else markov.markov_w2.weight,
        alpha=alpha,
        beta=beta,
        compare=compare or beta > 0 or gain > 0,
    )
    accepted, agreed, confidence = accepted[back], agreed[back], None
    if drafter.confidence_head is not None:
        confidence = drafter.confidence_logits(blocks.hidden, blocks.tokens)[counts]
        if gain:
            label = accepted.clamp(0.0, 1.0).to(confidence.dtype)
            missed = F.binary_cross_entropy_with_logits(confidence, label, reduction="none")
            total = total + gain * (missed * weights).sum()
    return total, weights, accepted, agreed, confidence, counts


def _head(drafter: BlockDrafter, target_head: Head) -> Head:
    """The frozen head of the drafter's logits."""
    if not drafter.config.draft_vocabulary:
        return target_head
    return Head(drafter.lm_head.weight.detach(), None, target_head.scale, target_head.softcap)
