"""Trees of EAGLE: every node's score is that of a chain along its path, in batches too."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from attar.runtime.completion import Completion
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.sampling.sample import draw
from attar.runtime.sampling.warp import SamplingRow
from attar.runtime.speculate.draft import LEVELS
from attar.runtime.speculate.heads.chain import ChainProposer
from attar.runtime.speculate.heads.dynamic_tree import GrowingTree
from attar.runtime.speculate.heads.eagle_proposer import EagleChain
from attar.runtime.speculate.heads.eagle_tree import EagleTreeProposer, coupled_log_q
from attar.runtime.speculate.proposer import DraftRequest
from tests.runtime.speculate.heads.eagle_cases import SHAPE, context, drafter, random_head
from tests.runtime.speculate.heads.test_eagle import drafted
from tests.runtime.speculate.heads.test_eagle_law import Context


def proposer_of(lengths, kind="eagle3", **options):
    head = random_head(kind, drafts=3, **options)
    part, texts = drafter(head), []
    for sequence, length in enumerate(lengths):
        tokens, states = context(head, length, seed=length)
        part.read(sequence, tokens, 0, states)
        texts.append(tokens)
    return EagleTreeProposer(part, Context(), name="eagle", width=3), texts


@pytest.mark.parametrize("depth", [1, 2])
def test_scores_are_those_of_chains(monkeypatch, depth):
    proposer, texts = proposer_of((4, 9), shape=replace(SHAPE, depth=depth))
    trees: list[GrowingTree] = []
    monkeypatch.setattr(GrowingTree, "draft", lambda self, most: trees.append(self))
    proposer.propose([DraftRequest(n, tokens, 20) for n, tokens in enumerate(texts)])
    chain = EagleChain(proposer.drafter)
    for sequence, (tree, tokens) in enumerate(zip(trees, texts, strict=True)):
        assert len(tree.tokens) == 1 + 3 + 9 + 9
        for node in range(1, len(tree.tokens)):
            path = tree.path_tokens(node)
            rows = drafted(chain, tokens, path[:-1], sequence).log_softmax(-1)
            wanted = sum(float(row[token]) for row, token in zip(rows, path, strict=True))
            assert abs(tree.scores[node] - wanted) < 1e-4


def test_the_budget_and_the_depth_are_the_requests():
    proposer, (first, second) = proposer_of((4, 9), kind="eagle")
    requests = [
        DraftRequest(0, first, 7),
        DraftRequest(1, second, 9, depth=1),
        DraftRequest(1, second, 0),
        DraftRequest(0, first, 1),
    ]
    drafts = [proposer.propose([request])[0] for request in requests]
    assert [draft and len(draft) for draft in drafts] == [7, 3, None, 1]
    assert max(drafts[1].depths) == 1
    together = proposer.propose(requests[:2])
    assert [one.tokens for one in together] == [one.tokens for one in drafts[:2]]


class AscendingRules:
    """Each token is larger than the one before it."""

    def row(self, drafted=()):
        last = drafted[-1] if drafted else -1
        return SamplingRow(SamplingParams(temperature=0.0), allowed=torch.arange(40) > last)

    def key(self, ahead=0):
        return ahead


def test_the_rules_of_a_node_are_those_of_its_path():
    proposer, (tokens,) = proposer_of((6,))
    (draft,) = proposer.propose([DraftRequest(0, tokens, 20, rules=AscendingRules())])
    paths = [draft.path_tokens(draft.path(node)) for node in range(1, len(draft) + 1)]
    assert max(map(len, paths)) > 1 and all(sorted(set(path)) == list(path) for path in paths)


def test_penalties_and_biases_hold():
    proposer, (tokens,) = proposer_of((6,))
    bias = dict.fromkeys(range(0, 40, 2), -100.0)
    params = SamplingParams(temperature=0.0, logit_bias=bias, repetition_penalty=1e6)
    rules = Completion("r", 0, tokens, params, seed=0, limit=99)
    (draft,) = proposer.propose([DraftRequest(0, tokens, 20, rules=rules)])
    for node in range(1, len(draft) + 1):
        path = draft.path_tokens(draft.path(node))
        assert all(token % 2 for token in path)
    (plain,) = proposer.propose([DraftRequest(0, tokens, 20)])
    assert any(token % 2 == 0 for token in plain.tokens)


def test_the_best_token_of_coupled_noise_is_what_the_target_would_draw():
    generator = torch.Generator().manual_seed(0)
    for key in range(40):
        q = torch.rand(1, 50, generator=generator) ** 4
        q[0, ::3] = 0.0
        q /= q.sum()
        log_q = coupled_log_q(q, key)
        assert int(log_q.argmax()) == draw(q, [key])[0]
        assert np.isclose(float(log_q.exp().sum()), 1.0) and bool((log_q[0, ::3] == -torch.inf).all())


def test_coupled_trees_take_the_noise_of_the_completion():
    proposer, (tokens,) = proposer_of((6,))
    params = SamplingParams(temperature=1.0, seed=3)
    drafts = set()
    for seed in range(4):
        rules = Completion("r", 0, tokens, params, seed=seed, limit=99)
        (draft,) = proposer.propose([DraftRequest(0, tokens, 6, rules=rules)])
        assert draft.q is None and draft.rule == "fixed"
        drafts.add(draft.tokens)
    assert len(drafts) == 4


def test_the_best_chain_of_a_coupled_tree_is_the_coupled_chain():
    proposer, (tokens,) = proposer_of((6,))
    chains = ChainProposer(EagleChain(proposer.drafter), Context(), name="eagle")
    params = SamplingParams(temperature=1.0, seed=3)
    for seed in range(6):
        rules = Completion("r", 0, tokens, params, seed=seed, limit=99)
        (tree,) = proposer.propose([DraftRequest(0, tokens, 30, rules=rules)])
        (chain,) = chains.propose([DraftRequest(0, tokens, 3, rules=rules)])
        best = [token for token, kind in zip(tree.tokens, tree.kinds, strict=True) if kind < LEVELS]
        assert len(best) == 3 and tuple(best) == chain.tokens
