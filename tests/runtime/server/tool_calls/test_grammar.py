"""A forced call is one that its parser reads, with arguments of the tool's schema, whatever the model is."""

from __future__ import annotations

import json
import random

import pytest

pytest.importorskip("llguidance")

from attar.runtime.sampling.grammar import Grammars
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.server.tool_calls import FORMATS
from attar.runtime.server.tool_calls.call_format import call_grammar
from attar.runtime.server.tool_calls.parts import join_pieces
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
XML_TOOLS = {"count": TOOLS["count"]}


def written(grammar, seed, tokenizer):
    """A random text of the grammar."""
    ids, choose = [], random.Random(seed)
    matcher = Grammars(tokenizer, len(tokenizer)).matcher(SamplingParams(grammar=grammar))
    while not matcher.complete and len(ids) < 2000:
        allowed = matcher.allowed().nonzero().flatten().tolist()
        if not allowed or (matcher._may_end and choose.random() < 0.5):
            break
        blanks = [token for token in allowed if tokenizer.decode([token]).strip()]
        ids.append(choose.choice(blanks or allowed))
        matcher.consume(ids[-1])
    return tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("name", FORMATS)
def test_any_text_of_the_grammar_is_calls_of_the_tools(name):
    tokenizer = tiny_models.tokenizer()
    tools = XML_TOOLS if name == "qwen_xml" else TOOLS
    counts = set()
    for seed in range(6):
        grammar = call_grammar(FORMATS[name], tools, parallel=True)
        parser = FORMATS[name].parser(tools)
        answer = join_pieces([*parser.add(written(grammar, seed, tokenizer)), *parser.finish()])
        assert answer.calls and not answer.text, answer
        counts.add(len(answer.calls))
        for call in answer.calls:
            arguments = json.loads(call.arguments)
            if call.name == "count":
                assert set(arguments) == {"n"} and 0 <= arguments["n"] <= 9
            else:
                assert arguments["city"] in ("Paris", 'Rom"e') and arguments["unit"] in "CF"
    assert max(counts) > 1, "several calls are allowed"


def test_one_call_where_no_more_are_allowed():
    grammar = call_grammar(FORMATS["hermes"], TOOLS, parallel=False)
    for seed in range(4):
        assert written(grammar, seed, tiny_models.tokenizer()).count("<tool_call>") == 1


def test_an_answer_of_a_schema_is_allowed_too():
    answer = '{"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"]}'
    grammar = call_grammar(FORMATS["hermes"], XML_TOOLS, parallel=False, answer=answer)
    texts = [written(grammar, seed, tiny_models.tokenizer()) for seed in range(12)]
    assert any(text.startswith("<tool_call>") for text in texts)
    assert any("yes" in text and "tool" not in text for text in texts)


def test_marks_that_are_special_tokens_are_written_as_such():
    tokenizer = tiny_models.tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]"]})
    token = tokenizer.convert_tokens_to_ids("[TOOL_CALLS]")
    grammar = call_grammar(FORMATS["mistral"], XML_TOOLS, parallel=True, token_of={"[TOOL_CALLS]": token}.get)
    matcher = Grammars(tokenizer, len(tokenizer)).matcher(SamplingParams(grammar=grammar))
    assert matcher.allowed().nonzero().flatten().tolist() == [token]
