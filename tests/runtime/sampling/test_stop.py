"""Stop strings in any cut of the text, against a search of the whole text."""

from __future__ import annotations

import random

import pytest

from attar.runtime.sampling.stop import StopFinder


def fed(finder: StopFinder, pieces: list[str]) -> str:
    shown = ""
    for piece in pieces:
        shown += finder.add(piece)
        if finder.match is not None:
            return shown
    return shown + finder.rest()


def test_a_stop_string_over_three_pieces() -> None:
    finder = StopFinder(["STOP"])
    assert [finder.add(piece) for piece in ("a S", "TO", "P b")] == ["a ", "", ""]
    assert finder.match == "STOP"


def test_what_might_be_a_stop_string_is_held_and_then_shown() -> None:
    finder = StopFinder(["\n\n"])
    assert finder.add("x\n") == "x"
    assert finder.add("y") == "\ny"
    assert finder.add("\n") == ""
    assert finder.rest() == "\n"
    assert finder.match is None


def test_the_earliest_beginning_wins_then_the_longest() -> None:
    finder = StopFinder(["c", "bc", "bcd"])
    assert finder.add("abcd") == "a"
    assert finder.match == "bcd"


@pytest.mark.parametrize("seed", range(200))
def test_any_cut_shows_what_comes_before_the_first_stop(seed: int) -> None:
    """Character by character the first stop string to be complete ends the text where it begins."""
    draws = random.Random(seed)
    text = "".join(draws.choices("ab", k=40))
    stops = ["".join(draws.choices("ab", k=draws.randint(3, 6))) for _ in range(draws.randint(1, 2))]
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    pieces = list(text)
    if ends:
        expected = min(text[: ends[0]].find(stop) for stop in stops if stop in text[: ends[0]])
        assert fed(StopFinder(stops), pieces) == text[:expected]
    else:
        assert fed(StopFinder(stops), pieces) == text
    if len(stops) == 1:  # one string is found at the same place however the text is cut
        cuts = sorted(draws.sample(range(1, 40), 9))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, 40], strict=True)]
        assert fed(StopFinder(stops), pieces) == text.split(stops[0])[0]


def test_without_stops_nothing_is_held() -> None:
    finder = StopFinder([])
    assert finder.add("abc") == "abc"
    assert finder.rest() == ""
