"""Every form of calls with the same tools under every ``tool_choice``: the grammar of a forced call takes the
well-formed call and can end with it, no text of it is anything but calls of the schema, and the parser reads
the exact arguments in whatever pieces they come.
"""

from __future__ import annotations

import json
import random
import re

import pytest

pytest.importorskip("llguidance")
pytest.importorskip("jsonschema")
import jsonschema

from attar.runtime.sampling.grammar import Grammars
from attar.runtime.sampling.params import SamplingParams
from attar.serving.http.answer import AnswerForm
from attar.serving.http.tool_calls import FORMATS
from attar.serving.http.tool_calls.parts import join_pieces
from attar.serving.http.tool_calls.protocol import FunctionTool, NamedTool
from attar.serving.http.tool_calls.tool_use import tool_use
from tests import tiny_models

TOKENIZER = tiny_models.tokenizer()
GRAMMARS = Grammars(TOKENIZER, len(TOKENIZER))
TEXTS = [
    "",
    "Paris",
    "a\n\n b\t",
    " x ",
    "\n",
    'say "hi" \\ it\'s',
    "日本 😀 é",
    "<b> </function> <tool_call> </p",
    "[TOOL_CALLS]",
]
TEXTS += ["x</parameter>\ny", "null", "5", "true", "[1]", '{"a": 1}', "a, b=1)"]
ID = 1234567890123456789


def tool(required=None, **properties):
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


