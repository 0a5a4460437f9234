"""What a draft's nodes are counted under, what is believed of them, and a draft cut to some of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from attar.runtime.speculate.acceptance import LEVELS, kind_of
from attar.runtime.speculate.draft import Draft
from attar.runtime.speculate.plan import Chance


def kinds_of(draft: Draft) -> Sequence[int]:
    """What each draft's acceptance is counted under: its own word, or its depth."""
    if draft.kinds is not None:
        return draft.kinds
    return [kind_of(0, depth) for depth in draft.depths[1:]]


def survivals(draft: Draft, place: int, rates: Callable[[int, int], Sequence[float]]) -> list[Chance]:
    """Every node with its survival: the product of the a's on its path.

    Args:
        place: of the draft's sequence in the batch.
        rates: a of levels 1..n of a group, from the group and n.
    """
    kinds = kinds_of(draft)
    deepest = {kind // LEVELS: kind % LEVELS for kind in sorted(set(kinds))}
    tables = {group: rates(group, last) for group, last in deepest.items()}
    found = [Chance(1.0, place, 0, 0)]
    for node, (parent, kind) in enumerate(zip(draft.parents, kinds, strict=True), 1):
        survival = found[parent].survival * tables[kind // LEVELS][kind % LEVELS - 1]
        found.append(Chance(survival, place, draft.depths[node], node))
    return found[1:]


def trimmed(draft: Draft, nodes: Sequence[int]) -> Draft | None:
    """A draft cut to some of its nodes, each with its parent among them; None where there are none.

    Only what is fixed may be cut so, or the end of a chain: with q the choice must not look at the tokens.
    """
    nodes = sorted(nodes)
    if len(nodes) in (0, len(draft)):
        return draft if nodes else None
    assert draft.q is None, "a drawn draft is not pruned"
    places = {0: 0, **{node: place for place, node in enumerate(nodes, 1)}}
    kinds = draft.kinds
    return replace(
        draft,
        tokens=tuple(draft.tokens[node - 1] for node in nodes),
        parents=tuple(places[draft.parents[node - 1]] for node in nodes),
        kinds=None if kinds is None else tuple(kinds[node - 1] for node in nodes),
    )
