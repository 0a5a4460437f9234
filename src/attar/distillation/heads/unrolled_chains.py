"""How the chains of an unrolled head (``unroll.py``) compare with its target, along the target's own text.

Letters: B rows, S tokens a row, K drafts of a chain, H hidden size, V vocabulary, n positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attar.data.packing import PADDING
from attar.distillation.fused import chunk_rows
from attar.distillation.heads.report import DraftedChains
from attar.distillation.heads.target_pass import TargetPass
from attar.distillation.heads.unroll import unroll


@torch.no_grad()  # type: ignore[untyped-decorator]
def chains(head: Any, target: TargetPass, settings: Any) -> DraftedChains:
    """Of a chain after each position whose next token counts; NaN from where one does not.

    Args:
        head: ``EagleHead`` or ``Eagle3Head``.
    """
    states, counts = head.project(target.states[:, :-1]), target.batch.targets != PADDING
    embedded = F.embedding(target.tokens, target.embedding).to(states.dtype)
    (B, S), K = states.shape[:2], head.config.drafts
    acceptance, agreement = (torch.full((B, S, K), torch.nan, device=states.device) for _ in range(2))
    complete = torch.ones(B, S, dtype=torch.bool, device=states.device)
    for k, a in enumerate(unroll(head, embedded, states, min(K, S))):
        complete = complete[:, : S - k] & counts[:, 1 + k :]
        compared = _compared(head, target, a[:, : S - k][complete], target.final[:, 1 + k :][complete])
        for values, column in zip((acceptance, agreement), compared, strict=True):
            values[:, : S - k, k][complete] = column
    started = counts[:, 1:]
    return DraftedChains(acceptance[started], agreement[started])


def _compared(head: Any, target: TargetPass, a: Tensor, final: Tensor) -> tuple[Tensor, Tensor]:
    """1 - TV(q, p), and whether their likeliest tokens are the same: two of (n,)."""
    overlap, same = ([torch.empty(0, device=a.device)] for _ in range(2))
    for part, f in zip(*(x.split(chunk_rows(len(x), target.head.weight)) for x in (a, final)), strict=True):
        p = target.head.logits(f.to(target.head.weight.dtype)).float().softmax(-1)
        q = head.logits(part, _logits_of(target)).float().softmax(-1)
        overlap.append(torch.minimum(p, q).sum(-1))
        same.append((p.argmax(-1) == q.argmax(-1)).float())
    return torch.cat(overlap), torch.cat(same)


def _logits_of(target: TargetPass) -> Any:
    return lambda f: target.head.logits(f.to(target.head.weight.dtype))
