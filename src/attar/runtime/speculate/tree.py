"""Drafts that were drawn from q, verified node by node.

    at a node:  r = p
    for each child c in order:
        accept with min(1, r(c) / q(c))
        else r = norm(max(r - q, 0))                    iid: children drawn each by itself
             and q = norm(q without c)                  distinct: drawn without replacement
    none accepted: the token is drawn from r

With one child this is speculative sampling (Leviathan et al. 2211.17192, Chen et al. 2302.01318), token by
token; with several the rule of SpecInfer (2305.09781) for iid, and of recursive rejection sampling (RSD,
2402.14160) for distinct. Exact: the token after a node has the distribution p for every q. Children that were
chosen, not drawn, are verified by ``verify.follow``.

A child whose token has q = 0 was not drawn (padding): it is skipped.
"""

from __future__ import annotations

from collections.abc import Callable

from attar.runtime.speculate.draft import Draft, Floats, Verdict
from attar.runtime.speculate.noise import Noise
from attar.runtime.speculate.residual import excess, mass, normal, ratio, without


def walk(draft: Draft, p: Callable[[int], Floats], noise: Noise) -> Verdict:
    """Accept drafts from the root of the tree downwards.

    Args:
        draft: with q.
        p: the target's distribution (V,) after a node 0..n; called once for each node on the path.
        noise: for the tests and the last draw.
    """
    node = 0
    path: list[int] = []
    while True:
        node, left = _child(draft, node, p(node), noise)
        if not node:
            return Verdict(tuple(path), noise.resample(len(path), left))
        path.append(node)


def _child(draft: Draft, node: int, p: Floats, noise: Noise) -> tuple[int, Floats]:
    """The accepted child and p, or 0 and the residual of p."""
    children = draft.children(node)
    if not children:
        return 0, p
    assert draft.q is not None, "a fixed draft has no q to be verified with"
    left, q = p, draft.q[children[0] - 1]
    rejected = []
    for child in children:
        token = draft.tokens[child - 1]
        if mass(q, token) <= 0:
            continue
        if noise.accepts(child, ratio(left, q, token)):
            return child, p
        rejected.append(token)
        left = normal(excess(left, q), p, rejected)
        if draft.rule == "distinct":
            q = without(q, [token])
            q /= q.sum() or 1.0
    return 0, left
