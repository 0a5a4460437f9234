"""Siblings of a draft model's chain: when they are drafted, and what is learnt of those that were not run.

The policy chooses ranks and depths before the first token is drawn, so that drawn drafts keep their
distribution (``draft.py``). The rule of verification is chosen at the same time: "distinct" with siblings,
even if the chain ends above them, else "iid", verified as a block. The rates of siblings are learnt without
running them: the target's token follows the accepted part of a chain, and a sibling equal to it would have
been accepted. The count is exact for coupled and greedy verification, and a lower bound for exact
verification.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attar.runtime.speculate.acceptance import AcceptanceRates
from attar.runtime.speculate.draft import LEVELS, Draft, kinds_of
from attar.runtime.speculate.proposer import DraftFeedback

SIBLINGS_EVERY = 4  # passes between two with siblings, where none pay


class SiblingRounds:
    """The rounds of drafts that have siblings, and the drafts of the last one with all of them."""

    def __init__(self) -> None:
        self._uncut: dict[int, Draft] = {}
        self._since = SIBLINGS_EVERY

    def due(self, kinds: Sequence[set[int]]) -> bool:
        """Whether to draft siblings: where some pay, and every few passes to learn their rates."""
        self._since += 1
        pay = any(kind >= LEVELS for one in kinds for kind in one)
        if not pay and self._since < SIBLINGS_EVERY:
            return False
        self._since = 0
        return True

    def cut(self, drafts: Mapping[int, Draft | None], kinds: Sequence[set[int]]) -> list[Draft | None]:
        """The drafts, by sequence, with the siblings of these kinds; the others are remembered."""
        self._uncut = {one: draft for one, draft in drafts.items() if draft is not None}
        return [draft and cut_siblings(draft, one) for draft, one in zip(drafts.values(), kinds, strict=True)]

    def learn(self, acceptance: AcceptanceRates, feedback: Sequence[DraftFeedback]) -> None:
        """Count the siblings of the last round that were not run."""
        if self._uncut:
            count_siblings(acceptance, feedback, self._uncut)
            self._uncut = {}


def cut_siblings(draft: Draft, kinds: set[int]) -> Draft:
    """The chain of a draft, and its siblings of these kinds."""
    if draft.kinds is None:
        return draft
    nodes = [node for node, kind in enumerate(draft.kinds) if kind < LEVELS or kind in kinds]
    tokens = tuple(draft.tokens[node] for node in nodes)
    q = None if draft.q is None else [draft.q[node] for node in nodes]
    if not any(kind >= LEVELS for kind in kinds):
        return Draft.chain(tokens, q)
    parents, kept = zip(*((draft.parents[node], draft.kinds[node]) for node in nodes), strict=True)
    return Draft(tokens, parents, q, draft.rule, kept)


def count_siblings(
    acceptance: AcceptanceRates, feedback: Sequence[DraftFeedback], uncut: dict[int, Draft]
) -> None:
    """Count the siblings that were not run; ``uncut``: by sequence, the drafts before they were cut."""
    for one in feedback:
        draft = uncut.get(one.sequence)
        if draft is None or draft.kinds is None or one.draft is None:
            continue
        ran = set(kinds_of(one.draft))
        reached = next((depth for depth, node in enumerate(one.path) if node != depth + 1), len(one.path))
        for token, parent, kind in zip(draft.tokens, draft.parents, draft.kinds, strict=True):
            if kind >= LEVELS and kind not in ran and parent <= reached:
                acceptance.note(one.sequence, kind, token == one.tokens[parent])
