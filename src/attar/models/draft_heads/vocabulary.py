"""The reduced vocabulary of a head: the target's most frequent tokens.

Published layouts have it as an offset, target token = draft token + d2t[draft token], and as a mask t2d over
the target's vocabulary.

Letters: V tokens of the target, v of the head.
"""

from __future__ import annotations

import torch
from torch import Tensor


def frequent_tokens(tokens: Tensor, vocabulary: int, count: int) -> Tensor:
    """The ``count`` most frequent of some tokens int64 (n,), ascending; of equally frequent ones, and of
    those that do not occur, the smaller ones. int64 (count,)."""
    counts = torch.bincount(tokens.flatten(), minlength=vocabulary)[:vocabulary]
    chosen = torch.argsort(counts, descending=True, stable=True)[:count]
    return chosen.sort().values


def offsets_of(chosen: Tensor) -> Tensor:
    """d2t int64 (v,) of the chosen tokens, ascending."""
    return chosen - torch.arange(len(chosen), device=chosen.device)


def chosen_of(offsets: Tensor) -> Tensor:
    """The tokens int64 (v,) of d2t."""
    return offsets + torch.arange(len(offsets), device=offsets.device)


def spread(logits: Tensor, chosen: Tensor, vocabulary: int) -> Tensor:
    """Logits (..., v) over the target's vocabulary (..., V); -inf where the head has no token."""
    out = logits.new_full((*logits.shape[:-1], vocabulary), -torch.inf)
    out[..., chosen] = logits
    return out
