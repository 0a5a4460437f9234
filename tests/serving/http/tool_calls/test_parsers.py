"""Parsers of tool calls: each form, whatever pieces an answer comes in."""

from __future__ import annotations

import json

import pytest

from attar.errors import SettingsError
from attar.serving.http.tool_calls import FORMATS, choose_format
from attar.serving.http.tool_calls.json_value import CallObject, JsonValue
from attar.serving.http.tool_calls.marks import split_at_mark
from attar.serving.http.tool_calls.parts import join_pieces

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = {"get_weather": WEATHER, "now": None}
PARIS = '{"city": "Paris \\"}{ [1]", "deep": {"a": [1, {"b": "]"}]}}'
BLANK = "\n \t"


def hermes(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


CASES = {  # format → answer → text and calls
    "hermes": {
        hermes("get_weather", PARIS): ("", [("get_weather", PARIS)]),
        "Let me see.\n" + hermes("get_weather", PARIS) + "\n" + hermes("now", "{}"): (
            "Let me see.",
            [("get_weather", PARIS), ("now", "{}")],
        ),
        hermes("now", "{}") + " Done. <b>": ("Done. <b>", [("now", "{}")]),
        '<tool_call>{"arguments": {"city": "Rom"}, "name": "get_weather"}</tool_call>': (
            "",
            [("get_weather", '{"city": "Rom"}')],
        ),
        '<tool_call>{"name": "now"}</tool_call>': ("", [("now", "{}")]),
        '<tool_call>{"id": 7, "name": "now", "arguments": null , "x": [1]}</tool_call>': (
            "",
            [("now", "{}")],
        ),
        '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>': ("", [("now", '{"a": 1}')]),
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>': ("", [("unknown", "{}")]),
        '<tool_call>{"name": "now", "arguments": {}}': ("", [("now", "{}")]),
        '<tool_call>{"name": "now"}\n<tool_call>{"name": "now"}': ("", [("now", "{}"), ("now", "{}")]),
        "<tool_call>no JSON</tool_call> x": ("<tool_call>no JSON</tool_call> x", []),
        '<tool_call> {"a": 1}</tool_call>': ('<tool_call> {"a": 1}</tool_call>', []),
        '<tool_call>\n{"name": "no': ('<tool_call>\n{"name": "no', []),
        '<tool_call>{"name": "now", "arguments": {"a": "b': ("", [("now", '{"a": "b')]),
        '{"name": "now", "arguments": {}} <tool_cal': ('{"name": "now", "arguments": {}} <tool_cal', []),
        " \n text with blanks \n": (" \n text with blanks \n", []),
        BLANK: (BLANK, []),
        "": ("", []),
    },
    "llama3": {
        f'{{"name": "get_weather", "parameters": {PARIS}}}': ("", [("get_weather", PARIS)]),
        '<|python_tag|>{"name": "now", "parameters": {}}; {"name": "now", "parameters": {"a": 1}}': (
            "",
            [("now", "{}"), ("now", '{"a": 1}')],
        ),
        '\n {"type": "function", "name": "now", "parameters": {}}\n': ("", [("now", "{}")]),
        '{"name": "Ada", "parameters": {}} is JSON': ('{"name": "Ada", "parameters": {}} is JSON', []),
        '{"a": 1}': ('{"a": 1}', []),
        '{"name": "now", "parameters": {}} and so on': ("and so on", [("now", "{}")]),
        "<|python_tag|>print(1)": ("<|python_tag|>print(1)", []),
        'Text {"name": "now", "parameters": {}}': ('Text {"name": "now", "parameters": {}}', []),
        "<|python": ("<|python", []),
        '{"name": "no': ('{"name": "no', []),
    },
    "json": {
        f'[{{"name": "get_weather", "arguments": {PARIS}}}, {{"name": "now"}}]': (
            "",
            [("get_weather", PARIS), ("now", "{}")],
        ),
        '```json\n{"name": "now", "arguments": {}}\n```': ("", [("now", "{}")]),
        '```json\n[{"name": "now"}]\n```\nDone.': ("Done.", [("now", "{}")]),
        "```\nprint()\n```": ("```\nprint()\n```", []),
        '```json\n{"a": 1}\n```': ('```json\n{"a": 1}\n```', []),
        "[1, 2]": ("[1, 2]", []),
        '[ {"name": "Ada"}]': ('[ {"name": "Ada"}]', []),
        '[{"name": "now", "arguments": {}}, 7]': ("7]", [("now", "{}")]),
        "[ ": ("[ ", []),
        "``": ("``", []),
    },
    "mistral": {
        f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {PARIS}}}]': ("", [("get_weather", PARIS)]),
        'Well. [TOOL_CALLS] [{"name": "now", "arguments": {}}, {"name": "now", "arguments": {"a": 1}}]': (
            "Well.",
            [("now", "{}"), ("now", '{"a": 1}')],
        ),
        f"[TOOL_CALLS]get_weather{PARIS}[TOOL_CALLS]now{{}}": (
            "",
            [("get_weather", PARIS), ("now", "{}")],
        ),
        f"[TOOL_CALLS]get_weather[CALL_ID]abc123xyz[ARGS]{PARIS}": ("", [("get_weather", PARIS)]),
        '[TOOL_CALLS]now[ARGS]{"a": 1} tail': ("tail", [("now", '{"a": 1}')]),
        "[TOOL_CALLS]unknown{}": ("[TOOL_CALLS]unknown{}", []),
        "[TOOL_CALLS]no call at all": ("[TOOL_CALLS]no call at all", []),
        "[TOOL_CALLS][7]": ("[TOOL_CALLS][7]", []),
        "[1] [TOOL_C": ("[1] [TOOL_C", []),
    },
    "qwen_xml": {
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis <b>\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>": (
            "",
            [("get_weather", '{"city": "Paris <b>", "days": 3}')],
        ),
        "See:\n<function=now>\n</function>\n<tool_call>\n<function=now></function></tool_call> x": (
            "See: x",
            [("now", "{}"), ("now", "{}")],
        ),
        "<tool_call>\n<function=get_weather>\n<parameter=days>\nmany\n</parameter>\n</function>": (
            "",
            [("get_weather", '{"days": "many"}')],
        ),
        "<tool_call>\n<function=other>\n</function>": ("<tool_call>\n<function=other>\n</function>", []),
        "<tool_call> text": ("<tool_call> text", []),
        "<tool_call>\n<func": ("<tool_call>\n<func", []),
        "<function=no": ("<function=no", []),
    },
}
HARMONY = "<|start|>assistant<|channel|>"
CALL = "<|channel|>commentary to=functions."
CASES["harmony"] = {
    "<|channel|>final<|message|>2 + 2 = 4.\n": ("2 + 2 = 4.\n", []),
    f"{CALL}get_weather <|constrain|>json<|message|>{PARIS}<|call|>": ("", [("get_weather", PARIS)]),
    f" to=functions.now<|channel|>commentary json<|message|>{{}}<|call|>{HARMONY}final<|message|>Done.": (
        "Done.",
        [("now", "{}")],
    ),
    f"<|channel|>commentary<|message|>First:<|end|>{HARMONY}commentary<|message|> then.\n<|end|>\n"
    f"{CALL.replace('<|channel|>', HARMONY)}now<|message|><|call|>": ("First:\nthen.", [("now", "{}")]),
    f'{CALL}now<|message|>{{"a": "b': ("", [("now", '{"a": "b')]),
    f"<|channel|>analysis<|message|>So.<|start|>assistant{HARMONY[17:]}final<|message|>Yes <b>": (
        "Yes <b>",
        [],
    ),
    "<|channel|>analysis to=python<|message|>print(1)<|call|>": ("", []),
    '{"no": "header"}<|return|> and more': ('{"no": "header"}\nand more', []),
    "<|channel|>analy": ("", []),
    "<|chan": ("<|chan", []),
    "too": ("too", []),
    "to": ("to", []),
    " ": (" ", []),
}
BOTH = "[get_weather(city='It\\'s', days=-2), now()]"
CASES["pythonic"] = {
    BOTH: ("", [("get_weather", '{"city": "It\'s", "days": -2}'), ("now", "{}")]),
    f" <|python_start|>{BOTH[:-1]} ] <|python_end|> Done.": (
        "Done.",
        [("get_weather", '{"city": "It\'s", "days": -2}'), ("now", "{}")],
    ),
    '[now(a=[1, (2, {"x": None, "y": ")]"})], from=true, b="\\ud83d\\ude00", c=1.5, d=\'\',)]': (
        "",
        [
            (
                "now",
                '{"a": [1, [2, {"x": null, "y": ")]"}]], "from": true, "b": "\U0001f600", "c": 1.5, "d": ""}',
            )
        ],
    ),
    "[now(\n a = 1,\n)] and text": ("and text", [("now", '{"a": 1}')]),
    "[now(), get_weather(city=open('x'))]": (", get_weather(city=open('x'))]", [("now", "{}")]),
    "[now(),": (",", [("now", "{}")]),
    "[now() now()]": ("now()]", [("now", "{}")]),
    "[unknown(a=1)]": ("[unknown(a=1)]", []),
    "[1, 2] is a list": ("[1, 2] is a list", []),
    "[]": ("[]", []),
    " [now(a=1": (" [now(a=1", []),
    "<|python_start|>print(1)": ("<|python_start|>print(1)", []),
    "<|python_st": ("<|python_st", []),
    "now()": ("now()", []),
}
NO_LITERALS = [
    *("open()", "1 + 1", "[x for x in y]", "f''", "b''", "{1: 2}", "{**{}}", "*[1]", "x", "1j", "...", "a.b"),
    *("lambda: 1", "1e999", "{1}", "'a' 1", "(" * 70 + ")" * 70, "1" * 5000, "-" * 40_000 + "1", ""),
    *("x := 1", "1 if 1 else 2", "-True", "'\\N{x}'"),
]
CASES["pythonic"] |= {f"[now(a={one})]": (f"[now(a={one})]", []) for one in NO_LITERALS if len(one) < 20}
for others in ("1", "a=1, a=2", "a", "**{}", "a==1", "1a=2", ", a=1"):
    CASES["pythonic"][f"[now({others})]"] = (f"[now({others})]", [])
