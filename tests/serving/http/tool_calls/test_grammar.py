"""A forced call is one that its parser reads, with arguments of the tool's schema, whatever the model is."""

from __future__ import annotations

import json
import random

import pytest

pytest.importorskip("llguidance")

from attar.runtime.sampling.grammar import Grammars
from attar.runtime.sampling.params import SamplingParams
from attar.serving.http.tool_calls import FORMATS
from attar.serving.http.tool_calls.call_format import call_grammar
from attar.serving.http.tool_calls.parts import join_pieces
from tests import tiny_models

UNITS = {"$ref": "#/$defs/unit"}
TOOLS = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", 'Rom"e']}, "unit": UNITS},
        "required": ["city", "unit"],
        "additionalProperties": False,
        "$defs": {"unit": {"type": "string", "enum": ["C", "F"]}},
    },
    "count": {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["n"],
        "additionalProperties": False,
    },
}
COUNT = {"count": TOOLS["count"]}


def written(grammar, seed, tokenizer):
    """A random text of the grammar."""
    ids, choose = [], random.Random(seed)
    matcher = Grammars(tokenizer, len(tokenizer)).matcher(SamplingParams(grammar=grammar))
    while not matcher.complete and len(ids) < 2000:
        allowed = matcher.allowed().nonzero().flatten().tolist()
        if not allowed or (matcher._mask.may_end and choose.random() < 0.5):
            break
        blanks = [token for token in allowed if tokenizer.decode([token]).strip()]
        ids.append(choose.choice(blanks or allowed))
        matcher.consume(ids[-1])
    return tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("name", FORMATS)
def test_any_text_of_the_grammar_is_calls_of_the_tools(name):
    tokenizer = tiny_models.tokenizer()
    counts = set()
    for seed in range(6):
        grammar = call_grammar(FORMATS[name], TOOLS, parallel=True)
        parser = FORMATS[name].parser(TOOLS)
        answer = join_pieces([*parser.add(written(grammar, seed, tokenizer)), *parser.finish()])
        assert answer.calls and not answer.text, answer
        counts.add(len(answer.calls))
        for call in answer.calls:
            arguments = json.loads(call.arguments)
            if call.name == "count":
                assert set(arguments) == {"n"} and 0 <= arguments["n"] <= 9
            else:
                assert arguments["city"] in ("Paris", 'Rom"e') and arguments["unit"] in "CF"
    assert max(counts) > 1 or FORMATS[name].most_calls == 1, "several calls are allowed"


def test_one_call_where_no_more_are_allowed():
    grammar = call_grammar(FORMATS["hermes"], TOOLS, parallel=False)
    for seed in range(4):
        assert written(grammar, seed, tiny_models.tokenizer()).count("<tool_call>") == 1


def test_an_answer_of_a_schema_is_allowed_too():
    yes = {"properties": {"yes": {"type": "boolean"}}, "required": ["yes"], "additionalProperties": False}
    answer = json.dumps({"type": "object"} | yes)
    grammar = call_grammar(FORMATS["hermes"], COUNT, parallel=False, answer=answer)
    texts = [written(grammar, seed, tiny_models.tokenizer()) for seed in range(12)]
    assert any(text.startswith("<tool_call>") for text in texts)
    assert any("yes" in text and "tool" not in text for text in texts)


def test_arguments_in_pythons_form_are_those_of_the_schema():
    """Required ones first, of the others any; a schema may refer to its definitions."""
    properties = {"a": {"type": "integer"}, "b": UNITS, "c": {"type": "boolean"}, "d": {"enum": ["x", None]}}
    tokenizer, forms = tiny_models.tokenizer(), set()
    for required in ([], ["c"], ["c", "d"]):
        tool = {"type": "object", "properties": properties, "required": required}
        tool["$defs"] = TOOLS["get_weather"]["$defs"]
        grammar = call_grammar(FORMATS["pythonic"], {"f": tool, "g": None}, parallel=False)
        for seed in range(8):
            text = written(grammar, seed, tokenizer)
            parser = FORMATS["pythonic"].parser({"f": tool, "g": None})
            answer = join_pieces([*parser.add(text), *parser.finish()])
            assert len(answer.calls) == 1 and not answer.text, text
            arguments = json.loads(answer.calls[0].arguments)
            if answer.calls[0].name == "f":
                assert set(required) <= set(arguments) <= set(properties), text
                assert all(isinstance(arguments.get("c", True), bool) for _ in arguments)
                forms.add((tuple(required), frozenset(arguments)))
    assert len(forms) > 5


def test_marks_that_are_special_tokens_are_written_as_such():
    tokenizer = tiny_models.tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]"]})
    token = tokenizer.convert_tokens_to_ids("[TOOL_CALLS]")
    grammar = call_grammar(FORMATS["mistral"], COUNT, parallel=True, token_of={"[TOOL_CALLS]": token}.get)
    matcher = Grammars(tokenizer, len(tokenizer)).matcher(SamplingParams(grammar=grammar))
    assert matcher.allowed().nonzero().flatten().tolist() == [token]


def test_marks_in_the_middle_of_a_call_are_special_tokens():
    tokenizer = tiny_models.tokenizer()
    marks = ["<|channel|>", "<|constrain|>", "<|message|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    ids = {mark: tokenizer.convert_tokens_to_ids(mark) for mark in marks}
    grammar = call_grammar(FORMATS["harmony"], COUNT, parallel=True, token_of=ids.get)
    matcher = Grammars(tokenizer, len(tokenizer)).matcher(SamplingParams(grammar=grammar))
    seen = []
    while not matcher.complete and len(seen) < 200:
        allowed = matcher.allowed().nonzero().flatten().tolist()
        if matcher._mask.may_end:
            break
        seen.append(next((token for token in allowed if token in ids.values()), allowed[0]))
        matcher.consume(seen[-1])
    assert [token for token in seen if token in ids.values()] == list(ids.values())
    text = tokenizer.decode(seen, skip_special_tokens=False)
    parser = FORMATS["harmony"].parser(COUNT)
    assert [call.name for call in join_pieces([*parser.add(text), *parser.finish()]).calls] == ["count"]
