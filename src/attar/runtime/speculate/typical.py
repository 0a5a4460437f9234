"""Typical acceptance: a draft is accepted where the target finds it likely enough, whatever the target would
have sampled. Lossy: completions do not have the target's distribution. It is used only where it is asked for.

    accepted    p(x) > min(epsilon, delta exp(-H(p))),   H(p) = -sum of p ln p
    taken       the longest path of accepted drafts; of several the likeliest; then a token sampled from p

Cai et al. 2024, "Medusa", arXiv 2401.10774, section 2.3.1: the more certain the target is, the likelier a
draft must be. p is the distribution after all warps, so a token that a grammar forbids is never accepted.

Differs from the paper: its first draft, the target's own greedy token, is always accepted, so that its
completions at temperature above 0 begin each pass greedily; here the token before the drafts was sampled.

Letters: p distribution after a node, x a draft after it, epsilon and delta thresholds.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from attar.runtime.speculate.draft import Draft, Floats, Verdict
from attar.runtime.speculate.residual import mass

EPSILON, DELTA = 0.09, 0.3  # of the authors' experiments; delta is the root of epsilon


def threshold(p: Floats, epsilon: float = EPSILON, delta: float = DELTA) -> float:
    """min(epsilon, delta exp(-H(p)))."""
    p = p[p > 0].astype(np.float64)
    entropy = -float((p * np.log(p)).sum())
    return min(epsilon, delta * math.exp(-entropy))


def longest_typical(draft: Draft, p: Callable[[int], Floats], token: Callable[[int], int]) -> Verdict:
    """The longest path of accepted drafts, and the token after it.

    Args:
        draft: of any rule; q is not used.
        p: the target's distribution (V,) after a node 0..n; called once for each accepted node with drafts
            after it.
        token: plain decoding's token after a node; negative past the end of the completion.
    """
    reached = [(0, 0.0)]  # accepted nodes, and minus the logarithm of their path's probability
    depth, cost, best = 0, 0.0, 0
    for node, path_cost in reached:
        if (-draft.depths[node], path_cost) < (-depth, cost):
            depth, cost, best = draft.depths[node], path_cost, node
        if not draft.children(node) or (node and token(node) < 0):
            continue
        row = p(node)
        least = threshold(row)
        for child in draft.children(node):
            chance = mass(row, draft.tokens[child - 1])
            if chance > least:
                reached.append((child, path_cost - math.log(chance)))
    return Verdict(draft.path(best), token(best))