ANSWERS = [(name, answer) for name, answers in CASES.items() for answer in answers]


def read(name, pieces):
    parser = FORMATS[name].parser(TOOLS)
    parts = [part for piece in pieces for part in parser.add(piece)] + parser.finish()
    indices = [part.call.index for part in parts if part.call is not None and part.call.name]
    assert indices == list(range(len(indices))), "calls begin in their order, each once"
    answer = join_pieces(parts)
    return answer.text, [(call.name, call.arguments) for call in answer.calls]


@pytest.mark.parametrize(("name", "answer"), ANSWERS)
def test_every_way_to_cut_an_answer_gives_the_same(name, answer):
    expected = CASES[name][answer]
    assert read(name, [answer]) == expected
    assert read(name, list(answer)) == expected
    for place in range(len(answer) + 1):
        assert read(name, [answer[:place], answer[place:]]) == expected, (answer[:place], answer[place:])


RAW = {  # arguments as a model writes them: raw line breaks, escapes that JSON does not have
    '{"code": "a\n\tb\r\x00"}': {"code": "a\n\tb\r\x00"},
    '{"re": "\\d+\\\\ \\\' \\"", "u": "\\u00e9\\ud83d\\ude00"}': {
        "re": "\\d+\\ ' \"",
        "u": "\u00e9\U0001f600",
    },
    '{\n  "a": [\n 1,\t"x\ny"]\n}': {"a": [1, "x\ny"]},
    '{"a": "\\\n"}': {"a": "\n"},
}
FORMS = {
    "hermes": '<tool_call>\n{{"name": "now", "arguments": {}}}\n</tool_call>',
    "llama3": '{{"name": "now", "parameters": {}}}',
    "json": '[{{"name": "now", "arguments": {}}}]',
    "mistral": "[TOOL_CALLS]now[ARGS]{}",
    "harmony": "<|channel|>commentary to=functions.now<|message|>{}<|call|>",
}


