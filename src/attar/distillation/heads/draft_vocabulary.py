"""The reduced vocabulary of a head that is trained: which tokens it can propose, and what is learned of them.

Its tokens are the most frequent ones of what its rows predict. A position whose token is none of them teaches
nothing: the head cannot propose it.

Letters: n predictions, V tokens of the target, v of the head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attar.data.examples import Examples
from attar.data.packing import PADDING
from attar.errors import SettingsError
from attar.models.draft_heads.vocabulary import frequent_tokens


def choose_tokens(rows: Examples, vocabulary: int, count: int) -> Tensor | None:
    """The head's tokens int64 (v,), ascending; None: all.

    Args:
        rows: the different ones.
        vocabulary: V.
        count: v; 0: V.
    """
    return frequent_tokens(rows.labels, vocabulary, count) if 0 < count < vocabulary else None


def check_draft_vocabulary(count: int, vocabulary: int) -> None:
    """Raises SettingsError where the head would have more tokens than its target."""
    if count > vocabulary:
        raise SettingsError("draft_vocabulary", count, f"at most the model's {vocabulary}")


def draft_labels(labels: Tensor, chosen: Tensor | None, vocabulary: int) -> Tensor:
    """Labels int64 in the head's numbers, ``PADDING`` where it has no such token."""
    if chosen is None:
        return labels
    numbers = torch.full((vocabulary,), PADDING, dtype=torch.int64, device=labels.device)
    numbers[chosen] = torch.arange(len(chosen), device=labels.device)
    return torch.where(labels == PADDING, PADDING, numbers[labels.clamp(min=0)])
