"""A distribution over V tokens kept as K + N of them: Anshumann et al. 2025, "Sparse Logit Sampling:
Accelerating Knowledge Distillation in LLMs", arXiv 2503.16870, section 3.

    p' = p on the K likeliest tokens;   (1 - their sum) / N on each of N tokens drawn with replacement from
    the others

so that E[p'] = p, and the mean gradient of forward KL is that of the whole p. The K likeliest alone are
biased: a student that sees nothing else becomes overconfident. K = 0 is the paper's random sampling, 1 / N on
each draw.

Letters: n positions, V tokens, K kept, N drawn.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sparse_prediction(logits: Tensor, top: int, uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The kept tokens int64 (n, K + N), the likeliest first; p float32 (n, K) of the likeliest; and the
    entropy of p (n,), in nats.

    Args:
        logits: (n, V), at least float32.
        top: K.
        uniforms: (n, N) in [0, 1), a draw each: by the inverse of the cumulative distribution.
    """
    log_p = logits.log_softmax(-1)
    p = log_p.exp()
    likely, tokens = p.topk(min(top, p.shape[1]))
    entropy = -torch.linalg.vecdot(p, log_p.clamp(min=torch.finfo(p.dtype).min))
    if uniforms.shape[1]:
        sums = p.scatter(1, tokens, 0.0).cumsum(1, dtype=torch.float64)
        points = uniforms.to(sums) * sums[:, -1:]
        drawn = torch.searchsorted(sums, points, right=True).clamp_(max=p.shape[1] - 1)
        tokens = torch.cat([tokens, drawn], 1)
    return tokens, likely, entropy


def sparse_weights(likely: Tensor, draws: int) -> Tensor:
    """p' float32 (n, K + N) on the kept tokens; rows sum to 1, which rounding of ``likely`` had changed.

    Args:
        likely: (n, K).
        draws: N.
    """
    likely = likely.float()
    drawn = (1.0 - likely.sum(1, keepdim=True)).clamp(min=0.0) / max(draws, 1)
    weights = torch.cat([likely, drawn.expand(-1, draws)], 1)
    return weights / weights.sum(1, keepdim=True)
