"""Static trees: the search against all trees, the value of a tree against its paths."""

import itertools
import random

import pytest

from attar.models.draft_heads.medusa_module import MedusaConfig
from attar.models.draft_heads.static_tree import (
    PUBLISHED,
    check_tree,
    expected_tokens,
    search_tree,
    to_depth,
)


def all_trees(heads, ranks, count):
    """Every set of ``count`` paths that has the beginnings of all its paths."""
    paths = [path for depth in range(1, heads + 1) for path in itertools.product(range(ranks), repeat=depth)]
    for chosen in itertools.combinations(paths, count):
        known = {(), *chosen}
        if all(path[:-1] in known for path in chosen):
            yield chosen


def value(tree, accuracies):
    """1 + sum over paths of the product of a_k(r), by loops."""
    total = 1.0
    for path in tree:
        product = 1.0
        for k in range(len(path)):
            product = product * accuracies[k][path[k]]
        total += product
    return total


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("count", [1, 3, 5])
def test_no_tree_of_as_many_paths_expects_more_tokens(seed, count):
    """Accuracies need not fall with the rank: they are measured."""
    drawn = random.Random(seed)
    accuracies = [[drawn.random() * (0.7 if seed % 2 else 1.0) for _ in range(2)] for _ in range(3)]
    best = max(value(tree, accuracies) for tree in all_trees(3, 2, count))
    found = search_tree(accuracies, count)
    check_tree(found)
    assert len(found) == count
    assert expected_tokens(found, accuracies) == pytest.approx(best)
    assert expected_tokens(found, accuracies) == pytest.approx(value(found, accuracies))


def test_every_beginning_of_a_searched_tree_is_the_best_smaller_tree():
    accuracies = [[0.6, 0.2, 0.1], [0.5, 0.3, 0.05], [0.4, 0.1, 0.02]]
    whole = search_tree(accuracies, 20)
    for count in range(1, 21):
        assert set(search_tree(accuracies, count)) == set(whole[:count])
    assert whole[:2] == ((0,), (0, 0))


def test_a_path_without_a_chance_is_left_out():
    assert search_tree([[0.5, 0.0], [0.0, 0.0]], 9) == ((0,),)
    assert search_tree([[0.0, 0.0]], 9) == ()


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_trees_are_trees(name):
    tree = PUBLISHED[name]
    check_tree(tree)
    assert len(tree) == 63 and max(map(len, tree)) == 4 and (0, 0, 0, 0) in tree
    assert all(len(path) <= 2 for path in to_depth(tree, 2))
    check_tree(to_depth(tree, 2))


@pytest.mark.parametrize("tree", [((0, 0),), ((0,), (0,)), ((),), ((0, 1), (0,))])
def test_what_is_no_tree_is_refused(tree):
    with pytest.raises(ValueError, match="the path"):
        MedusaConfig(hidden=8, vocabulary=16, layers=(1,), drafts=2, tree=tree)
