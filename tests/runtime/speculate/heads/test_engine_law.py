"""The law of whole texts that trained proposers draft, counted.

Real heads and suffix trees are in the engine, which samples at temperature 1 without a seed, in batches whose
requests come and go.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from attar.runtime.admission import Limits
from attar.runtime.llm import LLM
from attar.runtime.loading import Loaded
from attar.runtime.speculate import verify
from tests.cases import mostly_slow
from tests.runtime.speculate import wrong
from tests.runtime.speculate.heads.kinds import EVERY, head_of_kind, proposer_of
from tests.runtime.speculate.laws import fits
from tests.runtime.speculate.proposing import speculator
from tests.runtime.speculate.test_law import LENGTH, PARAMS, TOGETHER, law, model, runner, texts

FEW = 400
MANY = 25_000 // LENGTH  # texts; the bound of their law follows their number
FAST = ("medusa tree", "dspark")


def drafting(name: str) -> LLM:
    """The target of six tokens, with an engine that drafts in every pass."""
    target, case = Loaded(runner(0)), EVERY[name]
    head = head_of_kind(case, model(0), seed=3) if case.kind else None
    subject = speculator(proposer_of(case, head, target.runner), most=6)
    subject.policy.min_chance = 0.1
    return LLM.of(target, limits=Limits(step_tokens=2048, sequences=TOGETHER), speculator=subject)


def keeps_the_law(name: str, count: int) -> bool:
    llm = drafting(name)
    actual = texts(llm, PARAMS["plain"], count)
    counts = llm.engine.speculator.counts
    assert 0.03 * counts.drafted < counts.accepted < 0.95 * counts.drafted, "some are taken, some are not"
    assert counts.drafts > count / 2
    return fits(actual, law("plain"))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", mostly_slow(EVERY, FAST))
def test_texts_of_the_engine_have_the_targets_law(name):
    assert keeps_the_law(name, 200)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", EVERY)
def test_many_draws_have_the_targets_law(name):
    assert keeps_the_law(name, MANY)


@pytest.mark.slow
def test_a_q_that_nothing_was_drawn_from_is_refused():
    llm = drafting("dflash")
    proposer = llm.engine.speculator.proposer
    propose = proposer.propose

    def flat(q):
        return np.sqrt(q) / np.sqrt(q).sum()

    def flattened(requests):
        return [draft and replace(draft, q=[flat(q) for q in draft.q]) for draft in propose(requests)]

    proposer.propose = flattened
    assert not fits(texts(llm, PARAMS["plain"], MANY), law("plain")), "1,600 texts often fit"


@pytest.mark.slow
def test_a_verifier_without_a_residual_is_refused(monkeypatch):
    monkeypatch.setattr(verify, "block", wrong.no_residual)
    assert not fits(texts(drafting("dspark"), PARAMS["plain"], 4 * FEW), law("plain"))
