"""Confidence corrected by what was accepted: the formula, and drafts that end sooner or later by it."""

from __future__ import annotations

import pytest

from attar.runtime.speculate.acceptance import DECAY, OWN_DECAY, OWN_PRIOR, PRIOR
from attar.runtime.speculate.heads.confidence_correction import ConfidenceCorrection
from attar.runtime.speculate.proposer import DraftFeedback, DraftRequest
from tests.runtime.speculate.heads.test_chain import NearTarget, StatefulRunner, proposer_of

CHANCES = [0.9, 0.8, 0.7]


def test_the_formula() -> None:
    correction = ConfidenceCorrection()
    assert correction.factors(0, 3) == [1.0, 1.0, 1.0]
    correction.note(0, [5, 6, 7], CHANCES, [5, 6, 9])
    correction.note(0, [5, 6, 7], CHANCES, [5, 8, 9])
    pooled = [
        (1 * DECAY + 1 + PRIOR) / (0.9 * DECAY + 0.9 + PRIOR),
        (1 * DECAY + 0 + PRIOR) / (0.8 * DECAY + 0.8 + PRIOR),
        (0 + PRIOR) / (0.7 * DECAY + PRIOR),
    ]
    own = [
        (1 * OWN_DECAY + 1 + OWN_PRIOR * pooled[0]) / (0.9 * OWN_DECAY + 0.9 + OWN_PRIOR),
        (1 * OWN_DECAY + 0 + OWN_PRIOR * pooled[1]) / (0.8 * OWN_DECAY + 0.8 + OWN_PRIOR),
        (0 + OWN_PRIOR * pooled[2]) / (0.7 * OWN_DECAY + OWN_PRIOR),
    ]
    assert correction.factors(0, 3) == pytest.approx(own, rel=1e-12)
    assert correction.factors(1, 3) == pytest.approx(pooled, rel=1e-12), "another sequence"
    correction.forget(0)
    assert correction.factors(0, 3) == pytest.approx(pooled, rel=1e-12)


def test_a_draft_behind_the_decided_tokens_is_not_judged() -> None:
    correction = ConfidenceCorrection()
    correction.note(0, [5, 6, 7], CHANCES, [5])
    assert correction.factors(0, 3)[1:] == [1.0, 1.0]
    assert correction.factors(0, 1)[0] > 1.0


def test_a_chance_that_is_no_number_harms_no_other_sequence() -> None:
    correction = ConfidenceCorrection()
    correction.note(0, [5, 6, 7], [0.9, float("nan"), float("nan")], [5, 6, 7])
    assert correction.factors(0, 3)[0] > 1.0 and correction.factors(0, 3)[1:] == [1.0, 1.0]
    assert correction.factors(1, 3)[1:] == [1.0, 1.0]


def test_the_truth_is_learnt() -> None:
    """A head that says 0.9 everywhere, of which one in three is right at the second token."""
    correction = ConfidenceCorrection()
    for turn in range(600):
        correction.note(0, [1, 2, 3], [0.9] * 3, [1, 2 if turn % 3 == 0 else 0, 3, 4])
    first, second, third = (0.9 * factor for factor in correction.factors(0, 3))
    assert first == pytest.approx(1.0, abs=0.02)
    assert second == pytest.approx(1 / 3, abs=0.08)
    assert third == pytest.approx(1.0, abs=0.03), "of those whose parents were accepted"


def test_a_depth_that_is_not_reached_is_tried_again() -> None:
    correction = ConfidenceCorrection()
    for _ in range(50):
        correction.note(0, [1, 2], [0.9, 0.9], [1, 3])
    low = correction.factors(0, 2)[1]
    for _ in range(300):
        correction.note(0, [1], [0.9], [1, 3])
    assert low < 0.2 and correction.factors(0, 2)[1] > 0.8


def test_a_head_that_is_too_sure_drafts_less_and_one_that_is_too_modest_more() -> None:
    head = NearTarget(confidence=[0.9, 0.9, 0.5])
    proposer = proposer_of(StatefulRunner(), head)
    request = DraftRequest(0, [5, 6, 7], 3, blocks=(0,), min_chance=0.6)
    (draft,) = proposer.propose([request])
    assert len(draft) == 2, "0.9 * 0.9 * 0.5 does not pay"
    for _ in range(20):
        (draft,) = proposer.propose([request])
        proposer.observe([DraftFeedback(0, draft, (1,), [draft.tokens[0], 1 + draft.tokens[-1]])])
    assert len(draft) == 1, "the second token was never right"
    other = proposer_of(StatefulRunner(), NearTarget(confidence=[0.7, 0.7, 0.9]))
    for _ in range(20):
        (draft,) = other.propose([DraftRequest(0, [5, 6, 7], 3, blocks=(0,), min_chance=0.55)])
        other.observe([DraftFeedback(0, draft, (), [*draft.tokens, 1])])
    assert len(draft) == 3, "0.7 * 0.7 did not pay until it was always right"
