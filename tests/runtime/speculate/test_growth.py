"""Siblings are the next best of the rows that the chain is made of, and cost no pass."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
import torch

from attar.runtime.completion import Completion
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.sampling.sample import draw, draw_distinct, noise_key
from attar.runtime.sampling.warp import SamplingRow, adjust, largest_indices, warp
from attar.runtime.speculate.draft import LEVELS, Draft, kind_of
from attar.runtime.speculate.draft_model import DraftModel, GrowingDraft
from attar.runtime.speculate.noise import DraftRules, Noise
from attar.runtime.speculate.proposer import DraftRequest, SamplingRules
from tests.runtime.fake_runner import FakeRunner, logits_after
from tests.runtime.speculate.laws import fits

PROMPT = [7, 3, 9, 1, 4]
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=0.9, top_k=20, repetition_penalty=1.2, frequency_penalty=0.2)


def text(params: SamplingParams, seed: int = 5) -> Completion:
    return Completion("r", 0, PROMPT, params, seed=seed, limit=1000)


def exact(params: SamplingParams = SAMPLED, seed: int = 5) -> DraftRules:
    return DraftRules(text(params, seed), Noise(seed, 0, len(PROMPT)))


def drafted(rules: SamplingRules | None, *, most: int = 4, wide: bool = True, **settings: object) -> Draft:
    model = DraftModel(FakeRunner(), **settings)  # type: ignore[arg-type]
    (actual,) = model.propose([DraftRequest(0, PROMPT, most, rules=rules, siblings=wide)])
    model.check()
    assert actual is not None
    actual.check()
    return actual


def best(rules: SamplingRules | None, before: tuple[int, ...], count: int) -> list[int]:
    """The next best tokens, one after the other: each is what is taken where the others are forbidden."""
    logits = logits_after([*PROMPT, *before])[None]
    row = SamplingRow(GREEDY) if rules is None else rules.row(before)
    weights = adjust(logits, [row]).softmax(-1) if row.params.greedy else warp(logits, [row])
    weights = weights.clone()
    actual: list[int] = []
    while len(actual) < count and weights.any():
        if row.params.greedy:
            actual.append(int(weights.argmax()))
        else:
            assert rules is not None
            actual += draw(weights, [rules.key(len(before))])
        weights[0, actual[-1]] = 0.0
    return actual


ALL: dict[str, SamplingRules | None] = {
    "no rules": None,
    "greedy": text(GREEDY),
    "penalised": text(replace(GREEDY, repetition_penalty=1.5)),
    "coupled": text(SAMPLED),
    "exact": exact(),
}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("branches", [2, 4])
def test_a_chain_with_its_next_best_siblings(name: str, branches: int) -> None:
    rules, K = ALL[name], 4
    chain, tree = drafted(rules, wide=False), drafted(rules, branches=branches)
    assert tree.tokens[:K] == chain.tokens and chain.is_chain and chain.kinds is None
    assert tree.counts == (branches,) * K and all(parent < K for parent in tree.parents)
    for depth in range(K):
        row = tree.children(depth)
        assert list(tree.path_tokens(row)) == best(rules, chain.tokens[:depth], branches)
        assert tree.kinds is not None
        assert [tree.kinds[node - 1] for node in row] == [kind_of(r, depth + 1) for r in range(branches)]
    assert tree.rule == ("distinct" if name == "exact" else "fixed")
    if name == "exact":
        assert tree.q is not None and chain.q is not None
        assert all(tree.q[node] is tree.q[parent] for node, parent in enumerate(tree.parents))
        assert all(np.array_equal(tree.q[node], chain.q[node]) for node in range(K))


def test_siblings_cost_no_pass() -> None:
    runs = []
    for wide in (False, True):
        runner = FakeRunner()
        DraftModel(runner).propose([DraftRequest(0, PROMPT, 4, siblings=wide)])
        runs.append((runner.ran, len(runner.steps)))
    assert runs[0] == runs[1] == (len(PROMPT) + 3, 4)


def test_one_branch_is_a_chain() -> None:
    assert drafted(text(GREEDY), branches=1).kinds is None


def test_only_what_may_follow_is_a_sibling() -> None:
    """Cut by top-k, or banned: no more than there are."""
    for rules in (text(replace(SAMPLED, top_k=2)), exact(replace(SAMPLED, top_k=2))):
        assert drafted(rules, branches=4).counts == (2,) * 4
    logits = torch.full((1, 6), -torch.inf)
    logits[0, [2, 4]] = torch.tensor([1.0, 3.0])
    growing = GrowingDraft(DraftRequest(0, PROMPT, 3), [], 0, 3, frozenset(), 0.0, 4)
    growing.extend(logits)
    assert growing.tokens == [4] and growing.siblings == [[2]]
    growing.extend(torch.full((1, 6), torch.nan))
    assert not growing.open and growing.tokens == [4]
    actual = growing.draft()
    assert actual is not None and actual.tokens == (4, 2)


def test_doubt_and_ends_stop_the_chain_as_before() -> None:
    for seed in range(6):
        rules = exact(seed=seed)
        for settings in ({"min_confidence": 0.2}, {"ends": list(range(0, 50, 3))}):
            chain, tree = (drafted(rules, most=8, wide=wide, **settings) for wide in (False, True))
            assert tree.tokens[: len(chain)] == chain.tokens and tree.depths[-1] <= len(chain)


def test_levels_beyond_the_last_have_no_siblings() -> None:
    """Their kinds would be one, and what is wanted of one would be run of all."""
    tree = drafted(None, most=40, branches=2)
    assert tree.kinds is not None and len(set(tree.kinds[40:])) == len(tree.kinds[40:]) == LEVELS - 1


def test_the_largest_of_a_row() -> None:
    row = np.random.default_rng(0).integers(0, 9, 50).astype(np.float32)
    for count in (1, 3, 9):
        assert largest_indices(row, count).tolist() == np.argsort(-row, kind="stable")[:count].tolist()


@pytest.mark.parametrize("zeros", [0.0, 0.9])
@pytest.mark.parametrize("V", [5, 50, 3000])
def test_several_draws_are_draws_with_the_others_forbidden(V: int, zeros: float) -> None:
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        p = (torch.randn(V, generator=generator) * (0.1 + seed % 7)).softmax(-1)
        p[torch.rand(V, generator=generator) < zeros] = 0.0
        left, wanted = p.clone(), []
        while len(wanted) < 4 and left.any():
            wanted += draw(left[None], [seed])
            left[wanted[-1]] = 0.0
        if wanted:
            assert draw_distinct(p, seed, 4) == wanted


@pytest.mark.parametrize("count", [5_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_several_draws_have_the_law_of_draws_without_putting_back(count: int) -> None:
    p = np.array([0.4, 0.3, 0.0, 0.2, 0.1], dtype=np.float32)
    law = np.zeros((5, 5, 5))
    for some in permutations(np.flatnonzero(p).tolist(), 3):
        left, odds = 1.0, 1.0
        for token in some:
            odds *= p[token] / left
            left -= p[token]
        law[some] = odds
    row = torch.from_numpy(p)
    texts = [draw_distinct(row, noise_key(seed, 0, 0), 3) for seed in range(count)]
    assert fits(texts, law / law.sum())
