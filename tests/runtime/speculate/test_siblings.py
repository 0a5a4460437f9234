"""Which siblings are run, what the others teach, and that neither looks at what was drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from attar.runtime.speculate.acceptance import AcceptanceRates
from attar.runtime.speculate.draft import LEVELS, Draft, kind_of
from attar.runtime.speculate.latency import Latency
from attar.runtime.speculate.policy import DraftPolicy
from attar.runtime.speculate.proposer import DraftFeedback
from attar.runtime.speculate.siblings import count_siblings, cut_siblings

FLAT, STEEP = {1: 1.0, 32: 1.03}, {1: 1.0, 32: 16.0}
FIRST, SECOND, THIRD = ((kind_of(rank, 1), kind_of(rank, 2)) for rank in range(3))


def drafting(times: dict[int, float], rates: dict[int, float], step: float = 0.1) -> DraftPolicy:
    """A policy that has seen 200 drafts of each kind, this share of them accepted; chains end at depth 2."""
    policy = DraftPolicy(Latency(times, {1: step, 8: step}))
    teach(policy, 0, {**rates, **{kind_of(0, depth): 0.0 for depth in range(3, 9)}})
    return policy


def teach(policy: DraftPolicy, sequence: int, rates: dict[int, float]) -> None:
    for kind, rate in rates.items():
        for turn in range(200):
            policy.acceptance.note(sequence, kind, int(turn * rate) != int((turn + 1) * rate))


def siblings(policy: DraftPolicy, sequences: list[int], limits: list[int]) -> list[set[int]]:
    """Of the chosen kinds those that are no chain."""
    chosen = policy.choose(sequences, limits, branches=4)
    return [{kind for kind in kinds if kind >= LEVELS} for kinds in chosen]


RATES = {FIRST[0]: 0.6, FIRST[1]: 0.6, SECOND[0]: 0.2, SECOND[1]: 0.2, THIRD[0]: 0.03, THIRD[1]: 0.0}


def test_nothing_is_wanted_before_it_has_shown_something() -> None:
    assert siblings(drafting(FLAT, {FIRST[0]: 0.6}), [0], [8]) == [set()]
    assert siblings(drafting(FLAT, {FIRST[0]: 0.6, SECOND[0]: 0.0}), [0], [8]) == [set()]
    once = drafting(FLAT, {FIRST[0]: 0.6})
    once.acceptance.note(0, SECOND[0], False)
    assert siblings(once, [0], [8]) == [set()]
    assert siblings(DraftPolicy(Latency()), [0], [8]) == [set()], "nor before times are known"


def test_siblings_are_wanted_where_tokens_are_nearly_free_and_not_where_they_cost() -> None:
    assert siblings(drafting(FLAT, RATES), [0], [8]) == [{*SECOND, THIRD[0]}]
    assert siblings(drafting(STEEP, RATES), [0], [8]) == [set()]
    assert siblings(drafting(FLAT, RATES), [0], [0]) == [set()], "without a chain there is none"
    assert drafting(FLAT, RATES).choose([0], [8], branches=1) == [set(FIRST)], "nor where branches are off"


def test_the_most_likely_first_within_the_limit() -> None:
    policy = drafting(FLAT, RATES)
    assert siblings(policy, [0], [2]) == [set()]
    assert siblings(policy, [0], [3]) == [{SECOND[0]}], "S_0 a_2 is more than S_1 a_2"
    assert siblings(policy, [0], [4]) == [set(SECOND)]


def test_the_time_of_drafting_is_part_of_the_pass() -> None:
    """What brings 0.3 tokens for a fifth of a pass pays where the pass is long, and not where it is short."""
    times = {1: 1.0, 2: 1.1, 3: 1.2, 4: 1.36, 32: 9.0}
    rates = {FIRST[0]: 0.9, FIRST[1]: 0.9, SECOND[0]: 0.3}
    long, short = drafting(times, rates, step=0.4), drafting(times, rates, step=0.01)
    for policy in (long, short):
        assert {*FIRST} <= policy.choose([0], [3], branches=4)[0]
    assert siblings(long, [0], [3]) == [{SECOND[0]}]
    assert siblings(short, [0], [3]) == [set()]


def test_no_step_of_the_draft_model_is_for_siblings() -> None:
    policy = drafting(FLAT, RATES)
    policy.latency = Latency(FLAT, {1: 0.1, 2: 5.0})
    assert siblings(policy, [0], [8]) == [{*SECOND, THIRD[0]}]


def test_no_more_is_risked_than_the_budget_has() -> None:
    policy = drafting(FLAT, RATES)
    policy.budget.left = 0.2  # two steps of the draft model
    assert siblings(policy, [0], [8]) == [set()]


def test_they_go_where_they_are_accepted() -> None:
    policy = drafting(FLAT, RATES)
    teach(policy, 7, {**dict.fromkeys((*SECOND, *THIRD), 0.0), FIRST[0]: 0.6, FIRST[1]: 0.6})
    good, bad = siblings(policy, [0, 7], [4, 4])
    assert good == set(SECOND) and not bad


def tree(*tokens: int, rule: str = "fixed") -> Draft:
    """x_1, x_2, and two siblings of each."""
    q = None if rule == "fixed" else [np.full(20, 0.05)] * 6
    kinds = (*FIRST, SECOND[0], THIRD[0], SECOND[1], THIRD[1])
    return Draft(tokens, (0, 1, 0, 0, 1, 1), q, rule, kinds)  # type: ignore[arg-type]


def test_a_draft_is_cut_to_its_chain_and_what_is_wanted() -> None:
    draft = cut_siblings(tree(1, 2, 3, 4, 5, 6), {THIRD[0], SECOND[1]})
    assert (draft.tokens, draft.parents) == ((1, 2, 4, 5), (0, 1, 0, 1))
    assert draft.kinds == (*FIRST, THIRD[0], SECOND[1])
    chain = Draft.chain([1, 2])
    assert cut_siblings(chain, {SECOND[0]}) is chain


def test_the_rule_is_chosen_by_what_is_wanted_and_not_by_what_came() -> None:
    drawn = tree(1, 2, 3, 4, 5, 6, rule="distinct")
    chain = cut_siblings(drawn, set())
    assert chain.is_chain and chain.rule == "iid" and chain.q is not None and len(chain.q) == 2
    deep = cut_siblings(drawn, {kind_of(1, 3)})
    assert deep.is_chain and deep.rule == "distinct"
    for cut_sibling in (chain, deep, cut_siblings(drawn, {SECOND[0]})):
        cut_sibling.check()


@pytest.mark.parametrize(
    ("path", "tokens", "taught"),
    [
        ((), (9,), {SECOND[0]: 0, THIRD[0]: 0}),
        ((), (4,), {SECOND[0]: 0, THIRD[0]: 1}),
        ((1,), (1, 5), {SECOND[0]: 0, THIRD[0]: 0, SECOND[1]: 1, THIRD[1]: 0}),
        ((1, 2), (1, 2, 5), {SECOND[0]: 0, THIRD[0]: 0, SECOND[1]: 0, THIRD[1]: 0}),
    ],
)
def test_what_was_not_run_teaches(path: tuple[int, ...], tokens: tuple[int, ...], taught: Any) -> None:
    acceptance, whole = AcceptanceRates(), {3: tree(1, 2, 3, 4, 5, 6)}
    count_siblings(acceptance, [DraftFeedback(3, cut_siblings(whole[3], set()), path, tokens)], whole)
    assert acceptance._all == {kind: (good, 1.0) for kind, good in taught.items()}


def test_what_was_run_is_the_policy_s_to_learn() -> None:
    """Together every kind is seen once; below an accepted sibling no row of the chain says anything."""
    for path, tokens in (((3,), (3, 9)), ((1,), (1, 5)), ((1, 4), (1, 6, 9))):
        policy, whole = DraftPolicy(Latency()), {3: tree(1, 2, 3, 4, 5, 6)}
        kept = cut_siblings(whole[3], {SECOND[0], THIRD[1]})
        assert kept.tokens == (1, 2, 3, 6)
        news = [DraftFeedback(3, kept, path, tokens)]
        policy.note(news, 1.0)
        count_siblings(policy.acceptance, news, whole)
        counts = {kind: count for kind, (_, count) in policy.acceptance._all.items()}
        row = {FIRST[0], SECOND[0], THIRD[0]}
        deeper = set() if path == (3,) else {FIRST[1], SECOND[1], THIRD[1]}
        assert counts == dict.fromkeys(row | deeper, 1.0)


def test_plain_passes_and_other_proposers_teach_nothing() -> None:
    acceptance = AcceptanceRates()
    plain = [DraftFeedback(number, None, (), (5,)) for number in (3, 4, 5)]
    count_siblings(acceptance, plain, {3: tree(1, 2, 3, 4, 5, 6), 4: Draft.chain([1])})
    count_siblings(acceptance, [DraftFeedback(4, Draft.chain([1]), (), (5,))], {4: Draft.chain([1])})
    assert acceptance._all == {}
