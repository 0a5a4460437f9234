"""Positions, slots and rows of a step, by hand."""

import subprocess
import sys

import pytest

from attar.runtime.step import FREED, StepInput, TokenSpan, depths, slots


@pytest.fixture
def step():
    spans = (
        TokenSpan(7, 3, 6, (5, 2), wants=1),
        TokenSpan(9, 0, 2, (4,)),
        TokenSpan(8, 10, 12, (1, 0), wants=2, kept=3),
    )
    return StepInput([11, 12, 13, 21, 22, 31, 32], spans, copies=((3, 5),))


def test_positions_slots_and_rows(step):
    assert step.positions.tolist() == [3, 4, 5, 0, 1, 10, 11]
    assert step.slots(4).tolist() == [23, 8, 9, 16, 17, 7, 0]
    assert step.rows.tolist() == [2, 5, 6]
    assert (step.count, step.wants, step.offsets) == (7, 3, (0, 3, 5, 7))
    assert step.spans[0].context(4).tolist() == [20, 21, 22, 23, 8, 9]
    assert step.spans[2].context(4).tolist() == [4, 5, 6, 7, 0]
    step.check(4, 6)


def test_a_tree_shares_positions_and_not_slots():
    spans = (TokenSpan(0, 4, 9, (0, 1, 2), wants=5), TokenSpan(1, 0, 2, (3,)))
    step = StepInput(list(range(7)), spans, parents=((-1, 0, 0, 1, 2), None))
    assert step.positions.tolist() == [4, 5, 5, 6, 6, 0, 1]
    assert step.slots(4).tolist() == [4, 5, 6, 7, 8, 12, 13]
    step.check(4)
    assert depths(3, None).tolist() == [0, 1, 2]


def test_a_hole_is_no_slot():
    assert (slots((FREED, 2), 0, 8, 4)[:4] < 0).all()
    assert slots((FREED, 2), 4, 6, 4).tolist() == [8, 9]


def test_an_empty_step_is_empty():
    step = StepInput([], ())
    assert step.positions.size == step.rows.size == step.slots(4).size == 0
    step.check(4, 1)


@pytest.mark.parametrize(
    ("tokens", "spans", "more", "complaint"),
    [
        (3, [TokenSpan(0, 0, 2, (0,))], {}, "3 tokens for spans of 2"),
        (2, [TokenSpan(0, 0, 1, (0,)), TokenSpan(0, 0, 1, (1,))], {}, "two spans"),
        (0, [TokenSpan(0, 2, 2, (0,))], {}, r"runs \[2, 2\)"),
        (1, [TokenSpan(0, 0, 1, (0,), wants=2)], {}, "wants 2 of 1"),
        (5, [TokenSpan(0, 0, 5, (0,))], {}, "too few blocks for 5 entries"),
        (1, [TokenSpan(0, 0, 1, (FREED,))], {}, "released"),
        (2, [TokenSpan(0, 0, 1, (1,)), TokenSpan(1, 0, 1, (1,))], {}, "written to one slot"),
        (1, [TokenSpan(0, 0, 1, (9,))], {}, "outside the pool"),
        (1, [TokenSpan(0, 0, 1, (1,))], {"copies": ((0, 1), (2, 1))}, "copied to twice"),
        (2, [TokenSpan(0, 0, 2, (1,))], {"parents": ((-1,),)}, "1 parents for 2 tokens"),
        (2, [TokenSpan(0, 0, 2, (1,))], {"parents": ((-1, 1),)}, "comes after its child"),
    ],
)
def test_check_names_what_does_not_fit(tokens, spans, more, complaint):
    with pytest.raises(AssertionError, match=complaint):
        StepInput([0] * tokens, tuple(spans), **more).check(4, 5)


def test_bookkeeping_loads_no_torch():
    code = "import sys, attar.runtime.scheduler, attar.runtime.kv.memory; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_copies_that_may_be_made_again():
    """A step that broke off is run again: what was written meanwhile must not be copied over."""
    reader = TokenSpan(1, 5, 6, (3, 8), wants=1)  # writes place 1 of block 8, and needs place 0
    for other, copies, fine in [
        (TokenSpan(2, 5, 6, (3, 7), wants=1), ((7, 8),), True),  # a fork goes on in what was copied
        (
            TokenSpan(2, 4, 6, (3, 7), wants=1),
            ((7, 8),),
            False,
        ),  # block 7 went to another, from its beginning
        (TokenSpan(2, 5, 6, (3, 9), wants=1), ((7, 8), (2, 9)), True),
        (TokenSpan(2, 5, 6, (3, 7), wants=1), ((7, 8), (2, 7)), False),  # a target is read before
        (TokenSpan(2, 5, 6, (3, 6), wants=1), ((7, 9),), True),  # of no sequence of the step
        (TokenSpan(2, 5, 6, (3, 7), wants=1), ((7, 9),), False),
    ]:
        assert StepInput([1, 2, 3][: 1 + other.count], (reader, other), copies).repeatable(4) is fine, copies
    assert StepInput([1], (reader,)).repeatable(4)


def test_a_part_has_its_own_tokens_and_trees():
    spans = (TokenSpan(0, 0, 2, (0,)), TokenSpan(1, 0, 3, (1,), wants=3), TokenSpan(2, 0, 1, (2,), wants=1))
    step = StepInput([1, 2, 3, 4, 5, 6], spans, ((5, 1),), (None, (-1, 0, 0), None))
    part = step.part([1, 2])
    part.check(4)
    assert list(part.tokens) == [3, 4, 5, 6] and part.spans == spans[1:] and part.copies == step.copies
    assert part.parents == ((-1, 0, 0), None) and step.part([]).wants == 0
