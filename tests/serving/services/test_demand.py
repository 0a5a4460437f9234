"""A drafter whose drafts are not used is asked ever more seldom, one that guesses right again soon."""

from itertools import pairwise

from attar.serving.services.waiting import MOST_GAP, PATIENCE, DraftDemand


def asked(demand, lengths, useful):
    """The lengths at which a drafter is asked for a token; each answer is of use or not."""
    result = []
    for length in lengths:
        ahead = demand.ahead(length, 9)
        assert ahead in (0, 1, 9)
        if ahead:
            result.append(length)
            demand.answered(length, useful)
    return result


def test_it_drafts_on_while_its_drafts_are_used():
    demand = DraftDemand(10)
    for length in range(10, 200):
        assert demand.ahead(length, 9) == 9
        demand.answered(length, False)
        demand.used(length + 1)


def test_wrong_guesses_are_asked_for_ever_more_seldom():
    demand = DraftDemand(0)
    lengths = asked(demand, range(400), False)
    assert lengths[: PATIENCE + 1] == list(range(PATIENCE + 1))
    gaps = [second - first for first, second in pairwise(lengths)]
    assert gaps[PATIENCE : PATIENCE + 5] == [2, 4, 8, 16, 32] and set(gaps[PATIENCE + 5 :]) == {MOST_GAP + 1}


def test_right_guesses_make_it_draft_on_again():
    demand = DraftDemand(0)
    asked(demand, range(400), False)
    asked(demand, range(400, 400 + 2 * MOST_GAP + 10), True)
    assert demand.gap == 0 and demand.ahead(500, 9) == 9


def test_where_drafts_do_not_pay_it_begins_with_questions():
    demand = DraftDemand(50, useful=False)
    assert [demand.ahead(length, 9) for length in (50, 51, 52, 53, 54)] == [0, 0, 1, 0, 1]
    demand.answered(54, True)
    assert demand.ahead(55, 9) == 9
