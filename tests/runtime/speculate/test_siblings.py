"""Which siblings are run, what the others teach, and that neither looks at what was drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from attar.runtime.speculate.acceptance import kind_of
from attar.runtime.speculate.choose import Chooser
from attar.runtime.speculate.cost import Cost
from attar.runtime.speculate.draft import Draft
from attar.runtime.speculate.proposer import News
from attar.runtime.speculate.siblings import LOOK, Siblings, cut, wanted

FLAT = {1: {1: 1.0, 32: 1.03}, 8: {8: 1.0, 64: 1.05}}
STEEP = {1: {1: 1.0, 32: 16.0}, 8: {8: 1.0, 64: 8.0}}
FIRST, SECOND, THIRD = ((kind_of(rank, 1), kind_of(rank, 2)) for rank in range(3))


def chooser(times: dict[int, dict[int, float]], rates: dict[int, float], step: float = 0.1) -> Chooser:
    """One that has seen 200 drafts of each kind, of which so many were accepted."""
    made = Chooser(Cost(times, {1: step, 8: step}))
    teach(made, 0, rates)
    return made


def teach(made: Chooser, sequence: int, rates: dict[int, float]) -> None:
    for kind, rate in rates.items():
        for turn in range(200):
            made.acceptance.note(sequence, kind, int(turn * rate) != int((turn + 1) * rate))


RATES = {FIRST[0]: 0.6, FIRST[1]: 0.6, SECOND[0]: 0.2, SECOND[1]: 0.2, THIRD[0]: 0.03, THIRD[1]: 0.0}


def test_nothing_is_wanted_before_it_has_shown_something() -> None:
    assert wanted(chooser(FLAT, {FIRST[0]: 0.6}), [0], [2], [8], 99) == [set()]
    assert wanted(chooser(FLAT, {FIRST[0]: 0.6, SECOND[0]: 0.0}), [0], [2], [8], 99) == [set()]
    once = chooser(FLAT, {FIRST[0]: 0.6})
    once.acceptance.note(0, SECOND[0], False)
    assert wanted(once, [0], [2], [8], 99) == [set()]
    assert wanted(Chooser(Cost()), [0], [2], [8], 99) == [set()], "nor before times are known"


def test_siblings_are_wanted_where_tokens_are_nearly_free_and_not_where_they_cost() -> None:
    assert wanted(chooser(FLAT, RATES), [0], [2], [8], 99) == [{*SECOND, THIRD[0]}]
    assert wanted(chooser(STEEP, RATES), [0], [2], [8], 99) == [set()]
    assert wanted(chooser(FLAT, RATES), [0], [0], [8], 99) == [set()], "beside no chain there is none"


def test_the_surest_first_in_what_room_there_is() -> None:
    made = chooser(FLAT, RATES)
    assert wanted(made, [0], [2], [2], 99) == [set()]
    assert wanted(made, [0], [2], [3], 99) == [{SECOND[0]}], "S_0 a_2 is more than S_1 a_2"
    assert wanted(made, [0], [2], [4], 99) == [set(SECOND)]
    assert wanted(made, [0], [2], [8], 4) == [set(SECOND)], "in the step too"
    assert wanted(made, [0], [2], [8], 1) == [set()]


def test_the_time_of_drafting_is_part_of_the_pass() -> None:
    """What brings 0.2 tokens for a fifth of a pass pays where the pass is long, and not where it is short."""
    times = {1: {1: 1.0, 3: 1.4, 4: 1.6, 32: 7.0}}
    rates = {FIRST[0]: 0.6, FIRST[1]: 0.6, SECOND[0]: 0.3}
    assert wanted(chooser(times, rates, step=0.7), [0], [2], [3], 99) == [{SECOND[0]}]
    assert wanted(chooser(times, rates, step=0.01), [0], [2], [3], 99) == [set()]


def test_no_step_of_the_draft_model_is_for_siblings() -> None:
    made = chooser(FLAT, RATES)
    made.cost = Cost(FLAT, {1: 0.1, 2: 5.0})
    assert wanted(made, [0], [2], [8], 99) == [{*SECOND, THIRD[0]}]


def test_no_more_is_risked_than_is_in_the_purse() -> None:
    made = chooser(FLAT, RATES)
    made.purse.left = 0.2  # two steps of the draft model
    assert wanted(made, [0], [2], [8], 99) == [set()]


def test_they_go_where_they_are_accepted() -> None:
    made = chooser(FLAT, RATES)
    teach(made, 7, dict.fromkeys((*SECOND, *THIRD), 0.0))
    good, bad = wanted(made, [0, 7], [2, 2], [4, 4], 99)
    assert good == set(SECOND) and not bad


def tree(*tokens: int, rule: str = "fixed") -> Draft:
    """x_1, x_2, and two siblings of each."""
    q = None if rule == "fixed" else [np.full(20, 0.05)] * 6
    kinds = (*FIRST, SECOND[0], THIRD[0], SECOND[1], THIRD[1])
    return Draft(tokens, (0, 1, 0, 0, 1, 1), q, rule, kinds)  # type: ignore[arg-type]


def test_a_draft_is_cut_to_its_chain_and_what_is_wanted() -> None:
    found = cut(tree(1, 2, 3, 4, 5, 6), {THIRD[0], SECOND[1]})
    assert (found.tokens, found.parents) == ((1, 2, 4, 5), (0, 1, 0, 1))
    assert found.kinds == (*FIRST, THIRD[0], SECOND[1])
    chain = Draft.chain([1, 2])
    assert cut(chain, {SECOND[0]}) is chain


def test_the_rule_is_chosen_by_what_is_wanted_and_not_by_what_came() -> None:
    drawn = tree(1, 2, 3, 4, 5, 6, rule="distinct")
    chain = cut(drawn, set())
    assert chain.is_chain and chain.rule == "iid" and chain.q is not None and len(chain.q) == 2
    deep = cut(drawn, {kind_of(1, 3)})
    assert deep.is_chain and deep.rule == "distinct"
    for each in (chain, deep, cut(drawn, {SECOND[0]})):
        each.check()


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
    made, acceptance = Siblings(), Chooser(Cost()).acceptance
    (chain,) = made.kept([3], [tree(1, 2, 3, 4, 5, 6)], [set()])
    made.learn(acceptance, [News(3, chain, path, tokens)])
    assert acceptance._pool == {kind: (good, 1.0) for kind, good in taught.items()}
    made.learn(acceptance, [News(3, chain, path, tokens)])
    assert len(acceptance._pool) == len(taught), "once"
    assert max(count for _, count in acceptance._pool.values()) == 1.0


def test_what_was_run_is_the_chooser_s_to_learn() -> None:
    """Together every kind is seen once; behind an accepted sibling no row of the chain says anything."""
    for path, tokens in (((3,), (3, 9)), ((1,), (1, 5)), ((1, 4), (1, 6, 9))):
        made, mind = Siblings(), Chooser(Cost())
        (kept,) = made.kept([3], [tree(1, 2, 3, 4, 5, 6)], [{SECOND[0], THIRD[1]}])
        assert kept is not None and kept.tokens == (1, 2, 3, 6)
        news = [News(3, kept, path, tokens)]
        mind.note(news, 1.0)
        made.learn(mind.acceptance, news)
        seen = {kind: count for kind, (_, count) in mind.acceptance._pool.items()}
        row = {FIRST[0], SECOND[0], THIRD[0]}
        deeper = set() if path == (3,) else {FIRST[1], SECOND[1], THIRD[1]}
        assert seen == dict.fromkeys(row | deeper, 1.0)


def test_plain_passes_and_other_proposers_teach_nothing() -> None:
    made, acceptance = Siblings(), Chooser(Cost()).acceptance
    made.kept([3, 4], [tree(1, 2, 3, 4, 5, 6), None], [set(), set()])
    made.learn(acceptance, [News(3, None, (), (5,)), News(4, None, (), (5,)), News(5, None, (), (5,))])
    assert acceptance._pool == {}


def test_they_are_looked_at_now_and_then_where_none_pay() -> None:
    made, steep, flat = Siblings(), chooser(STEEP, RATES), chooser(FLAT, RATES)
    looks = [made.wanted(steep, [0], [2], [8], 99)[0] for _ in range(3 * LOOK)]
    assert looks == [True, *[False] * (LOOK - 1)] * 3
    assert [made.wanted(flat, [0], [2], [8], 99) for _ in range(3)] == [(True, [{*SECOND, THIRD[0]}])] * 3
