"""Reasoning apart from the answer, whatever pieces it comes in."""

from __future__ import annotations

import pytest

from attar.errors import SettingsError
from attar.runtime.server.reasoning import TAGS, ReasoningSplitter, choose_tags
from attar.runtime.server.tool_calls.parts import join_pieces

CASES = {  # (the prompt ends with the tag, the answer): reasoning, text
    (False, "<think>\nSo < 3.\n</think>\n\nYes.\n"): ("So < 3.", "Yes.\n"),
    (True, "\nSo </thin.\n</think>\nYes."): ("So </thin.", "Yes."),
    (False, " \n<think></think>Yes."): ("", "Yes."),
    (False, "No tags: <think> </think>"): ("", "No tags: <think> </think>"),
    (True, "It never ends, </thi"): ("It never ends, </thi", ""),
    (False, "<thi"): ("", "<thi"),
    (False, "<think>a</think>b</think>c"): ("a", "b</think>c"),
    (False, "<think> a\n\n b </think>"): ("a\n\n b", ""),
    (False, ""): ("", ""),
    (True, "  "): ("", ""),
}


@pytest.mark.parametrize("case", CASES)
def test_every_way_to_cut_an_answer_gives_the_same(case):
    begun, answer = case
    for cuts in [[answer], list(answer), *([answer[:i], answer[i:]] for i in range(len(answer)))]:
        splitter = ReasoningSplitter(TAGS["think"], begun)
        pieces = [piece for cut in cuts for piece in splitter.add(cut)] + splitter.finish()
        whole = join_pieces(pieces)
        assert (whole.reasoning, whole.text) == CASES[case], cuts


def test_reasoning_comes_as_it_is_written():
    splitter = ReasoningSplitter(TAGS["think"])
    assert [piece.reasoning for piece in splitter.add("<think>One ")] == ["One"]
    assert [piece.reasoning for piece in splitter.add("two</thi")] == [" two"]
    assert splitter.add("nk> ") == [] and [piece.text for piece in splitter.add(" x")] == ["x"]


def test_the_template_chooses_the_tags():
    assert choose_tags("auto", "... '</think>' ...") == ("<think>", "</think>")
    assert choose_tags("auto", "[THINK] [/THINK]") == ("[THINK]", "[/THINK]")
    assert choose_tags("auto", "plain") is None and choose_tags("none", "</think>") is None
    assert choose_tags("seed", "") == TAGS["seed"]
    with pytest.raises(SettingsError, match="reasoning_parser"):
        choose_tags("loud", "")
