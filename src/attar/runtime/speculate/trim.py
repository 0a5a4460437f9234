"""What a draft's nodes are counted under, and a draft cut to some of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from attar.runtime.speculate.acceptance import kind_of
from attar.runtime.speculate.draft import Draft


def kinds_of(draft: Draft) -> Sequence[int]:
    """What each draft's acceptance is counted under: its own word, or its depth."""
    if draft.kinds is not None:
        return draft.kinds
    return [kind_of(0, depth) for depth in draft.depths[1:]]


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
