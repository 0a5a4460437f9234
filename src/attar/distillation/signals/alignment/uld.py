"""Universal Logit Distillation: Boizard, El Haddad, Hudelot, Colombo 2024, "Towards Cross-Tokenizer
Distillation: the Universal Logit Distillation Loss for LLMs", arXiv 2402.12030, section 3.2.

    L = sum_i |p_(i) - q_(i)|,   p_(i), q_(i) the i-th largest probabilities, 0 beyond a vocabulary's end

This is the Wasserstein distance of two distributions whose tokens are all equally far from each other: how
sure the student is, not of what. Differs from the paper: positions are paired by the bytes of the text
(``spans.py``), not by their number, and a span of several tokens has the merged probabilities of ``gold.py``.

Letters: p (g, W) teacher's probabilities; q (g, V) student's; g groups.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sorted_distance(q: Tensor, p: Tensor) -> Tensor:
    """L of each row (g,), differentiable by both."""
    count = min(q.shape[-1], p.shape[-1])
    ours, theirs = (torch.topk(x, count, dim=-1).values for x in (q, p))
    distance = (ours - theirs).abs().sum(-1)
    longer, largest = (q, ours) if q.shape[-1] > count else (p, theirs)
    if longer.shape[-1] == count:
        return distance
    return distance + (longer.sum(-1) - largest.sum(-1)).clamp(min=0.0)  # what pairs with 0
