"""Every rule gives the target's law: exactly, by enumeration of all drafts, coins and draws."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from attar.runtime.speculate.chain import block
from attar.runtime.speculate.draft import Draft, Verdict
from attar.runtime.speculate.residual import without
from attar.runtime.speculate.tree import walk
from attar.runtime.speculate.verify import verify_greedy
from tests.runtime.speculate import wrong
from tests.runtime.speculate.laws import (
    Judge,
    Shape,
    mean_accepted,
    outcomes,
    plain_law,
    random_model,
    rows,
    text_law,
    total_variation,
)

FORKED = (0, 0, 1, 1, 2)
"""Two children, of which the first has two and the second one."""


def drawn(draft: Draft, p, noise) -> Verdict:  # type: ignore[no-untyped-def]
    """Coupled verification, the target's draws being chances."""
    return verify_greedy(draft, lambda node: noise.token(draft.depths[node], p(node)))


def fixed(parents: tuple[int, ...], tokens: tuple[int, ...]) -> list[tuple[Draft, float]]:
    return [(Draft(tokens, parents), 1.0)]


@pytest.mark.few(5)
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    ("V", "shape", "judge"),
    [
        (5, Shape((0, 1), "iid"), block),
        (5, Shape((0, 1, 2), "iid"), block),
        (5, Shape((0, 1), "iid"), walk),
        (5, Shape((0, 1, 2), "iid"), walk),
        (8, Shape((0, 0, 0), "iid"), walk),
        (4, Shape(FORKED, "iid"), walk),
        (6, Shape((0, 0, 0), "distinct"), walk),
        (3, Shape((0, 0), "distinct"), walk),
        (4, Shape(FORKED, "distinct"), walk),
        (4, Shape((0, 1, 2), "iid"), drawn),
    ],
)
def test_a_completion_has_the_target_s_distribution(V: int, shape: Shape, judge: Judge, seed: int) -> None:
    p, q = random_model(V, seed), random_model(V, seed + 100)
    length = shape.depth + 1
    law = text_law(shape.drafts(q), p, judge, length)
    assert total_variation(law, plain_law(p, length)) < 1e-12


@pytest.mark.parametrize(
    ("parents", "tokens"),
    [((0, 1, 2), (4, 0, 0)), (FORKED, (1, 3, 2, 4, 0)), ((0, 0, 1, 2), (2, 2, 1, 3)), ((0, 0, 0), (9, 1, 0))],
)
def test_fixed_drafts_have_the_target_s_law(parents: tuple[int, ...], tokens: tuple[int, ...]) -> None:
    """Trees, equal siblings, and a token that the target does not have."""
    p = random_model(5, 3)
    law = text_law(fixed(parents, tokens), p, drawn, 3)
    assert total_variation(law, plain_law(p, 3)) < 1e-12


def rule_a(draft: Draft, p, noise) -> Verdict:  # type: ignore[no-untyped-def]
    """Fixed children as EAGLE takes them."""
    node, path = 0, []
    while True:
        left, parent = p(node), node
        for child in draft.children(parent):
            if noise.accepts(child, left[draft.tokens[child - 1]] / left.sum()):
                node = child
                path.append(child)
                break
            left = without(left, [draft.tokens[child - 1]])
        if node == parent:
            return Verdict(tuple(path), noise.resample(len(path), left))


def test_a_draw_that_is_looked_up_is_rule_a() -> None:
    """Not only the text: the law of (path, token) is the same, so no draft is lost by it."""
    p, draft = random_model(5, 4, spread=5.0), Draft((1, 3, 2, 4, 0), FORKED)
    ours, theirs = (outcomes(lambda c, j=j: j(draft, rows(p, draft), c)) for j in (drawn, rule_a))
    for verdict in ours.keys() | theirs.keys():
        assert ours.get(verdict, 0.0) == pytest.approx(theirs.get(verdict, 0.0), abs=1e-12)
    assert len(ours) > 15, "every node was reached"


