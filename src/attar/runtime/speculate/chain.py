"""A chain drawn from q, verified as a block (Sun et al., arXiv 2403.10444).

    w_0 = 1,  w_i = min(1, w_(i-1) p_i(x_i) / q_i(x_i))
    h_K = w_K,  h_i = S_i / (S_i + 1 - w_i)  with  S_i = sum_v max(w_i p_(i+1)(v) - q_(i+1)(v), 0)
    n = the largest i with u_i <= h_i (u_i uniform), else 0
    next token from p_(K+1) if n = K, else from norm(max(w_n p_(n+1) - q_(n+1), 0))

A draft token with p > q makes up for an earlier one with p < q, which verification token by token does not
allow: the expected number of accepted tokens is never smaller. The output has the target's distribution: by
induction from the end P(n >= i | x_1..x_i) = w_i, also if drafting stopped early depending on x_1..x_i.

Letters: K drafts, p_i = p(i - 1) the row after node i - 1, n accepted.
"""

from __future__ import annotations

from collections.abc import Callable

from attar.runtime.speculate.draft import Draft, Floats, Verdict
from attar.runtime.speculate.noise import Noise
from attar.runtime.speculate.residual import excess, normal, ratio


def block(draft: Draft, p: Callable[[int], Floats], noise: Noise) -> Verdict:
    """Accept the longest prefix that passes its test.

    Args:
        draft: a chain with q, each token of q > 0.
        p: the target's distribution (V,) after a node 0..K; called at most once a node, never after a draft
            token with p = 0, and for node K only if all are accepted.
        noise: for the tests and the last draw.
    """
    assert draft.is_chain and draft.q is not None, "block verification is for chains drawn from q"
    K = len(draft)
    rows, w = [p(0)], [1.0]
    for token, q in zip(draft.tokens, draft.q, strict=True):
        weight = min(1.0, w[-1] * ratio(rows[-1], q, token))
        if weight <= 0:
            break
        w.append(weight)
        if len(rows) < K:
            rows.append(p(len(rows)))
    if len(w) > K and noise.accepts(K, w[K]):
        return Verdict(tuple(range(1, K + 1)), noise.resample(K, p(K)))
    n = len(rows) - 1
    while True:
        left = excess(rows[n], draft.q[n], w[n])
        if n == 0 or noise.accepts(n, _chance(float(left.sum()), w[n])):
            left = normal(left, rows[n], [draft.tokens[n]])
            return Verdict(tuple(range(1, n + 1)), noise.resample(n, left))
        n -= 1


def _chance(S: float, w: float) -> float:
    """h; 1 where w is 1."""
    return 1.0 if w >= 1 else S / (S + 1 - w)
