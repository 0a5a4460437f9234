"""Typical acceptance against its formula and a loop over all paths; and its name, lossy, wherever it runs."""

from __future__ import annotations

import math

import numpy as np
import pytest

import attar
from attar.errors import SettingsError
from attar.measure.speculation.profile import FixedPolicy
from attar.runtime.speculate.draft import Draft
from attar.runtime.speculate.settings import SpeculationSettings
from attar.runtime.speculate.typical import DELTA, EPSILON, longest_typical, threshold
from attar.runtime.speculate.verify import verify
from tests.runtime.speculate.test_verify import KnownRows, Noise


def drawn(seed, n, V=5, sharp=2.0):
    z = sharp * np.random.default_rng(seed).standard_normal((n + 1, V))
    p = np.exp(z)
    return (p / p.sum(1, keepdims=True)).astype(np.float32)


def by_formula(p):
    """min(epsilon, delta exp(-H)), token by token in Python's float64."""
    entropy = 0.0
    for chance in p.tolist():
        if chance > 0:
            entropy -= chance * math.log(chance)
    return min(0.09, 0.3 * math.exp(-entropy))


@pytest.mark.parametrize("seed", range(5))
def test_the_threshold_is_that_of_the_paper(seed):
    for p in drawn(seed, 4, V=50, sharp=seed + 0.1):
        assert threshold(p) == pytest.approx(by_formula(p), rel=1e-6)
    assert (EPSILON, DELTA) == (0.09, 0.3)
    assert threshold(np.array([1.0, 0.0])) == 0.09  # certain: the hard threshold
    assert threshold(np.full(100, 0.01)) == pytest.approx(0.3 / 100)  # uniform: below the probability of each


TREES = [(0, 1, 2), (0, 0, 1, 1, 2), (0, 0, 0), (0, 1, 0, 3, 4, 2)]


def best_path(draft, rows):
    """The longest path whose drafts all pass, of equally long ones the likeliest, by trying every path."""
    best = ((0, 0.0), ())
    for node in range(1, len(draft) + 1):
        path, chance, fits = draft.path(node), 1.0, True
        for step, before in zip(path, (0, *path), strict=False):
            p = float(rows[before][draft.tokens[step - 1]])
            fits, chance = fits and p > by_formula(rows[before]), chance * p
        if fits:
            best = max(best, ((len(path), chance), path))
    return best[1]


@pytest.mark.parametrize("parents", TREES)
def test_the_longest_likely_path_is_taken(parents):
    lengths = set()
    for seed in range(60):
        rows = drawn(seed, len(parents), V=8)
        tokens = np.random.default_rng(1000 + seed).permutation(8)[: len(parents)]
        draft = Draft(tuple(map(int, tokens)), parents)
        verdict = longest_typical(draft, lambda node, rows=rows: rows[node], lambda node: 7 + node)
        assert verdict.path == best_path(draft, rows)
        assert verdict.token == 7 + (verdict.path[-1] if verdict.path else 0)
        lengths.add(len(verdict.path))
    assert len(lengths) > 1


def test_nothing_behind_the_end_of_a_completion_is_accepted():
    rows, draft = np.full((4, 5), 0.2, dtype=np.float32), Draft((1, 2, 3), (0, 1, 2))
    assert longest_typical(draft, lambda node: rows[node], lambda node: 4).path == (1, 2, 3)
    ended = longest_typical(draft, lambda node: rows[node], lambda node: -1 if node == 1 else 4)
    assert ended.path == (1,)


def test_the_mode_takes_it_only_where_tokens_are_sampled():
    rows = drawn(3, 2, sharp=0.1)
    draft = Draft((int(rows[0].argmin()), 0), (0, 1))
    target = KnownRows(rows, draft, Noise(0, 0, 0))
    assert len(verify(draft, target, target.noise, "typical").path) == 2
    greedy = np.eye(5, dtype=np.float32)[[1, 2, 3]]
    certain = KnownRows(greedy, draft, Noise(0, 0, 0))
    assert verify(draft, certain, certain.noise, "typical") == verify(draft, certain, certain.noise)


@pytest.fixture(scope="module")
def runs():
    params = attar.SamplingParams(max_tokens=48, temperature=1.0, seed=3)
    prompt = "def add(a, b):\n    return a + b\n\ndef add(a, b):\n    return"
    texts, facts = {}, {}
    for mode in ("typical", "coupled"):
        llm = attar.LLM("attar:tiny", speculate="ngram", verification=mode, drafts=4)
        llm.engine.speculator.policy = FixedPolicy(4)
        texts[mode], facts[mode] = llm.generate([prompt], params)[0], llm.describe()
        greedy = llm.generate([prompt], attar.SamplingParams(max_tokens=24, temperature=0.0))[0]
        facts[mode, "greedy"], facts[mode, "counts"] = greedy, llm.engine.speculator.counts
    return texts, facts


def test_it_is_named_lossy_where_completions_are_described(runs):
    texts, facts = runs
    assert texts["typical"].usage.lossy and not texts["coupled"].usage.lossy
    assert "LOSSY" in facts["typical"].speculation and "LOSSY" not in facts["coupled"].speculation
    assert any("LOSSY" in line for line in facts["typical"].lines())
    assert 0 < facts["typical", "counts"].lossy <= facts["typical", "counts"].accepted
    assert facts["coupled", "counts"].lossy == 0
    assert texts["typical"].to_dict()["usage"]["lossy"] is True


def test_greedy_requests_stay_exact(runs):
    _, facts = runs
    assert not facts["typical", "greedy"].usage.lossy
    assert facts["typical", "greedy"].token_ids == facts["coupled", "greedy"].token_ids


def test_it_is_used_only_where_it_is_asked_for():
    assert SpeculationSettings(speculate="ngram").verification is None
    with pytest.raises(SettingsError, match="coupled, exact, typical or None"):
        SpeculationSettings(speculate="ngram", verification="lossy")


def test_a_warning_says_so_when_the_model_is_loaded(caplog):
    attar.LLM("attar:tiny", speculate="ngram", verification="typical")
    assert "typical acceptance is lossy" in caplog.text