def test_a_fixed_chain_is_a_one_hot_q() -> None:
    """p(x) accepts, p without x follows: the token-wise rule and block verification agree with that."""
    p, tokens = random_model(5, 6), (2, 4)
    onehot = Draft.chain(tokens, np.eye(5)[list(tokens)])
    as_drawn = outcomes(lambda c: drawn(Draft.chain(tokens), rows(p, onehot), c))
    for judge in (walk, block):
        actual = outcomes(lambda c, j=judge: j(onehot, rows(p, onehot), c))
        for verdict in actual.keys() | as_drawn.keys():
            assert actual.get(verdict, 0.0) == pytest.approx(as_drawn.get(verdict, 0.0), abs=1e-12)


def stopped(drafts: Iterator[tuple[Draft, float]]) -> Iterator[tuple[Draft, float]]:
    """A drafter that stops behind a first draft that it doubts, and behind any token 0 or 3."""
    for draft, weight in drafts:
        doubts = [
            i for i, token in enumerate(draft.tokens, 1) if token in (0, 3) or draft.q[i - 1][token] < 0.2
        ]
        cut = draft.cut(doubts[0] if doubts else len(draft))
        assert cut is not None
        yield cut, weight


@pytest.mark.parametrize("judge", [block, walk])
def test_a_drafter_may_stop_for_what_it_has_drawn(judge: Judge) -> None:
    p, q = random_model(4, 7), random_model(4, 107)
    law = text_law(stopped(Shape((0, 1, 2), "iid").drafts(q)), p, judge, 4)
    assert total_variation(law, plain_law(p, 4)) < 1e-12


def test_wrong_verifiers_are_refused() -> None:
    p, q, K = random_model(5, 8), random_model(5, 108), 2
    chain, tree = Shape((0, 1), "iid"), Shape((0, 0, 0), "distinct")
    cases = {
        "softmax for argmax": text_law(wrong.softmax_for_argmax(q, K), p, walk, 3),
        "softmax for argmax, block": text_law(wrong.softmax_for_argmax(q, K), p, block, 3),
        "p/q on the likeliest": text_law(wrong.likeliest_as_drawn(q, 2, "iid"), p, walk, 3),
        "p/q on the likeliest, distinct": text_law(wrong.likeliest_as_drawn(q, 2, "distinct"), p, walk, 3),
        "no residual": text_law(chain.drafts(q), p, wrong.no_residual, 3),
        "no w in the residual": text_law(chain.drafts(q), p, wrong.unweighted_block, 3),
        "distinct as iid": text_law(tree.drafts(q), p, wrong.distinct_as_iid, 3),
        "doubtful draws dropped": text_law(wrong.doubtful_dropped(chain.drafts(q)), p, walk, 3),
    }
    for name, law in cases.items():
        assert law.sum() == pytest.approx(1), name
        assert total_variation(law, plain_law(p, 3)) > 0.01, name


def test_blocks_accept_more() -> None:
    """The paper's example: 11/9 drafts against 10/9; and never fewer on random models."""
    chain = Shape((0, 1), "iid")
    p, q = (lambda _: np.array([1, 2]) / 3), (lambda _: np.array([2, 1]) / 3)
    assert mean_accepted(chain.drafts(q), p, block) == pytest.approx(11 / 9)
    assert mean_accepted(chain.drafts(q), p, walk) == pytest.approx(10 / 9)
    gains = []
    for seed in range(12):
        p, q = random_model(6, seed), random_model(6, seed + 100)
        gains.append(mean_accepted(chain.drafts(q), p, block) - mean_accepted(chain.drafts(q), p, walk))
    assert min(gains) > -1e-12 and np.mean(gains) > 0.01


def test_the_mean_of_constant_acceptance_is_the_theory_s() -> None:
    """1 + accepted = (1 - a^(K+1)) / (1 - a), a = sum min(p, q)."""
    p, q = (lambda _: np.array([0.5, 0.3, 0.2])), (lambda _: np.array([0.2, 0.2, 0.6]))
    a = 0.2 + 0.2 + 0.2
    actual = 1 + mean_accepted(Shape((0, 1, 2), "iid").drafts(q), p, walk)
    assert actual == pytest.approx((1 - a**4) / (1 - a))


def test_more_children_are_accepted_more_often_and_best_without_putting_back() -> None:
    p, q = random_model(6, 9), random_model(6, 109)
    one, iid, distinct = (
        mean_accepted(Shape(parents, rule).drafts(q), p, walk)
        for parents, rule in (((0,), "iid"), ((0, 0, 0), "iid"), ((0, 0, 0), "distinct"))
    )
    assert one < iid < distinct
