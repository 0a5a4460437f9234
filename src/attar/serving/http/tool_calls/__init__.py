"""Tool calls: how a family of models writes them, and a parser that reads them as they come.

    FORMATS[name]           harmony, hermes, qwen_xml, pythonic, llama3, mistral, json
    choose_format(...)      the family's, from the words of its chat template
    call_grammar(...)       a grammar that holds an answer to calls

A parser (``parser.py``) takes the pieces of an answer and returns text and calls in their order. Cutting an
answer into other pieces never changes what they join to.
"""

from __future__ import annotations

from attar.errors import SettingsError
from attar.serving.http.tool_calls.call_format import CallFormat
from attar.serving.http.tool_calls.harmony import HarmonyCalls
from attar.serving.http.tool_calls.hermes import HermesCalls
from attar.serving.http.tool_calls.leading_json import LeadingJsonCalls
from attar.serving.http.tool_calls.mistral import MistralCalls
from attar.serving.http.tool_calls.pythonic import PythonicCalls
from attar.serving.http.tool_calls.qwen_xml import QwenXmlCalls

FORMATS: dict[str, CallFormat] = {
    "harmony": CallFormat(
        parser=HarmonyCalls,
        signs=("<|channel|>",),
        mark="<|channel|>",
        before="commentary to=functions.{name} <|constrain|>json<|message|>",
        after="",  # the token that ends a call ends the answer
        between="",
        most_calls=1,
        channels=True,
    ),
    "qwen_xml": CallFormat(
        parser=QwenXmlCalls,
        signs=("<function=",),
        mark="<tool_call>",
        before="\n<function={name}>\n",
        after="</function>\n</tool_call>",
        between="\n",
        arguments="xml",
    ),
    "hermes": CallFormat(
        parser=HermesCalls,
        signs=("<tool_call>",),
        mark="<tool_call>",
        before='\n{{"name": "{name}", "arguments": ',
        after="}\n</tool_call>",
        between="\n",
    ),
    "mistral": CallFormat(
        parser=MistralCalls,
        signs=("[TOOL_CALLS]",),
        opening="[TOOL_CALLS]",
        before='{{"name": "{name}", "arguments": ',
        after="}",
        between=", ",
        bracketed=True,
        id_length=9,
    ),
    "pythonic": CallFormat(
        parser=PythonicCalls,
        signs=("[func_name1(",),
        before="{name}(",
        after=")",
        between=", ",
        bracketed=True,
        arguments="python",
    ),
    "llama3": CallFormat(
        parser=LeadingJsonCalls,
        signs=("<|python_tag|>", "Environment: ipython"),
        before='{{"name": "{name}", "parameters": ',
        after="}",
        between="; ",
    ),
    "json": CallFormat(
        parser=LeadingJsonCalls,
        before='{{"name": "{name}", "arguments": ',
        after="}",
        between=", ",
        bracketed=True,
    ),
}
"""By name; the first whose sign is in a chat template is the model's, and json where there is none."""


def choose_format(name: str, template: str) -> CallFormat:
    """A format by its name; ``auto``: by the words of the chat template.

    Raises:
        SettingsError: there is no such format.
    """
    if name == "auto":
        name = next((key for key, form in FORMATS.items() if form.is_in(template)), "json")
    if name not in FORMATS:
        raise SettingsError("tool_parser", name, f"auto, {', '.join(FORMATS)}")
    return FORMATS[name]
