"""Times of a runner's passes, on a clock that the test moves."""

from __future__ import annotations

import pytest

from attar.runtime.speculate.times import ROUNDS, measure
from attar.runtime.step import StepInput
from tests.runtime.fake_runner import FakeRunner
from tests.runtime.speculate.test_speculator import Clock


def test_the_shortest_run_counts_but_no_warm_up_and_no_size_is_longer_than_a_larger_one() -> None:
    clock, runner = Clock(), FakeRunner(blocks=40, context=None)
    run, runs, took = runner.run, list[int](), {1: 0.03, 2: 0.05, 4: 0.04, 8: 0.2, 16: 0.06}

    def slow(step: StepInput) -> object:
        count = len(step.tokens)
        runs.append(count)
        clock.now += took[count] * (
            0.5 if runs.count(count) == 1 and count < 8 else 1 + runs.count(count) % 2
        )
        return run(step)

    runner.run = slow  # type: ignore[assignment, method-assign]
    found = measure(runner, {1: (1, 2, 4, 8, 16)}, clock=clock)
    assert found == {1: pytest.approx({1: 0.03, 2: 0.04, 4: 0.04, 8: 0.06, 16: 0.06})}
    assert [runs.count(count) for count in took] == [1 + ROUNDS] * 3 + [1, 1 + ROUNDS], "a long one runs once"
