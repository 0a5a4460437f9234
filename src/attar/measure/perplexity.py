"""Perplexity: exp of the mean negative log-likelihood of the tokens that are really predicted.

    loss = -1/N sum_i ln p(t_i | t_<i)        nats per token, i over the N predicted tokens
    perplexity = e^loss

The first token of a sequence is not predicted, and neither is padding.

Letters: N tokens, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attar.measure.divergence import chunks, likeliest


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """-ln p(label) of every token, in nats.

    Args:
        logits: (N, V), any float dtype, row i made before label i was seen; not modified. Computed in
            float32, a chunk of tokens at a time.
        labels: int64 (N,).

    Returns:
        float64 (N,).
    """
    parts = []
    for part in chunks(logits.shape[0], logits.shape[-1]):
        rows = logits[part].float()
        chosen = rows.gather(-1, labels[part].to(rows.device)[:, None])[:, 0]
        parts.append((rows.logsumexp(-1) - chosen).double())
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


def hits(logits: Tensor, labels: Tensor) -> Tensor:
    """Whether each token is the likeliest one: bool (N,); a tie goes to the token of the lowest number.

    Args:
        logits: (N, V), row i made before label i was seen; not modified.
        labels: int64 (N,).
    """
    parts = [
        likeliest(logits[part]) == labels[part].to(logits.device)
        for part in chunks(logits.shape[0], logits.shape[-1])
    ]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.bool)


def perplexity(loss: float) -> float:
    """e^loss; infinity where that is beyond a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