STRING, INTEGER, OPTIONAL = (
    {"type": "string"},
    {"type": "integer"},
    {"anyOf": [{"type": "string"}, {"type": "null"}]},
)
PLACE = tool(city=STRING, at={"type": "array", "items": {"type": "number"}, "maxItems": 3})
TOOLS = {  # parameters, and arguments that a call may have
    "without parameters": (None, [{}]),
    "no properties": ({"type": "object", "properties": {}}, [{}]),
    "a string": (tool(text=STRING), [{"text": text} for text in TEXTS]),
    "an optional string": (tool(["a"], a=STRING, b=STRING), [{"a": "x"}, {"a": "x", "b": "y"}]),
    "all optional": (tool([], a=STRING, b=INTEGER, c=STRING), [{}, {"b": 1}, {"a": "x", "c": "y"}]),
    "an enum": (
        tool(unit={"enum": ["C", "° F", "C\nC", 'a"b', "日"]}),
        [{"unit": "C\nC"}, {"unit": "C"}, {"unit": "日"}],
    ),
    "a mixed enum": (tool(v={"enum": ["3 x", 4, None, True]}), [{"v": v} for v in ("3 x", 4, None, True)]),
    "a constant": (tool(kind={"const": "note"}), [{"kind": "note"}]),
    "a pattern": (tool(zip={"type": "string", "pattern": "^[0-9]{5}$"}), [{"zip": "01234"}]),
    "a length": (tool(s={"type": "string", "minLength": 2, "maxLength": 3}), [{"s": "é😀"}]),
    "a format": (tool(day={"type": "string", "format": "date"}), [{"day": "2026-11-27"}]),
    "a reference": (
        tool(p={"$ref": "#/$defs/place"}) | {"$defs": {"place": PLACE}},
        [{"p": {"city": "Rom <b>", "at": [1, 2.5]}}],
    ),
    "text or null": (tool(s=OPTIONAL), [{"s": None}, {"s": "none"}, {"s": "a\nb"}]),
    "text or number": (tool(s={"type": ["string", "integer"]}), [{"s": 5}, {"s": "5 km"}]),
    "text or list": (
        tool(s={"anyOf": [STRING, {"type": "array", "items": STRING}]}),
        [{"s": "a"}, {"s": ["a", "b"]}],
    ),
    "numbers": (
        tool(
            i={"type": "integer", "minimum": -5, "maximum": 99},
            x={"type": "number"},
            b={"type": "boolean"},
            n={"type": "null"},
        ),
        [{"i": -5, "x": 0.25, "b": False, "n": None}],
    ),
    "large integers": (
        tool(id={"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, e={"enum": [ID]}),
        [{"id": 2**64 - 1, "e": ID}],
    ),
    "nested": (tool(o=tool(a=tool(s=STRING))), [{"o": {"a": {"s": 'x"\n</parameter>'}}}]),
    "many parameters": (tool([], **{f"p{n}": STRING for n in range(40)}), [{"p3": "x", "p39": "y"}]),
    "a name of two words": (tool(**{"user-id": STRING}), [{"user-id": "x"}]),
}


def raw(value):
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def written(form, name, arguments):
    """A call as a model of the family writes it."""
    if form.arguments == "xml":
        body = "".join(f"<parameter={key}>\n{raw(value)}\n</parameter>\n" for key, value in arguments.items())
    elif form.arguments == "python":
        body = ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in arguments.items())
    else:
        body = json.dumps(arguments, ensure_ascii=False)
    return form.mark + form.before.format(name=name) + body + form.after


def answer_of(form, calls):
    texts = form.between.join(written(form, name, arguments) for name, arguments in calls)
    return form.opening + (f"[{texts}]" if form.bracketed else texts)


def allows(grammar, text):
    matcher = GRAMMARS.matcher(SamplingParams(grammar=grammar))
    for token in TOKENIZER(text, add_special_tokens=False)["input_ids"]:
        if not bool(matcher.allowed()[token]):
            return False
        matcher.consume(token)
    return matcher._may_end


def read(answers, use, pieces):
    parser = answers.parser(use, "")
    answer = join_pieces([part for piece in pieces for part in parser.add(piece)] + parser.finish())
    return answer.text, [(call.name, call.arguments) for call in answer.calls]


def use_of(parameters, choice, parallel=None):
    functions = [{"name": name, "parameters": schema} for name, schema in parameters.items()]
    tools = [FunctionTool.model_validate({"type": "function", "function": one}) for one in functions]
    named = {"type": "function", "function": {"name": "f"}}
    return tool_use(tools, NamedTool.model_validate(named) if choice == "named" else choice, parallel)


def answers_in(name):
    return AnswerForm(FORMATS[name], None)


@pytest.mark.few(120)
@pytest.mark.parametrize("choice", ["auto", "required", "named", "none"])
@pytest.mark.parametrize("kind", TOOLS)
@pytest.mark.parametrize("name", FORMATS)
def test_well_formed_calls_are_taken_and_read_back(name, kind, choice):
    form, (parameters, examples) = FORMATS[name], TOOLS[kind]
    use, answers = use_of({"f": parameters, "other": None}, choice), answers_in(name)
    grammar = answers.constraints(use, lambda text: None, None).get("grammar")
    assert (grammar is not None) == (choice in ("required", "named"))
    for arguments in examples:
        text = answer_of(form, [("f", arguments)])
        if grammar is not None and not (name == "qwen_xml" and _beginning_as_a_list(kind, arguments)):
            assert allows(grammar, text), text
        results = [read(answers, use, [text]), read(answers, use, list(text))]
        results += [read(answers, use, [text[:cut], text[cut:]]) for cut in range(1, len(text), 7)]
        if choice == "none":
            assert all(calls == [] for _, calls in results)
            continue
        assert all(result == results[0] for result in results), results
        rest, [(called, read_arguments)] = results[0]
        assert (rest, called) == ("", "f") and json.loads(read_arguments) == arguments, read_arguments


def _beginning_as_a_list(kind, arguments):
    return kind == "text or list" and str(arguments["s"]).startswith("[") and isinstance(arguments["s"], str)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", FORMATS)
def test_whatever_a_forced_grammar_writes_is_a_call_of_the_schema(name):
    """Texts drawn at random; those that have not ended within 200 tokens go on in a string."""
    answers, ended = answers_in(name), 0
    for number, (kind, (parameters, _)) in enumerate(TOOLS.items()):
        use = use_of({"f": parameters}, "named")
        grammar = answers.constraints(use, lambda text: None, None)["grammar"]
        text = drawn(grammar, random.Random(number))
        if text is None or re.search(r"[eE]\+?\d{3}", text):  # a number beyond doubles is none of Python's
            continue
        ended += 1
        rest, [(_, arguments)] = read(answers, use, list(text))
        value = json.loads(arguments)
        assert rest == "" and read(answers, use, [text]) == (rest, [("f", arguments)]), (kind, text)
        jsonschema.validate(value, {"type": "object", **(parameters or {})})
    assert ended > len(TOOLS) // 2


CLOSING = {token for token in range(len(TOKENIZER)) if set(TOKENIZER.decode([token])) & set('</"\n')}


def drawn(grammar, draws):
    ids, matcher = [], GRAMMARS.matcher(SamplingParams(grammar=grammar))
    while not matcher.complete and len(ids) < 200:
        allowed = matcher.allowed().nonzero().flatten().tolist()
        closing = [token for token in allowed if token in CLOSING]
        if matcher._may_end:
            break
        ids.append(draws.choice(closing if closing and draws.random() < 0.4 else allowed))
        matcher.consume(ids[-1])
    return TOKENIZER.decode(ids, skip_special_tokens=False) if matcher._may_end or matcher.complete else None


@pytest.mark.parametrize("name", FORMATS)
def test_calls_of_many_tools_side_by_side(name):
    form, answers = FORMATS[name], answers_in(name)
    parameters = {f"tool_{number}": TOOLS["an optional string"][0] for number in range(64)}
    calls = [("tool_0", {"a": "x"}), ("tool_63", {"a": "</tool_call>", "b": "]"})][: form.most_calls]
    text = answer_of(form, calls)
    for parallel in (True, False):
        use = use_of(parameters, "required", parallel)
        grammar = answers.constraints(use, lambda text: None, None)["grammar"]
        assert allows(grammar, text) == (parallel or len(calls) == 1)
        for pieces in ([text], list(text)):
            rest, found = read(answers, use, pieces)
            expected = calls if parallel else calls[:1]
            assert rest == "" and [(called, json.loads(written)) for called, written in found] == expected


@pytest.mark.parametrize(
    ("name", "parameters", "reason"),
    [
        ("qwen_xml", tool(a={"type": "string", "pattern": "^a$|b"}), "pattern"),
        ("qwen_xml", tool(a={"type": "string", "format": "ipv6"}), "format 'ipv6'"),
        ("qwen_xml", tool(a={"const": "x</parameter> </function>"}), "the end of a tag"),
        ("qwen_xml", tool(**{"a>b": STRING}), "no name of a tag"),
        ("qwen_xml", tool(a={"allOf": [STRING, {"minLength": 1}]}), "allOf"),
        ("qwen_xml", tool(a={"$ref": "#/$defs/none"}), "no schema inside"),
        ("qwen_xml", {"type": "object", "anyOf": [{"required": ["a"]}]}, "anyOf of parameters"),
        ("pythonic", {"type": "object", "minProperties": 1}, "minProperties of parameters"),
        ("pythonic", tool(**{"a b": STRING}), "no name of Python"),
        ("hermes", {"type": "array"}, "parameters of type 'array'"),
    ],
)
def test_what_a_form_cannot_hold_is_refused_in_a_line(name, parameters, reason):
    with pytest.raises(ValueError, match=reason):
        answers_in(name).constraints(use_of({"f": parameters}, "required"), lambda text: None, None)
