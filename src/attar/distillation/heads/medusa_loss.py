"""Medusa-1: the heads learn from the text, the target is frozen (Cai et al. 2024, arXiv 2401.10774, eq. 1).

    L = sum over k of decay^k CE(p_k at s, token s + 1 + k),   k from 1: the target's own head predicts s + 1

Letters: B rows, S tokens a row, K heads, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attar.data.examples import Examples
from attar.data.packing import PADDING
from attar.distillation.fused import head_loss
from attar.distillation.head_settings import MedusaSettings
from attar.distillation.heads.draft_vocabulary import draft_labels
from attar.distillation.heads.report import DraftedChains
from attar.distillation.heads.target_pass import TargetPass
from attar.distillation.objectives import hard
from attar.distillation.objectives.chunked import ChunkLoss, blockwise
from attar.models.anatomy.discover import discover
from attar.models.draft_heads.medusa_module import MedusaConfig, MedusaHeads
from attar.models.draft_heads.static_tree import PUBLISHED, Paths, expected_tokens, search_tree, to_depth
from attar.models.draft_heads.vocabulary import set_vocabulary, tokens_of
from attar.models.head import Head

RANKS = 10  # of a head that may be drafted
POSITIONS = 512  # whose logits exist together


def make(target: Any, target_head: Head, settings: MedusaSettings, chosen: Tensor | None) -> MedusaHeads:
    """The heads before their first step."""
    vocabulary, hidden = target_head.weight.shape
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
    heads.start_from(target_head.weight.detach().cpu().float() * target_head.scale)
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


def finish(
    heads: MedusaHeads, target: Callable[[Examples], TargetPass], rows: Sequence[Examples], settings: Any
) -> tuple[DraftedChains, dict[str, Any]]:
    """Measure the heads on batches of held-out rows, and choose their tree. What the card has besides."""
    parts, right, count = [], torch.zeros(heads.config.drafts, RANKS, dtype=torch.float64), 0
    for batch in rows:
        chains, hits, positions = _measured(heads, target(batch))
        parts.append(chains)
        right, count = right + hits.cpu(), count + positions
    accuracies = (right / max(count, 1)).tolist()
    tree: Paths = PUBLISHED.get(settings.tree, ())
    if settings.tree == "search":
        tree = search_tree(accuracies, settings.tree_drafts)
    tree = to_depth(tree, heads.config.drafts)
    heads.config = replace(heads.config, tree=tree)
    chosen = {"drafts": len(tree), "expected_tokens": round(expected_tokens(tree, accuracies), 4)}
    rounded = [[round(value, 4) for value in of_head] for of_head in accuracies]
    return DraftedChains.joined(parts), {"rank_accuracies": rounded, "tree": chosen}


@torch.no_grad()  # type: ignore[untyped-decorator]
def _measured(heads: MedusaHeads, target: TargetPass) -> tuple[DraftedChains, Tensor, int]:
    """The chains of likeliest tokens of a batch, (K, R) how often the target's likeliest token had each rank,
    and of how many positions."""
    K, tokens, device = heads.config.drafts, tokens_of(heads), target.tokens.device
    targets = target.batch.targets
    where = _later(targets, K) != PADDING  # whole chains begin there
    count, (rows, starts) = int(where.sum()), where.nonzero(as_tuple=True)
    accepted, agreed = (torch.full((count, K), torch.nan, device=device) for _ in range(2))
    right = torch.zeros(K, RANKS, dtype=torch.float64, device=device)
    for k in range(K):
        for part in torch.arange(count, device=device).split(POSITIONS):
            row, start = rows[part], starts[part]
            logits = heads.logits(target.final[row, start], k)
            ranked = logits.topk(min(RANKS, logits.shape[-1]), -1).indices
            ranked = ranked if tokens is None else tokens[ranked]
            ahead = torch.zeros_like(where)
            ahead[row, start + k + 1] = True
            p = target.logits(ahead).float().softmax(-1)
            hits = ranked == p.argmax(-1, keepdim=True)
            right[k, : hits.shape[1]] += hits.double().sum(0)
            accepted[part, k] = p.gather(-1, ranked[:, :1])[:, 0]
            agreed[part, k] = hits[:, 0].float()
    return DraftedChains(accepted, agreed), right, count


def _hard(labels: Tensor) -> ChunkLoss:
    """Cross-entropy of labels (n,)."""
    return lambda z, part: blockwise(hard.loss_and_grad, z, labels[part], out=z)


def _later(targets: Tensor, k: int) -> Tensor:
    """Targets (B, S) k positions later, where all up to there count."""
    later = targets[:, k:]
    for back in range(k):
        later = torch.where(targets[:, back : back + later.shape[1]] == PADDING, PADDING, later)
    return torch.nn.functional.pad(later, (0, k), value=PADDING)
