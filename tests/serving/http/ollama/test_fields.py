"""Names, durations and options as Ollama writes them."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("fastapi")
from pydantic import ValidationError

from attar.serving.http.ollama.conversation_request import chat_messages
from attar.serving.http.ollama.output import OllamaOutput, RequestTimes
from attar.serving.http.ollama.protocol import OllamaMessage, OllamaOptions, find_model, keep_seconds, tagged


def test_names_have_tags_and_no_case():
    assert [tagged(name) for name in ("small", "attar:tiny", "org/Name", "host:80/name")] == [
        "small:latest",
        "attar:tiny",
        "org/Name:latest",
        "host:80/name:latest",
    ]
    names = ["Small", "small", "attar:tiny", "b:latest"]
    assert find_model("small", names) == "small", "the same spelling first"
    assert find_model("SMALL:Latest", names) == "Small" and find_model("b", names) == "b:latest"
    assert find_model("ATTAR:tiny", names) == "attar:tiny" and find_model("attar", names) is None


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        *((None, math.inf), (-1, math.inf), ("-1m", math.inf), (0, 0), ("0", 0), (90, 90), (0.5, 0.5)),
        *(("5m", 300), ("1h30m", 5400), ("1.5s", 1.5), ("250ms", 0.25), ("24h", 86400)),
    ],
)
def test_durations(value, seconds):
    assert keep_seconds(value) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "5", "m", "5 m", "1d", "1h-5m", "٥m", "1" * 200 + "s", "1s\n"])
def test_no_durations(text):
    with pytest.raises(ValueError, match="duration"):
        keep_seconds(text)


def test_options_without_a_word_are_ollamas_or_the_models():
    fields = OllamaOptions().chat_fields({"top_k": 5})
    assert fields == {"temperature": 0.8, "top_p": 0.9}
    options = OllamaOptions.model_validate({"num_predict": -1, "seed": -1, "top_k": 20.0, "temperature": 0})
    assert options.chat_fields({}) == {"temperature": 0, "top_k": 20, "top_p": 0.9}
    for wrong in ({"top_k": 1.5}, {"top_k": True}, {"temperature": "1"}, {"stop": [""]}, {"seed": 2**64}):
        with pytest.raises(ValidationError):
            OllamaOptions.model_validate(wrong)


def test_results_belong_to_the_oldest_call_of_their_tool():
    calls = [{"function": {"name": name, "arguments": {}}} for name in ("f", "g", "f")]
    messages = [{"role": "Assistant", "tool_calls": calls}]
    messages += [{"role": "tool", "tool_name": name, "content": ""} for name in ("g", "f", "f", "h")]
    messages += [{"role": "assistant", "tool_calls": calls[:1]}, {"role": "tool", "content": ""}]
    converted = chat_messages([OllamaMessage.model_validate(message) for message in messages])
    assert [call.id for call in converted[0].tool_calls] == ["call_0", "call_1", "call_2"]
    assert [message.tool_call_id for message in converted[1:5]] == ["call_1", "call_0", "call_2", None]
    assert converted[6].tool_call_id == converted[5].tool_calls[0].id == "call_3"


@pytest.mark.parametrize("arguments", ['{"a": 1e999}', '{"a": "\\ud800"}', "[1]", '{"a":', '{"a":' * 99999])
def test_arguments_that_json_cannot_hold_are_text(arguments):
    output = OllamaOutput("m", RequestTimes(0, 0), None, None)
    output._call = type("Call", (), {"name": "f", "arguments": arguments})
    assert output._close_call() == [{"content": f"f{arguments}"}]
