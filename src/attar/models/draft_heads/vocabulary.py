"""The reduced vocabulary of a head: the target's most frequent tokens.

Published layouts have it as an offset, target token = draft token + d2t[draft token], and as a mask t2d over
the target's vocabulary.

Letters: V tokens of the target, v of the head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def frequent_tokens(tokens: Tensor, vocabulary: int, count: int) -> Tensor:
    """The ``count`` most frequent of some tokens int64 (n,), ascending; of equally frequent ones, and of
    tokens that do not occur, the smaller ones. int64 (count,)."""
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


def register_vocabulary(head: nn.Module, count: int) -> None:
    """Give a head its d2t, int64 (v,), where the head has its own vocabulary; ``count`` 0: the target's."""
    if count:
        head.register_buffer("d2t", torch.zeros(count, dtype=torch.int64))


def set_vocabulary(head: Any, chosen: Tensor | None) -> None:
    """The tokens int64 (v,), ascending, of a head with its own vocabulary."""
    if chosen is not None:
        head.d2t.copy_(offsets_of(chosen))


def tokens_of(head: Any) -> Tensor | None:
    """The tokens int64 (v,) that a head can propose; None: all of its target's."""
    offsets = getattr(head, "d2t", None)
    return None if offsets is None else chosen_of(offsets)
