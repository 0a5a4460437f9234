"""EAGLE-2's tree: rerank against a search over all subtrees, and what is expanded."""

import itertools
import math
import random

import pytest
import torch

from attar.runtime.speculate.draft import LEVELS
from attar.runtime.speculate.heads.dynamic_tree import GrowingTree, rerank


def grown(seed, branches=3, levels=3, vocabulary=7, ends=frozenset(), sharp=2.0):
    generator = torch.Generator().manual_seed(seed)
    tree = GrowingTree(branches, ends)
    for _ in range(levels):
        logits = sharp * torch.randn(len(tree.leaves), vocabulary, generator=generator)
        tree.grow(logits.double().log_softmax(-1))
    return tree


def subtrees(parents, most):
    """All connected sets of ``most`` nodes below the root."""
    for nodes in itertools.combinations(range(1, len(parents)), most):
        if all(parents[node] in (0, *nodes) for node in nodes):
            yield nodes


@pytest.mark.parametrize("seed", range(4))
def test_rerank_is_the_best_connected_set(seed):
    tree = grown(seed, branches=2, levels=4)
    for most in range(1, 7):
        nodes = rerank(tree.scores, most)
        assert all(tree.parents[node] in (0, *nodes) for node in nodes)
        best = max(sum(math.exp(tree.scores[node]) for node in one) for one in subtrees(tree.parents, most))
        assert sum(math.exp(tree.scores[node]) for node in nodes) == pytest.approx(best, rel=1e-12)


def test_equals_prefer_the_shallower():
    tree = GrowingTree(2, frozenset())
    sure = torch.full((1, 4), -torch.inf)
    sure[0, 2] = 0.0  # its probability is 1
    for _ in range(3):
        tree.grow(sure)
    assert tree.tokens == [-1, 2, 2, 2] and rerank(tree.scores, 2) == [1, 2]


@pytest.mark.parametrize("seed", range(5))
def test_a_level_expands_its_best_nodes_into_their_likeliest_tokens(seed):
    branches, vocabulary = 3, 7
    generator = random.Random(seed)
    rows = {}

    def log_q(path):
        if path not in rows:
            weights = torch.tensor([generator.random() ** 3 for _ in range(vocabulary)]).double()
            rows[path] = (weights / weights.sum()).log()
        return rows[path]

    tree, beam = GrowingTree(branches, frozenset({6})), [((), 0.0)]
    every = {}
    for _ in range(3):
        paths = [tuple(tree.path_tokens(leaf)) for leaf in tree.leaves]
        assert set(paths) == {path for path, _ in beam}
        tree.grow(torch.stack([log_q(path) for path in paths]))
        children = {}
        for path, score in beam:
            for token in sorted(range(vocabulary), key=lambda t, p=path: -log_q(p)[t])[:branches]:
                children[*path, token] = score + float(log_q(path)[token])
        every |= children
        open_ends = [item for item in children.items() if item[0][-1] != 6]
        beam = sorted(open_ends, key=lambda item: -item[1])[:branches]
    nodes = {tuple(tree.path_tokens(n)): tree.scores[n] for n in range(1, len(tree.tokens))}
    assert nodes == pytest.approx(every)


@pytest.mark.parametrize("most", [1, 4, 9, 100])
def test_the_draft_is_a_tree_whose_beginnings_are_trees(most):
    tree = grown(7)
    draft = tree.draft(most)
    draft.check()
    assert len(draft) == min(most, len(tree.tokens) - 1)
    for count in range(1, len(draft)):
        draft.cut(count).check()
    assert [kind for kind in draft.kinds if kind < LEVELS] == list(
        range(1, 1 + sum(k < LEVELS for k in draft.kinds))
    )


def test_no_token_is_no_draft():
    tree = GrowingTree(3, frozenset())
    tree.grow(torch.full((1, 5), torch.nan))
    assert tree.leaves == [] and tree.draft(5) is None
