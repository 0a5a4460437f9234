"""Perplexity, KL divergence and top-1 agreement: functions of next-token logits.

Perplexity, over the N predicted tokens (not the first of a sequence, and not padding):

    loss = -1/N sum_i ln p(t_i | t_<i)        nats per token
    perplexity = e^loss

KL divergence (Kullback and Leibler, 1951), p of the reference, q of the model under test:

    KL(p || q) = sum_v p_v (ln p_v - ln q_v)        nats per token

With x = p's logits less their maximum, y = q's, P = sum_v e^x_v and Q = sum_v e^y_v this equals

    KL(p || q) = sum_v e^x_v (x_v - y_v) / P  +  ln Q - ln P

which is computed element-wise in float32, with the three sums in float64. Equal logits give exactly zero;
otherwise the error is a few 1e-8 per token. Two log-softmaxes in float32 would err by 1e-6, the whole cost of
int8 rounding. A value that rounding made negative is set to zero.

Letters: N tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 20  # elements of one float32 chunk: 4 MiB, so a few of them fit the CPU cache


def chunks(tokens: int, vocabulary: int) -> Iterator[slice]:
    """Slices over N tokens that hold about ``CHUNK_ELEMENTS`` logits each."""
    size = max(1, CHUNK_ELEMENTS // max(vocabulary, 1))
    for start in range(0, tokens, size):
        yield slice(start, min(start + size, tokens))


def kl(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """KL(p || q) of every token, in nats. Returns float64 (N,), on q's device. Infinite where q is 0 and p
    is not.

    Args:
        p_logits: (N, V) logits of the reference, any float dtype; not modified.
        q_logits: (N, V') logits of the model; only the first min(V, V') columns count, so padded vocabularies
            compare with others.
    """
    return _compare(_kl_chunk, p_logits, q_logits, torch.float64)


def _kl_chunk(p: Tensor, q: Tensor) -> Tensor:
    x, y = (logits.float() - logits.float().amax(-1, keepdim=True) for logits in (p, q))
    weight = x.exp()
    P, Q = weight.sum(-1, dtype=torch.float64), y.exp().sum(-1, dtype=torch.float64)
    product = (weight * (x - y)).masked_fill_(weight == 0, 0.0)  # 0 ln 0 = 0, and not 0 * infinity
    return (product.sum(-1, dtype=torch.float64) / P + Q.log() - P.log()).clamp(min=0.0)


def agreement(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """Whether the likeliest token is the same in both: bool (N,), over the columns both have.

    Does not modify its inputs; of equal logits the lowest token id counts.
    """
    return _compare(lambda p, q: likeliest(p) == likeliest(q), p_logits, q_logits, torch.bool)


def confidence(logits: Tensor) -> Tensor:
    """The probability of the likeliest token: float64 (N,).

    Args:
        logits: (N, V), any float dtype; not modified. Computed in float32, a chunk of tokens at a time.
    """
    parts = []
    for part in chunks(logits.shape[0], logits.shape[-1]):
        rows = logits[part].float()
        parts.append((rows.amax(-1) - rows.logsumexp(-1)).exp().double())
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


def _compare(
    function: Callable[[Tensor, Tensor], Tensor], p_logits: Tensor, q_logits: Tensor, dtype: torch.dtype
) -> Tensor:
    """``function`` of both, a chunk of tokens at a time, over the columns both have."""
    width = min(p_logits.shape[-1], q_logits.shape[-1])
    parts = [
        function(p_logits[part, :width].to(q_logits.device), q_logits[part, :width])
        for part in chunks(q_logits.shape[0], width)
    ]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=dtype)


def likeliest(logits: Tensor) -> Tensor:
    """The argmax of logits (N, V), the lowest index of equal ones: int64 (N,).

    On a CPU numpy computes it; torch's argmax is eleven times as slow there.
    """
    if logits.device.type != "cpu":
        return logits.argmax(-1)
    rows = logits.detach() if logits.dtype == torch.float64 else logits.detach().float()
    return torch.from_numpy(rows.numpy().argmax(-1))


def percentile(values: Tensor, percent: float) -> float:
    """The value below which ``percent`` % of the values lie, interpolated linearly between neighbours; 0 to
    100."""
    return float(np.percentile(values.double().cpu().numpy(), percent))


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """-ln p(label) of every token, in nats. Returns float64 (N,).

    Args:
        logits: (N, V), any float dtype, row i predicts label i; not modified. Computed in
            float32, a chunk of tokens at a time.
        labels: int64 (N,).
    """
    parts = []
    for part in chunks(logits.shape[0], logits.shape[-1]):
        rows = logits[part].float()
        chosen = rows.gather(-1, labels[part].to(rows.device)[:, None])[:, 0]
        parts.append((rows.logsumexp(-1) - chosen).double())
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


def hits(logits: Tensor, labels: Tensor) -> Tensor:
    """Whether each label is the likeliest token: bool (N,); of equal logits the lowest token id counts.

    Args:
        logits: (N, V), row i predicts label i; not modified.
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