@pytest.mark.parametrize("name", FORMS)
def test_raw_line_breaks_in_arguments_become_json(name):
    for written, value in RAW.items():
        answer = FORMS[name].format(written)
        for pieces in ([answer], list(answer), [answer[:30], answer[30:]]):
            _, [(_, arguments)] = read(name, pieces)
            assert json.loads(arguments) == value, arguments
    quoted = FORMS[name].format(json.dumps('{"a": "x\ny"}'))
    if name not in ("mistral", "harmony"):  # which have arguments without quotes
        assert read(name, [quoted]) == ("", [("now", '{"a": "x\\ny"}')])


def test_raw_line_breaks_in_pythons_strings():
    for written in ("'a\nb'", '"a\nb"', '"""a\nb"""', "'a\\nb'"):
        assert read("pythonic", [f"[now(code={written})]"]) == ("", [("now", '{"code": "a\\nb"}')])


def test_a_call_that_is_cut_behind_a_backslash_ends_with_it():
    answer = '<tool_call>{"name": "now", "arguments": {"a": "b\\'
    assert read("hermes", [answer]) == read("hermes", list(answer)) == ("", [("now", '{"a": "b\\')])


@pytest.mark.parametrize("text", NO_LITERALS, ids=lambda text: text[:20])
def test_what_is_no_literal_is_no_call(text):
    answer = f"[now(a={text})]"
    assert read("pythonic", [answer]) == (answer, [])


