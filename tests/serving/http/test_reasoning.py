"""Reasoning apart from the answer, whatever pieces it comes in."""

from __future__ import annotations

import pytest

from attar.errors import SettingsError
from attar.serving.http.reasoning import TAGS, ReasoningSplitter, choose_tags
from attar.serving.http.tool_calls.parts import join_pieces

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
    (True, "<think>\nSo.\n</think>\n\nYes."): ("So.", "Yes."),
    (False, "<think>\n<think>\nSo.\n</think>\nYes."): ("So.", "Yes."),
    (False, "<think>\na\n</think>\n\none\n<think>\nb\n</think>\ntwo"): ("a\nb", "one\ntwo"),
    (False, "<think>a</think>one\n</think>\n\ntwo\n</think>"): ("a", "one\ntwo\n"),
    (False, "<think>\na\n<think>\nb\n</think>\nc\n</think>\nd"): ("a\n<think>\nb", "c\nd"),
    (False, "<think>a</think>See:\n```xml\n<think>\n</think>\n```\nand `<think>`.\n"): (
        "a",
        "See:\n```xml\n<think>\n</think>\n```\nand `<think>`.\n",
    ),
    (False, "<think>a</think>\n</thin\n <think> x\n</think> y\n"): ("a", "</thin\n <think> x\n</think> y\n"),
    (False, "One.\n<think>\nIt never ends."): ("It never ends.", "One.\n"),
}


@pytest.mark.parametrize("case", CASES)
def test_every_way_to_cut_an_answer_gives_the_same(case):
    begun, answer = case
    for cuts in [[answer], list(answer), *([answer[:i], answer[i:]] for i in range(len(answer)))]:
        splitter = ReasoningSplitter(TAGS["think"], begun)
        pieces = [piece for cut in cuts for piece in splitter.add(cut)] + splitter.finish()
        whole = join_pieces(pieces)
        assert (whole.reasoning, whole.text) == CASES[case], cuts


@pytest.mark.parametrize(
    ("name", "answer", "reasoning", "text", "streamed"),
    [
        ("think", "plan\n</think>\n\nanswer", "plan", "answer", "plan\nanswer"),
        ("think", "one\n\ntwo</think>\nanswer", "one\n\ntwo", "answer", "one\n\ntwoanswer"),
        ("mistral", "plan[/THINK]answer", "plan", "answer", "plananswer"),
        ("seed", "</seed:think>answer", "", "answer", "answer"),
        ("think", "The tag `</think>` ends it.", "", "The tag `</think>` ends it.", None),
        ("think", "```\nx\n</think>\n```", "", "```\nx\n</think>\n```", None),
        ("think", "From <think> to </think>.", "", "From <think> to </think>.", None),
    ],
)
def test_a_closing_tag_alone_ends_the_reasoning(name, answer, reasoning, text, streamed):
    """As far as it is not returned: a stream has shown it as text; the tag is in neither."""
    splitter = ReasoningSplitter(TAGS[name])
    whole = join_pieces([*splitter.add(answer), *splitter.finish()])
    assert (whole.reasoning, whole.text) == (reasoning, text)
    splitter = ReasoningSplitter(TAGS[name])
    pieces = [piece for letter in answer for piece in splitter.add(letter)] + splitter.finish()
    whole = join_pieces(pieces)
    assert (whole.reasoning, whole.text) == ("", text if streamed is None else streamed)


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
