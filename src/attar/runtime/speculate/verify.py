"""Verification: which drafts are accepted, by mode and rule.

    greedy request, coupled mode, or a fixed draft    verify_greedy  accepted if equal to the target's token
    exact, a chain drawn from q                       chain.py       block verification
    exact, any other draft drawn from q               tree.py        by the draft's rule, iid or distinct
    typical, not greedy                               typical.py     LOSSY, only where it is asked for

All but the last give tokens with the target's distribution. Coupled verification gives the very tokens of
plain decoding; exact verification accepts more where the draft has a q, but the tokens then depend on the
drafts. p is always the distribution after all warps, with penalties and grammar as they are after the drafted
path.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

from attar.runtime.speculate.chain import block
from attar.runtime.speculate.draft import Draft, Floats, Verdict
from attar.runtime.speculate.noise import Noise
from attar.runtime.speculate.tree import walk
from attar.runtime.speculate.typical import longest_typical


def verify_greedy(draft: Draft, token: Callable[[int], int]) -> Verdict:
    """Descend the tree while the target's own token is among the children.

    Args:
        draft: of any rule; q is not used.
        token: plain decoding's token after a node 0..n; called once for each node on the path.
    """
    node = 0
    path: list[int] = []
    while True:
        sampled = token(node)
        node = next((child for child in draft.children(node) if draft.tokens[child - 1] == sampled), 0)
        if not node:
            return Verdict(tuple(path), sampled)
        path.append(node)


VerificationMode = Literal["coupled", "exact", "typical"]


class Target(Protocol):
    """The target model after the nodes of a draft; evaluated only on the accepted path."""

    @property
    def greedy(self) -> bool:
        """Whether the request takes the likeliest token."""
        ...

    def token(self, node: int) -> int:
        """Plain decoding's token after the node: the likeliest, or the draw with TOKEN noise."""
        ...

    def p(self, node: int) -> Floats:
        """The distribution after the node; float32 or float64 (V,)."""
        ...


def verify(draft: Draft, target: Target, noise: Noise, mode: VerificationMode = "coupled") -> Verdict:
    """Decide which drafts are accepted, and the token after them.

    Args:
        mode: "coupled", "exact" or "typical", which is lossy.
    """
    if mode == "typical" and not target.greedy:
        return longest_typical(draft, target.p, target.token)
    if target.greedy or mode == "coupled" or draft.rule == "fixed":
        return verify_greedy(draft, target.token)
    if draft.rule == "iid" and draft.is_chain:
        return block(draft, target.p, noise)
    return walk(draft, target.p, noise)
