"""Blocks of many anchors of a row in one pass: a position anywhere in a row is trained without unrolling.

    keys        [context of the row, S; slots of all blocks, A B]
    a slot of the block at anchor n sees      context j < n,   and all slots of its own block

That is what the block sees when it is drafted after token n (Cheng et al. 2026, arXiv 2607.05147, section
3.4): the anchor's own state does not exist yet.

Letters: b rows a batch, S tokens a row, A anchors a row, B slots of a block, K drafts of a block, H hidden
size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from attar.data.packing import PADDING
from attar.distillation.heads.target_pass import TargetPass
from attar.models.draft_heads.block_module import BlockDrafter
from attar.models.draft_heads.decoder_layer import attention


def choose_anchors(targets: Tensor, count: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Random positions of each row, ascending, whose next token counts.

    Args:
        targets: int64 (b, S), PADDING where the next token does not count.
        count: A at most.
        generator: on the device of the targets; None: the default one.

    Returns:
        positions int64 (b, A), and whether each is one, bool (b, A): rows may have fewer.
    """
    candidates = targets != PADDING
    count = max(1, min(count, int(candidates.sum(1).max())))
    chances = torch.rand(targets.shape, generator=generator, device=targets.device)
    chosen = chances.masked_fill(~candidates, -1.0).topk(count, dim=1).indices.sort(1).values
    return chosen, candidates.gather(1, chosen)


def block_mask(anchors: Tensor, length: int, block: int) -> Tensor:
    """bool (b, A B, S + A B), whether a slot sees a position of the context, or a slot.

    Args:
        anchors: int64 (b, A).
        length: S.
        block: B.
    """
    first = anchors.repeat_interleave(block, 1)[..., None]
    context = torch.arange(length, device=anchors.device) < first
    number = torch.arange(anchors.shape[1], device=anchors.device).repeat_interleave(block)
    same_block = (number[:, None] == number[None, :]).expand(len(anchors), -1, -1)
    return torch.cat([context, same_block], -1)


def run_blocks(drafter: BlockDrafter, target: TargetPass, anchors: Tensor) -> Tensor:
    """States (b, A, B, H) of the blocks at anchors int64 (b, A)."""
    rows, A = anchors.shape
    B, S = drafter.config.block, target.tokens.shape[1]
    read = torch.arange(S, device=anchors.device).expand(rows, -1)
    states = target.states.to(drafter.mask_embedding.dtype)
    keys, values = drafter.context(states, read)
    positions = (anchors[..., None] + torch.arange(B, device=anchors.device)).flatten(1)
    mask = block_mask(anchors, S, B)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = torch.cat([keys[layer], k], 1), torch.cat([values[layer], v], 1)
        return attention(q, k, v, mask)

    first = F.embedding(target.tokens.gather(1, anchors), target.embedding).to(states.dtype)
    x = drafter.slots(first).flatten(1, 2)
    out: Tensor = drafter(x, positions, attend).unflatten(1, (A, B))
    return out


@dataclass(frozen=True)
class BlockPredictions:
    """What the slots of a batch's blocks predict, and from what.

    Attributes:
        hidden: (b, A, K, H) of the slots that predict.
        positions: int64 (b, A, K), positions whose next token each predicts; within the row.
        tokens: int64 (b, A, K), the tokens there: what comes before the predicted one.
        labels: int64 (b, A, K), the text's own next tokens; PADDING where ``counts`` is False.
        counts: bool (b, A, K), whether the text up to there goes on.
    """

    hidden: Tensor
    positions: Tensor
    tokens: Tensor
    labels: Tensor
    counts: Tensor

    @classmethod
    def of(cls, drafter: BlockDrafter, target: TargetPass, anchors: Tensor, real: Tensor) -> BlockPredictions:
        """Of the blocks at anchors int64 (b, A), of which some are ``real``, bool (b, A)."""
        hidden = run_blocks(drafter, target, anchors)[:, :, drafter.config.skipped :]
        K, S = hidden.shape[2], target.tokens.shape[1]
        ahead = anchors[..., None] + torch.arange(K, device=anchors.device)
        positions = ahead.clamp(max=S - 1)
        labels = target.batch.targets.gather(1, positions.flatten(1)).view_as(positions)
        counts = ((labels != PADDING) & (ahead < S) & real[..., None]).cumprod(-1).bool()
        tokens = target.tokens.gather(1, positions.flatten(1)).view_as(positions)
        return cls(hidden, positions, tokens, labels.masked_fill(~counts, PADDING), counts)
