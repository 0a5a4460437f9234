"""How far a model's next-token distribution is from the reference's.

    KL(p || q) = sum_v p_v (ln p_v - ln q_v)        nats per token; p the reference, q the model under test

With x = p's logits less their maximum, y = q's, P = sum_v e^x_v and Q = sum_v e^y_v this is

    KL(p || q) = sum_v e^x_v (x_v - y_v) / P  +  ln Q - ln P

which is what is computed: element-wise in float32, the three sums in float64. Equal logits give exactly zero;
otherwise a token is off by a few 1e-8, where two log-softmaxes in float32 would be off by 1e-6, which is what
int8 rounding costs in all. A value that rounding put below zero is set to zero. The divergence is Kullback
and Leibler's (1951).

Letters: N tokens, V vocabulary, C tokens in a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 20  # elements of one float32 chunk: 4 MiB, so that a few of them stay in the cache


def chunks(tokens: int, vocabulary: int) -> Iterator[slice]:
    """Slices over N tokens that hold about ``CHUNK_ELEMENTS`` logits each."""
    size = max(1, CHUNK_ELEMENTS // max(vocabulary, 1))
    for start in range(0, tokens, size):
        yield slice(start, min(start + size, tokens))


def kl(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """KL(p || q) of every token, in nats.

    Args:
        p_logits: (N, V) logits of the reference, any float dtype; not modified.
        q_logits: (N, V') logits of the model; only the first min(V, V') columns count, so that a vocabulary
            padded to a round number compares with one that is not.

    Returns:
        float64 (N,), on q's device. Infinite where q gives no probability at all to a token that p allows.
    """
    width = min(p_logits.shape[-1], q_logits.shape[-1])
    parts = [
        _kl_chunk(p_logits[part, :width].to(q_logits.device), q_logits[part, :width])
        for part in chunks(q_logits.shape[0], width)
    ]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


def _kl_chunk(p: Tensor, q: Tensor) -> Tensor:
    x, y = (logits.float() - logits.float().amax(-1, keepdim=True) for logits in (p, q))
    weight = x.exp()
    P, Q = weight.sum(-1, dtype=torch.float64), y.exp().sum(-1, dtype=torch.float64)
    product = (weight * (x - y)).masked_fill_(weight == 0, 0.0)  # 0 ln 0 = 0, and not 0 * infinity
    return (product.sum(-1, dtype=torch.float64) / P + Q.log() - P.log()).clamp(min=0.0)


def agreement(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """Whether both models would choose the same token: bool (N,), over the columns both have.

    Does not modify its inputs; a tie goes to the token of the lowest number in both.
    """
    width = min(p_logits.shape[-1], q_logits.shape[-1])
    parts = [
        likeliest(p_logits[part, :width].to(q_logits.device)) == likeliest(q_logits[part, :width])
        for part in chunks(q_logits.shape[0], width)
    ]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.bool)


def likeliest(logits: Tensor) -> Tensor:
    """The number of the largest logit of every token, the lowest of several: int64 (N,). Logits are (N, V).

    On a CPU numpy finds it: torch's own is eleven times as slow there.
    """
    if logits.device.type != "cpu":
        return logits.argmax(-1)
    rows = logits.detach() if logits.dtype == torch.float64 else logits.detach().float()
    return torch.from_numpy(rows.numpy().argmax(-1))


def percentile(values: Tensor, percent: float) -> float:
    """The value below which ``percent`` % of the values lie, interpolated linearly between neighbours (0 to
    100).
    """
    return float(np.percentile(values.double().cpu().numpy(), percent))


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
