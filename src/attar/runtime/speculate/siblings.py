"""Which siblings of a draft model's chains are run, and what is learnt of those that are not.

    S_d        what is believed of a chain down to depth d: the product of its a's
    sibling    the token of rank r at depth d survives with S_(d-1) a_r(d), and nothing follows it
    run        of the batch's siblings, sorted by survival, the first ones, as many as bring the most tokens a
               second; the chains are in the pass anyway, and their drafting is in its time

All this is known before the first token is drawn: the chosen K, ranks, depths, what was accepted so far. So
drafts that were drawn keep their law (``draft.py``). Which rule verifies them hangs on it too: "distinct"
where a sibling is wanted, even if the chain then ends above it; else the chain is "iid", and is verified as a
block. To decide that by what was drawn would not be exact: a block looks at all of its tokens.

Learning is nearly free. Behind the accepted part of a chain stands the target's token: a sibling that was not
run, and is that token, would have been accepted. So nothing is run to find out, and a rank is believed to be
worth nothing until it has shown something. Coupled and greedy this is the very count. Of a draft verified
exactly it is less than would be accepted, for the token behind is drawn anew: r(s) of min(1, r(s) / q(s)).
"""

from __future__ import annotations

from collections.abc import Sequence

from attar.runtime.speculate.acceptance import LEVELS, Acceptance, kind_of
from attar.runtime.speculate.choose import LEAST, MARGIN, Chooser
from attar.runtime.speculate.draft import Draft
from attar.runtime.speculate.plan import Chance, Pass
from attar.runtime.speculate.proposer import News
from attar.runtime.speculate.purse import Purse
from attar.runtime.speculate.trim import kinds_of

LOOK = 4  # of so many passes, one looks at siblings where none pay

Kinds = set[int]


class Siblings:
    """Cuts drafts to what pays; remembers the whole of them until the pass is over."""

    def __init__(self) -> None:
        self._whole: dict[int, Draft] = {}
        self._pause = 0  # passes until siblings are looked at again

    def wanted(
        self,
        chooser: Chooser,
        sequences: Sequence[int],
        counts: Sequence[int],
        rooms: Sequence[int],
        left: int,
        beside: int = 0,
    ) -> tuple[bool, list[Kinds]]:
        """Whether siblings should be drafted, to be run or to be learnt from; and as of :func:`wanted`."""
        if self._pause:
            self._pause -= 1
            return False, [set() for _ in sequences]
        kinds = wanted(chooser, sequences, counts, rooms, left, beside)
        if not any(kinds):
            self._pause = LOOK - 1
        return True, kinds

    def kept(
        self, sequences: Sequence[int], drafts: Sequence[Draft | None], wanted: Sequence[Kinds]
    ) -> list[Draft | None]:
        """The drafts that are run: all of each chain, and the wanted siblings.

        Args:
            drafts: of the sequences, as of :class:`attar.runtime.speculate.model.DraftModel`.
            wanted: for each the kinds of siblings.
        """
        pairs = zip(sequences, drafts, strict=True)
        self._whole = {each: draft for each, draft in pairs if draft is not None and draft.kinds is not None}
        return [draft and cut(draft, kinds) for draft, kinds in zip(drafts, wanted, strict=True)]

    def learn(self, acceptance: Acceptance, news: Sequence[News]) -> None:
        """What the siblings that were not run would have brought; the others are the chooser's to learn."""
        for each in news:
            whole = self._whole.pop(each.sequence, None)
            if whole is None or whole.kinds is None or each.draft is None:
                continue
            ran = set(kinds_of(each.draft))
            reached = next((d for d, node in enumerate(each.path) if node != d + 1), len(each.path))
            for token, parent, kind in zip(whole.tokens, whole.parents, whole.kinds, strict=True):
                if kind >= LEVELS and kind not in ran and parent <= reached:
                    acceptance.note(each.sequence, kind, token == each.tokens[parent])


def wanted(
    chooser: Chooser,
    sequences: Sequence[int],
    counts: Sequence[int],
    rooms: Sequence[int],
    left: int,
    beside: int = 0,
) -> list[Kinds]:
    """The kinds of siblings that pay in each sequence of the batch.

    Args:
        sequences: all that decode in the pass.
        counts: K of each, as chosen.
        rooms: drafts that each may have, siblings counted.
        left: drafts that all may have together.
        beside: tokens of prompts in the pass.
    """
    kept: list[Kinds] = [set() for _ in sequences]
    ranks = 0
    while chooser.acceptance.seen(kind_of(ranks + 1, 1)):
        ranks += 1
    if not (ranks and chooser.cost.known):
        return kept
    chains: list[Chance] = []
    siblings: list[Chance] = []
    for place, (sequence, count, room) in enumerate(zip(sequences, counts, rooms, strict=True)):
        chain, others = _chances(chooser.acceptance, place, sequence, count, ranks)
        chains += chain
        siblings += sorted(others, reverse=True)[: room - count]
    plan = Pass(chooser.cost, len(sequences), beside, True, len(chains) + len(siblings))
    plan.reset(chains)
    room = max(left - sum(counts), 0)
    for sibling in _front(plan, chooser.purse, sorted(siblings, reverse=True)[:room]):
        kept[sibling.place].add(sibling.node)
    return kept


def cut(draft: Draft, wanted: Kinds) -> Draft:
    """The chain of a draft and its wanted siblings."""
    if draft.kinds is None:
        return draft
    nodes = [node for node, kind in enumerate(draft.kinds) if kind < LEVELS or kind in wanted]
    tokens = tuple(draft.tokens[node] for node in nodes)
    q = None if draft.q is None else [draft.q[node] for node in nodes]
    if not wanted:
        return Draft.chain(tokens, q)
    parents, kinds = zip(*((draft.parents[node], draft.kinds[node]) for node in nodes), strict=True)
    return Draft(tokens, parents, q, draft.rule, kinds)


def _chances(
    acceptance: Acceptance, place: int, sequence: int, count: int, ranks: int
) -> tuple[list[Chance], list[Chance]]:
    """A chain of ``count``, and all siblings that may be worth a look, each under its kind."""
    chain: list[Chance] = []
    siblings: list[Chance] = []
    groups = [acceptance.rates(sequence, rank, count, first=0.0) for rank in range(1, ranks + 1)]
    survival = 1.0
    for depth, rate in enumerate(acceptance.rates(sequence, 0, count), 1):
        for rank, rates in enumerate(groups if depth < LEVELS else (), 1):
            siblings.append(Chance(survival * rates[depth - 1], place, depth, kind_of(rank, depth)))
        survival *= rate
        chain.append(Chance(survival, place, depth, depth))
    return chain, [each for each in siblings if each.survival >= LEAST]


def _front(plan: Pass, purse: Purse, siblings: Sequence[Chance]) -> Sequence[Chance]:
    """Of the siblings, the surest first, those that pay beside the chains that are planned."""
    plan.drafted = False  # no step of the draft model is for them
    best, taken = plan.speed * (1 + MARGIN), 0
    for count, sibling in enumerate(siblings, 1):
        if not purse.affords(plan.add(sibling)):
            break
        if plan.speed > best:
            best, taken = plan.speed, count
    return siblings[:taken]
