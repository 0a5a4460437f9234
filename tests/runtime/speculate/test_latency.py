"""Times of passes: measured on a clock that the test moves, lines between them, what real passes correct."""

from __future__ import annotations

import random

import pytest

from attar.runtime.speculate.latency import ROUNDS, Latency, by_tokens, measure
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
    actual = measure(runner, {1: (1, 2, 4, 8, 16)}, clock=clock)
    assert actual == {1: pytest.approx({1: 0.03, 2: 0.04, 4: 0.04, 8: 0.06, 16: 0.06})}
    assert [runs.count(count) for count in took] == [1 + ROUNDS] * 3 + [1, 1 + ROUNDS], "a long one runs once"


def times(latency: Latency, sizes: tuple[int, ...]) -> list[float]:
    return [latency.target(1, size) for size in sizes]


def learnt(latency: Latency, batch: int, tokens: int, seconds: float, passes: int = 100) -> Latency:
    for _ in range(passes):
        latency.note_target(batch, tokens, seconds)
    return latency


def test_times_are_straight_between_measured_sizes_and_go_on_beyond() -> None:
    sizes = (1, 2, 4, 6, 8, 10)
    assert times(Latency({1: 1.0, 4: 1.6, 8: 4.0}), sizes) == pytest.approx([1, 1.2, 1.6, 2.8, 4, 5.2])
    assert times(Latency(), sizes) == [0.0] * 6 and not Latency().known
    assert times(Latency({2: 1.0}), sizes) == [1.0] * 6


def test_no_size_takes_less_than_a_smaller_one() -> None:
    seconds = times(Latency({1: 1.0, 2: 0.7, 4: 1.5}), tuple(range(1, 20)))
    assert seconds == sorted(seconds) and seconds[1] == 1.0
    latency = learnt(Latency({1: 1.0, 4: 1.5}), 1, 1, 1.0, passes=1)
    learnt(latency, 1, 2, 0.1)
    assert latency.target(1, 2) == latency.target(1, 1) == 1.0


def test_passes_correct_the_measurement() -> None:
    rng, latency = random.Random(0), Latency({1: 1.0, 8: 3.1})
    for _ in range(1500):
        tokens = rng.choice((1, 2, 3, 5, 8))
        seconds = 1 + 0.3 * (tokens - 1) + (0.4 if tokens > 1 else 0.2)
        latency.note_target(1, tokens, seconds * rng.uniform(0.9, 1.1))
    want = [1.2, 1.7, 2.0, 2.3, 2.6, 2.9, 3.2, 3.5]
    assert times(latency, tuple(range(1, 9))) == pytest.approx(want, rel=0.05)


def test_a_slow_machine_is_not_taken_for_a_flat_curve() -> None:
    latency = learnt(Latency({1: 1.0, 4: 1.5, 8: 2.0, 16: 3.0}), 1, 1, 2.0)
    assert times(latency, (1, 4, 8)) == pytest.approx([2.0, 2.5, 3.0], rel=0.05)
    assert latency.target(8, 16) == pytest.approx(4.0, rel=0.05), "the other batches move along"


def test_passes_with_drafts_do_not_change_plain_ones() -> None:
    latency = learnt(Latency({1: 1.0, 8: 2.0, 16: 4.0}), 1, 1, 1.0, passes=1)
    learnt(latency, 1, 8, 3.0)
    assert latency.target(1, 8) == pytest.approx(3.0, rel=0.05) and latency.target(1, 1) == 1.0


def test_a_hiccup_is_not_learnt() -> None:
    latency = learnt(Latency({1: 1.0, 4: 1.5}), 1, 1, 1.0, passes=1)
    latency.note_target(1, 1, 50.0)
    assert latency.target(1, 1) < 1.2
    learnt(latency, 1, 4, 1e-9)
    assert latency.target(1, 4) > 0.0


def test_steps_of_a_draft_model_by_sequences() -> None:
    latency = Latency({1: 1.0}, {1: 0.1, 4: 0.4})
    assert latency.draft(0) == 0 and latency.draft(2) == pytest.approx(0.2)
    latency.note_draft(1, 0.1)
    assert latency.draft(1) == pytest.approx(0.1)
    assert Latency({1: 1.0}).draft(3) == 0.0


def test_only_plain_passes_set_the_times() -> None:
    latency = Latency({1: 1.0, 8: 2.0}, settle=2)
    for tokens, seconds in ((1, 0.8), (5, 9.0), (300, 50.0), (1, 0.2)):
        assert not latency.settled
        latency.note_target(1, tokens, seconds)
    assert latency.settled
    assert times(latency, (1, 8)) == pytest.approx([0.5, 1.2]), "none falls below half of the measured"


def test_the_first_passes_of_a_size_count_as_much_as_its_measurement() -> None:
    latency = learnt(Latency({1: 1.0, 8: 1.1}), 1, 1, 1.0, passes=1)
    learnt(latency, 1, 8, 1.5, passes=4)
    assert 1.4 < latency.target(1, 8) < 1.5
    learnt(latency, 1, 8, 1.5, passes=100)
    latency.note_target(1, 8, 1.0)
    assert latency.target(1, 8) == pytest.approx(1.45, rel=1e-3), "later the last ten"


def test_of_a_size_that_was_measured_twice_the_smaller_batch_counts() -> None:
    assert by_tokens({1: {1: 1.0, 8: 2.0}, 8: {8: 4.0, 16: 5.0}}) == {1: 1.0, 8: 2.0, 16: 5.0}
