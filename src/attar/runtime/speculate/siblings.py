"""Siblings of a draft model's chain: cutting a draft to those that are run, and what the others teach.

The policy says which ranks are run at which depths before the first token is drawn, so that drawn drafts keep
their distribution (``draft.py``); the rule of verification hangs on it too: "distinct" where a sibling is
wanted, even if the chain then ends above it, else the chain is "iid" and is verified as a block.

Behind the accepted part of a chain stands the target's token: a sibling that was not run, and is that token,
would have been accepted. So nothing is run to learn the rates of siblings. Coupled and greedy the count is
exact; of a draft that is verified exactly it is a lower bound.
"""

from __future__ import annotations

from collections.abc import Sequence

from attar.runtime.speculate.draft import LEVELS, Draft, kinds_of
from attar.runtime.speculate.policy import AcceptanceRates
from attar.runtime.speculate.proposer import DraftFeedback


def cut(draft: Draft, kinds: set[int]) -> Draft:
    """The chain of a draft, and its siblings of some kinds."""
    if draft.kinds is None:
        return draft
    nodes = [node for node, kind in enumerate(draft.kinds) if kind < LEVELS or kind in kinds]
    tokens = tuple(draft.tokens[node] for node in nodes)
    q = None if draft.q is None else [draft.q[node] for node in nodes]
    if not any(kind >= LEVELS for kind in kinds):
        return Draft.chain(tokens, q)
    parents, kept = zip(*((draft.parents[node], draft.kinds[node]) for node in nodes), strict=True)
    return Draft(tokens, parents, q, draft.rule, kept)


def learn(acceptance: AcceptanceRates, news: Sequence[DraftFeedback], whole: dict[int, Draft]) -> None:
    """Count the siblings that were not run.

    Args:
        whole: by sequence, the drafts of the pass before they were cut.
    """
    for one in news:
        draft = whole.get(one.sequence)
        if draft is None or draft.kinds is None or one.draft is None:
            continue
        ran = set(kinds_of(one.draft))
        reached = next((depth for depth, node in enumerate(one.path) if node != depth + 1), len(one.path))
        for token, parent, kind in zip(draft.tokens, draft.parents, draft.kinds, strict=True):
            if kind >= LEVELS and kind not in ran and parent <= reached:
                acceptance.note(one.sequence, kind, token == one.tokens[parent])