def test_channels_become_reasoning_text_and_calls():
    answer = (
        f"<|channel|>analysis<|message|> One.\n<|end|>{HARMONY}analysis<|message|>Two <|end|>"
        f"{HARMONY}final<|message|>Three."
    )
    for pieces in ([answer], list(answer)):
        parser, seen = FORMATS["harmony"].parser({}), []
        parts = []
        for piece in pieces:
            parts += parser.add(piece)
            seen.append(parser.reasons)
        whole = join_pieces(parts + parser.finish())
        assert (whole.reasoning, whole.text, whole.calls) == ("One.\nTwo", "Three.", [])
    assert any(seen) and not seen[0] and not seen[-1]
    parser = FORMATS["harmony"].parser({})
    assert [part.reasoning for part in parser.add("<|channel|>analysis<|message|>So it ")] == ["So it"]
    hidden = "<|channel|>commentary to=functions.now<|message|>{}<|call|>"
    assert [part.reasoning for part in FORMATS["harmony"].parser({}).add(hidden)] == ["{}"]


@pytest.mark.parametrize("name", CASES)
def test_all_calls_are_json(name):
    for answer, (_, calls) in CASES[name].items():
        for _, arguments in calls:
            if "b" not in arguments[-1:]:  # one answer ends inside of its arguments
                assert isinstance(json.loads(arguments), dict), answer


def test_arguments_come_before_their_end():
    parser = FORMATS["hermes"].parser(TOOLS)
    assert parser.add('<tool_call>{"name": "get_weather", ')[0].call.name == "get_weather"
    assert [part.call.arguments for part in parser.add('"arguments": {"city": "Pa')] == ['{"city": "Pa']
    assert [part.call.arguments for part in parser.add('ris"}}</tool')] == ['ris"}']
    assert parser.finish() == []


def test_text_comes_at_once_and_what_may_begin_a_mark_waits():
    parser = FORMATS["hermes"].parser(TOOLS)
    assert [part.text for part in parser.add("one <too")] == ["one"]
    assert [part.text for part in parser.add("th")] == [" <tooth"]
    assert split_at_mark("a<b", ("<bc>", "<x>")) == ("a", "", "<b")
    assert split_at_mark("a<bc>d<x>", ("<bc>", "<x>")) == ("a", "<bc>", "d<x>")


def test_a_long_answer_takes_time_that_grows_with_its_length():
    """A counter of steps, no clock: each character of a call is read once."""
    count = 0

    class Counting(JsonValue):
        def add(self, letter):
            nonlocal count
            count += 1
            return super().add(letter)

    call = CallObject()
    text = '{"name": "now", "arguments": {"a": "' + "x" * 5000 + '"}}'
    call._value = Counting()
    for letter in text:
        call.add(letter)
    assert call.complete and len(call.take()) == 5000 + 9 and len(call.raw) < 20 and count <= len(text)


TEMPLATES = {
    "hermes": "For each call return <tool_call>\n{...}</tool_call>",
    "qwen_xml": "<tool_call>\n<function=example>",
    "mistral": "{{ '[TOOL_CALLS] [' }}",
    "llama3": "{{- 'Environment: ipython\n' }}",
    "harmony": "<|start|>assistant<|channel|>final<|message|>",
    "pythonic": "{{ 'Environment: ipython' }} Use exact format: [func_name1(param1=value1), func_name2(...)]",
    "json": "{% for m in messages %}{{ m.content }}{% endfor %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_template_chooses_the_format(name):
    assert choose_format("auto", TEMPLATES[name]) is FORMATS[name]
    assert choose_format(name, "") is FORMATS[name]


def test_an_unknown_format():
    with pytest.raises(SettingsError, match=r"tool_parser is 'morse'.*hermes"):
        choose_format("morse", "")
