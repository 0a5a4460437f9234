"""Drafts as trees: children, paths, cutting, and where their keys and values go."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from attar.runtime.sampling.sampled_tokens import SampledTokens
from attar.runtime.speculate.draft import Draft, DraftBuilder, Verdict
from attar.runtime.step import depths

Q = np.array([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.1, 0.2, 0.7]], np.float32)


def random_tree(seed: int) -> Draft:
    generator = np.random.default_rng(seed)
    n = int(generator.integers(1, 20))
    parents = tuple(int(generator.integers(0, node + 1)) for node in range(n))
    draft = Draft(tuple(generator.integers(0, 3, n).tolist()), parents)
    draft.check()
    return draft


def leaf_paths(draft: Draft) -> tuple[tuple[int, ...], ...]:
    """The path of every node without children, in their order."""
    return tuple(draft.path(node) for node in range(1, len(draft) + 1) if not draft.children(node))


def test_a_chain() -> None:
    draft = Draft.chain([5, 6, 5])
    draft.check()
    assert (draft.parents, draft.depths, draft.counts) == ((0, 1, 2), (0, 1, 2, 3), (1, 1, 1))
    assert draft.is_chain and draft.rule == "fixed" and leaf_paths(draft) == ((1, 2, 3),)
    drawn = Draft.chain([0, 1, 2], Q)
    drawn.check()
    assert drawn.rule == "iid" and drawn.q is Q


def test_children_paths_and_counts_of_a_tree() -> None:
    draft = Draft((7, 8, 9, 7), (0, 0, 1, 3))
    assert [draft.children(node) for node in range(5)] == [(1, 2), (3,), (), (4,), ()]
    assert draft.path(4) == (1, 3, 4) and draft.path_tokens(draft.path(4)) == (7, 9, 7)
    assert draft.path(0) == () and leaf_paths(draft) == ((2,), (1, 3, 4))
    assert draft.counts == (2, 1, 1) and not draft.is_chain


@pytest.mark.parametrize("seed", range(20))
def test_depths_are_those_the_runner_gives(seed: int) -> None:
    """``Step.parents`` of the span: the last certain token first."""
    draft = random_tree(seed)
    assert draft.depths == tuple(depths(len(draft) + 1, (-1, *draft.parents)).tolist())
    assert sum(draft.counts) == len(draft)
    for node in range(1, len(draft) + 1):
        assert node in draft.children(draft.parents[node - 1])
        assert len(draft.path(node)) == draft.depths[node]


def test_kinds_follow_their_drafts() -> None:
    draft = Draft((1, 1, 2, 3), (0, 0, 2, 1), kinds=(5, 6, 7, 8))
    draft.check()
    two = draft.cut(2)
    assert two is not None and two.kinds == (5, 6)


def test_cutting_keeps_the_front() -> None:
    draft = Draft((0, 1, 2), (0, 0, 2), Q, "distinct")
    two = draft.cut(2)
    assert two is not None
    two.check()
    assert (two.tokens, two.parents, two.rule) == ((0, 1), (0, 0), "distinct") and len(two.q) == 2  # type: ignore[arg-type]
    assert draft.cut(3) is draft and draft.cut(0) is None and draft.cut(-1) is None


GOOD = Draft((0, 1, 2), (0, 0, 2), Q, "distinct")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": (), "parents": ()}, "no tokens"),
        ({"parents": (0, 0)}, "2 parents for 3"),
        ({"parents": (0, 2, 0)}, "draft 2 follows 2"),
        ({"parents": (0, 0, -1)}, "draft 3 follows -1"),
        ({"tokens": (0, -1, 2)}, "draft 2 is token -1"),
        ({"rule": "fixed"}, "not drawn from any q"),
        ({"kinds": (1, 2)}, "2 kinds for 3"),
        ({"rule": "topk"}, "unknown rule"),
        ({"q": None}, "needs q of 3 rows"),
        ({"q": Q[:2]}, "needs q of 3 rows"),
        ({"tokens": (0, 2, 2)}, "q of its token 2 is 0"),
        ({"tokens": (0, 1, 3)}, "q of its token 3 is 0"),
        ({"q": 2 * Q}, "sums to 2"),
        ({"parents": (0, 0, 0)}, "several q"),
        ({"tokens": (1, 1, 2)}, "equal: "),
    ],
)
def test_check_names_what_is_wrong(change: dict[str, object], message: str) -> None:
    GOOD.check()
    with pytest.raises(AssertionError, match=message):
        dataclasses.replace(GOOD, **change).check()  # type: ignore[arg-type]


def moves(path: tuple[int, ...], position: int, drafted: int) -> tuple[tuple[int, int], ...]:
    """Of a path, where the last decided token is in a slot."""
    return SampledTokens((), (), path, drafted).moves(position + drafted + 1)


@pytest.mark.parametrize("seed", range(20))
def test_moves_bring_the_path_behind_the_last_token(seed: int) -> None:
    """Keys and values moved one after the other, as the runner does; what they stand for is compared."""
    draft, index = random_tree(seed), 11
    for path in leaf_paths(draft):
        cache = [None] * index + [(), *(draft.path(node) for node in range(1, len(draft) + 1))]
        for source, target in moves(path, index, len(draft)):
            assert target < source
            cache[target] = cache[source]
        assert cache[index : index + len(path) + 1] == [
            (),
            *(path[:depth] for depth in range(1, len(path) + 1)),
        ]


def test_a_chain_moves_nothing_and_rows_name_what_decided() -> None:
    verdict = Verdict((1, 2), 9)
    assert moves((1, 2), 4, 3) == () and verdict.rows == (0, 1, 2)
    assert verdict.tokens(Draft.chain([5, 6, 7])) == (5, 6, 9)
    assert Verdict((), 9).rows == (0,)


def test_equal_beginnings_are_one_branch() -> None:
    builder = DraftBuilder(frozenset([9]), most=6)
    assert builder.add([1, 2, 3], [1, 1, 1]) == [1, 2, 3]
    assert builder.add([1, 2, 4], [2, 2, 2]) == [1, 2, 4]
    assert builder.add([5, 9, 6], [3, 3, 3]) == [5, 6]
    assert builder.add([7], [4]) == [] and builder.add([1, 2], [4, 4]) == [1, 2]
    draft = builder.draft()
    assert draft is not None and (draft.tokens, draft.parents) == ((1, 2, 3, 4, 5, 9), (0, 1, 2, 2, 0, 5))
    assert draft.kinds == (1, 1, 1, 2, 3, 3) and builder.roots == 2 and 5 in builder and 2 not in builder
    assert DraftBuilder().draft() is None
