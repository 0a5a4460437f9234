"""A chain drawn from q, verified as a block (Sun et al., arXiv 2403.10444).

    w_0 = 1,  w_i = min(1, w_(i-1) p_i(x_i) / q_i(x_i))
    h_K = w_K,  h_i = S_i / (S_i + 1 - w_i)  with  S_i = sum_v max(w_i p_(i+1)(v) - q_(i+1)(v), 0)
    n = the largest i whose coin u_i <= h_i, else 0;  K: the token is drawn from p_(K+1),
    else from norm(max(w_n p_(n+1) - q_(n+1), 0))

A draft that is likelier under the target than under q makes up for an earlier one that is less likely, which
token-wise verification cannot do: in the mean never fewer are accepted. The distribution is the target's: by
induction from the end P(n >= i | x_1..x_i) = w_i, also where the drafter stopped early because of its draws.

Letters: K drafts, p_i = p(i - 1) the row after node i - 1, n accepted.
"""

from __future__ import annotations

from collections.abc import Callable

from attar.runtime.speculate.draft import Draft, Floats, Verdict
from attar.runtime.speculate.noise import Noise
from attar.runtime.speculate.residual import excess, normal, ratio


def block(draft: Draft, p: Callable[[int], Floats], noise: Noise) -> Verdict:
    """Accept the longest beginning that its coin allows.

    Args:
        draft: a chain with q, each token of q > 0.
        p: the target's distribution (V,) after a node 0..K; called at most once for each, never after a
            draft that the target cannot draw, and after the last one only where all are accepted.
        noise: coins and the last draw.
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
        return Verdict(tuple(range(1, K + 1)), noise.rest(K, p(K)))
    n = len(rows) - 1
    while True:
        left = excess(rows[n], draft.q[n], w[n])
        if n == 0 or noise.accepts(n, _chance(float(left.sum()), w[n])):
            left = normal(left, rows[n], [draft.tokens[n]])
            return Verdict(tuple(range(1, n + 1)), noise.rest(n, left))
        n -= 1


def _chance(S: float, w: float) -> float:
    """h; where w is 1 the prefix is always accepted."""
    return 1.0 if w >= 1 else S / (S + 1 - w)
