"""The training-time test of EAGLE-3 (Li et al. 2025, arXiv 2503.01840, section 3.2): what a head makes of its
own states, for every position of a row at once.

Step 0 is a causal pass over the pairs of decided states and tokens. Step j > 0 drafts one more token after
each of them: column i reads the state that step j - 1 made there and the text's token i + 1 + j, at position
i + j, and attends to what a drafting head has there:

    the keys of step 0 up to column i, which are of decided tokens
    the keys of steps 1..j at column i, its own drafts

so that no two columns see each other's drafts; of several layers each has keys of its own. A step's scores
are computed for some queries at a time, and again in the backward pass: memory holds queries, keys and values
of the steps, and the scores of one part.

Letters: B rows, S columns, J steps, h heads, K kv heads, d head dimension, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attar.models.draft_heads.decoder_layer import rotary

SCORES = 1 << 23  # of a part


def unroll(head: Any, embedded: Tensor, states: Tensor, steps: int) -> Iterator[Tensor]:
    """What each step makes (B, S, H), step after step; its column i is after token i + 1 + j.

    Args:
        head: ``EagleHead`` or ``Eagle3Head``.
        embedded: (B, S + 1, H) of all tokens.
        states: (B, S, H), projected, of all tokens but the last.
        steps: J, at most S.
    """
    B, S, H = states.shape
    columns = torch.arange(S, device=states.device)
    depth = head.config.shape.depth
    keys, values = ([list[Tensor]() for _ in range(depth)] for _ in range(2))

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys[layer].append(k)
        values[layer].append(v)
        return unrolled_attention(q, keys[layer], values[layer])

    for j in range(steps):
        later = embedded[:, 1 + j : 1 + j + S]
        later = torch.cat([later, later.new_zeros(B, S - later.shape[1], H)], 1)
        a = head.run(later, states, rotary(columns + j, head.config.shape), attend)
        yield a
        states = head.fed_back(a)


def unrolled_attention(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Heads (B, S, h d) of the last step.

    Args:
        q: (B, S, h, d).
        keys, values: (B, S, K, d) of each step so far.
    """
    B, S, h, _ = q.shape
    rows = max(1, SCORES // (B * h * (S + len(keys))))
    parts = []
    for start in range(0, S, rows):
        part = slice(start, min(start + rows, S))
        drafted = [x[:, part] for x in (*keys[1:], *values[1:])]
        before = (keys[0][:, : part.stop], values[0][:, : part.stop])
        parts.append(checkpoint(_part, start, q[:, part], *before, *drafted, use_reentrant=False))
    return torch.cat(parts, 1)


def _part(start: int, q: Tensor, k: Tensor, v: Tensor, *drafted: Tensor) -> Tensor:
    """Queries (B, n, h, d) of the columns from ``start`` on, keys and values of step 0 up to the last of
    them, and first keys, then values, of later steps at these columns."""
    n, d = q.shape[1], q.shape[-1]
    q = q.unflatten(2, (k.shape[2], -1)) * d**-0.5
    scores = torch.einsum("bnkgd,btkd->bkgnt", q, k)
    seen = (
        torch.arange(k.shape[1], device=q.device) <= torch.arange(start, start + n, device=q.device)[:, None]
    )
    scores = scores.masked_fill(~seen, -torch.inf)
    J = len(drafted) // 2
    drafts = [torch.einsum("bnkgd,bnkd->bkgn", q, key)[..., None].to(scores.dtype) for key in drafted[:J]]
    wide = torch.promote_types(scores.dtype, torch.float32)
    p = torch.cat([scores, *drafts], -1).softmax(-1, dtype=wide).to(v.dtype)
    out = torch.einsum("bkgnt,btkd->bnkgd", p[..., : k.shape[1]], v)
    for step, value in enumerate(drafted[J:]):
        weights = p[..., k.shape[1] + step].permute(0, 3, 1, 2)
        out = out + weights[..., None] * value[:, :, :, None].to(out.dtype)
    return out.flatten(2)
