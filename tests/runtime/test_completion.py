"""Text: what is held back comes out when the text ends, several tokens at once, and drafts."""

from __future__ import annotations

from attar.runtime.completion import Completion
from attar.runtime.sampling.params import SamplingParams

END = 49


def text(**params: object) -> Completion:
    result = SamplingParams(**params)  # type: ignore[arg-type]
    words = lambda ids: "".join(chr(65 + i) for i in ids)  # noqa: E731
    return Completion("r", 0, [7, 8], result, seed=0, ends=(END,), limit=5, decode=words)


def test_held_text_is_shown_at_an_end_token_and_at_the_limit() -> None:
    mine = text(stop=("AB",))
    assert mine.append([0]).text == ""
    event = mine.append([END])
    assert (event.text, event.finish_reason, event.stop_reason) == ("A", "stop", END)
    mine = text(stop=("AB",))
    event = mine.append([2, 2, 2, 2, 0])
    assert (event.text, event.finish_reason) == ("CCCCA", "length")


def test_what_comes_behind_the_end_is_dropped() -> None:
    event = text(stop=("AB",)).append([2, 0, 1, 3])
    assert (event.text, event.token_ids, event.stop_reason) == ("C", (2, 0, 1), "AB")


def test_drafted_places_have_their_own_noise_bans_and_history() -> None:
    mine = text(min_tokens=2, frequency_penalty=1.0)
    assert mine.row([1]).banned == (END,) and mine.row([1, 1]).banned == ()
    ahead, history = mine.key(1), mine.row([4]).history
    mine.append([4])
    assert mine.key() == ahead
    assert history is not None and dict(history.counts) == {4: 1}
