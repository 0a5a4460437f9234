"""Coupled verification: follow the draft that is the token the target draws anyway.

    at a node:  v = plain decoding's token behind it;  a child is v → go there;  none is → v is the token

The text is that of plain decoding, bit for bit, whatever was drafted: drafts decide how many tokens a pass
gives, never which. Three cases are this one:

    greedy     v is the likeliest token
    seeded     v is the Gumbel-max draw from p with the noise of (seed, position): a seeded request gives the
               same text with speculation on, off, or with another draft
    fixed      children that were not drawn from a q. EAGLE accepts each with r(c), else takes c out of r
               (rule A); SGLang throws one coin against the children's p summed up, and draws again where it
               falls behind them (rule B). A draw from p that is looked up among the children is a third form
               of the same law: P(go to c) = p(c), P(v | no child) = p(v) / (1 - sum of p(c)). It takes one
               draw and no residual, so there is nothing to round; the order of siblings does not matter, nor
               do equal ones; and it is coupled for nothing

A draft drawn from q with the target's own noise agrees with probability (1 - TV) / (1 + TV) at least
(Daliri, Musco and Suresh, arXiv 2408.07978), against 1 - TV of the rules that give up coupling.
"""

from __future__ import annotations

from collections.abc import Callable

from attar.runtime.speculate.draft import Draft, Verdict


def follow(draft: Draft, token: Callable[[int], int]) -> Verdict:
    """Walk as long as the target's own token is among the drafts.

    Args:
        draft: of any rule; q is not looked at.
        token: what plain decoding takes behind a node 0..n; asked for once for each node walked.
    """
    node = 0
    path: list[int] = []
    while True:
        found = token(node)
        node = next((child for child in draft.children(node) if draft.tokens[child - 1] == found), 0)
        if not node:
            return Verdict(tuple(path), found)
        path.append(node)
