"""Pieces of text: joined they are the text, and no piece shows half a character. Stop strings in any cut."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from tokenizers import Tokenizer, decoders, models

from attar.runtime.sampling.detokenize import HALF, Decode, Detokenizer, StopFinder

TEXT = "naïve café — 日本語 🎉 x\n  indented\tend"


def byte_decoder(errors: str = "replace") -> Decode:
    """Every token is a byte: ids 0 to 255; 256 is a special token without text."""
    return lambda ids: bytes(i for i in ids if i < 256).decode("utf-8", errors)


def sentencepiece() -> Tokenizer:
    """As Llama 2's: words begin with a mark, rare characters are bytes, a text's first space is dropped."""
    words = ["<unk>", "▁a", "▁b", "c", "▁", "d"] + [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def pieces(decode: Decode, ids: Sequence[int], context: Sequence[int] = ()) -> list[str]:
    detokenizer = Detokenizer(decode, context)
    return [*(detokenizer.add(token) for token in ids), detokenizer.flush()]


def test_bytes_become_whole_characters() -> None:
    got = pieces(byte_decoder(), list(TEXT.encode()))
    assert "".join(got) == TEXT
    assert not any(HALF in piece for piece in got)
    assert got[:4] == ["n", "a", "", "ï"]


def test_tokens_without_text_do_not_shorten_the_wait() -> None:
    ids = [256] * 9 + list("é🎉".encode())
    assert pieces(byte_decoder(), ids) == [""] * 10 + ["é", "", "", "", "🎉", ""]


def test_bytes_that_are_no_text_are_shown_and_the_window_stays_small() -> None:
    detokenizer = Detokenizer(byte_decoder())
    shown = [detokenizer.add(0x80) for _ in range(400)]
    assert "".join(shown) + detokenizer.flush() == HALF * 400
    assert len(detokenizer._ids) <= 12


ACROSS = {  # tokens that end one character and begin the next, as Qwen's b"\\xa4\\xed"
    "\uc3a4\ud41e": [b"\xec", b"\x8e", b"\xa4\xed", b"\x90", b"\x9e"],
    "\U0001f600" * 6: [b"\xf0\x9f", *[b"\x98\x80\xf0\x9f"] * 5, b"\x98\x80"],
    "\u4e2d\u56fd\u4eba\u6c11a": [b"\xe4\xb8", b"\xad\xe5\x9b", b"\xbd\xe4\xba", b"\xba\xe6\xb0", b"\x91a"],
}


def split_decoder(tokens: Sequence[bytes]) -> Decode:
    return lambda ids: b"".join(tokens[i] for i in ids).decode("utf-8", "replace")


@pytest.mark.parametrize("text", ACROSS)
def test_a_token_may_end_one_character_and_begin_the_next(text: str) -> None:
    got = pieces(split_decoder(ACROSS[text]), range(len(ACROSS[text])))
    assert "".join(got) == text and not got[-1], got


@pytest.mark.parametrize("seed", range(40))
def test_bytes_cut_anywhere_give_the_text_of_all(seed: int) -> None:
    """Characters of 1 to 4 bytes, sometimes bytes that are none, cut into tokens at random."""
    draws = random.Random(seed)
    broken = [b"\x80", b"\xe4\xb8", b"\xff"] if seed % 2 else []
    text = b"".join(draws.choice([b"a", *(c.encode() for c in "é日🎉"), *broken]) for _ in range(40))
    cuts = sorted(draws.sample(range(1, len(text)), len(text) // 2))
    tokens = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    detokenizer = Detokenizer(split_decoder(tokens))
    got = [detokenizer.add(token) for token in range(len(tokens))]
    assert "".join(got) + detokenizer.flush() == text.decode("utf-8", "replace")
    assert len(detokenizer._ids) <= 12


def test_half_a_character_at_the_end_is_shown_by_rest() -> None:
    got = pieces(byte_decoder(), list("aé".encode())[:-1])
    assert got == ["a", "", HALF]


def test_a_prompt_that_ends_in_half_a_character() -> None:
    prompt = list("aé".encode())
    assert pieces(byte_decoder(), [*prompt[2:], ord("b")], prompt[:2]) == ["é", "b", ""]


@pytest.mark.parametrize("context", [[], [1], [1, 2, 3]])
def test_sentencepiece_keeps_the_space_between_prompt_and_text(context: list[int]) -> None:
    tokenizer = sentencepiece()
    byte = {value: 6 + value for value in range(256)}
    ids = [1, 3, 2, 4, 4, 5, *(byte[value] for value in "é日".encode()), 1, 3, 1]
    got = pieces(lambda some: str(tokenizer.decode(list(some))), ids, context)
    assert "".join(got) == (" " if context else "") + "ac b  dé日 ac a"
    assert not any(HALF in piece for piece in got)


def text_before_stop(finder: StopFinder, pieces: list[str]) -> str:
    shown = ""
    for piece in pieces:
        shown += finder.add(piece)
        if finder.match is not None:
            return shown
    return shown + finder.flush()


def test_a_stop_string_over_three_pieces() -> None:
    finder = StopFinder(["STOP"])
    assert [finder.add(piece) for piece in ("a S", "TO", "P b")] == ["a ", "", ""]
    assert finder.match == "STOP"


def test_what_might_be_a_stop_string_is_held_and_then_shown() -> None:
    finder = StopFinder(["\n\n"])
    assert finder.add("x\n") == "x"
    assert finder.add("y") == "\ny"
    assert finder.add("\n") == ""
    assert finder.flush() == "\n"
    assert finder.match is None


def test_the_earliest_beginning_wins_then_the_longest() -> None:
    finder = StopFinder(["c", "bc", "bcd"])
    assert finder.add("abcd") == "a"
    assert finder.match == "bcd"


@pytest.mark.few(50)
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
        assert text_before_stop(StopFinder(stops), pieces) == text[:expected]
    else:
        assert text_before_stop(StopFinder(stops), pieces) == text
    if len(stops) == 1:  # one string is found at the same place however the text is cut
        cuts = sorted(draws.sample(range(1, 40), 9))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, 40], strict=True)]
        assert text_before_stop(StopFinder(stops), pieces) == text.split(stops[0])[0]


def test_without_stops_nothing_is_held() -> None:
    finder = StopFinder([])
    assert finder.add("abc") == "abc"
    assert finder.flush() == ""
