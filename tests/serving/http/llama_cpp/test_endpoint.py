"""llama.cpp's endpoints against a scripted model: forms of prompts, answers, streams, what is refused."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
import httpx

from attar.runtime.sampling.params import SamplingParams
from attar.serving.http.app import create_app
from attar.serving.http.llama_cpp.protocol import LlamaCppCompletionRequest
from attar.serving.http.settings import ServerSettings
from tests.serving.http.fake import ANSWER, FAIL, SLOW, FakeBackend, FakeTokenizer
from tests.serving.http.real import leaving
from tests.serving.http.test_live import running_app, until

INFILL = {"<|fim_prefix|>": 1, "<|fim_suffix|>": 2, "<|fim_middle|>": 5}
SEVERAL = INFILL | {"<|repo_name|>": 6, "<|file_sep|>": 7}


class Server:
    """A server whose model fills in."""

    def __init__(self):
        self.backend, self.words = FakeBackend(200), FakeTokenizer("tools")
        self.words.infill = INFILL
        self.settings = ServerSettings(port=0)
        defaults = {"temperature": 0.5, "repetition_penalty": 1.25}
        self.app = create_app(
            self.backend, self.settings, tokenizer=self.words, model="tiny", defaults=defaults
        )

    def post(self, path, **body):
        return httpx.post(f"{self.url}{path}", json=body, timeout=30)


@pytest.fixture(scope="module")
def served():
    server = Server()
    with running_app(server.app, server.settings) as (server.url, _):
        yield server
    assert not server.app.state.service.admission.active and not server.backend.open


def test_a_completion(served):
    answer = served.post("/completion", prompt="hi", n_predict=50, n_probs=1, return_tokens=True).json()
    assert answer["content"] == ANSWER and answer["stop"] and answer["stop_type"] == "eos"
    assert answer["tokens_predicted"] == 13 and answer["tokens_evaluated"] == 3 and answer["index"] == 0
    assert bytes(answer["tokens"][:5]) == b"Hello" and answer["prompt"] == "hi" and answer["model"] == "tiny"
    assert answer["tokens_cached"] == 3 and not answer["truncated"] and not answer["has_new_line"]
    score = answer["completion_probabilities"][0]
    assert score["token"] == "H" and score["bytes"] == [72] and score["top_logprobs"][0]["id"] == 72
    times = answer["timings"]
    assert times["predicted_n"] == 13 and times["predicted_ms"] == pytest.approx(10)
    assert times["prompt_n"] == 0 and times["cache_n"] == 3
    settings = answer["generation_settings"]
    assert settings["n_predict"] == 50 and settings["repeat_penalty"] == 1.25 and settings["n_ctx"] == 200
    params = served.backend.asked[-1][1]
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.5, 40, 0.95, 0.05)
    short = served.post("/completions", prompt="hi", n_predict=3).json()
    assert short["content"] == "Hel" and short["stop_type"] == "limit" and short["tokens"] == []
    nothing = served.post("/completion", prompt="hi", n_predict=0, n_probs=2).json()
    assert nothing["content"] == "" and nothing["tokens_predicted"] == 0 and nothing["tokens_evaluated"] == 3


def test_a_stream_has_no_done(served):
    raw = served.post("/completion", prompt="hi", stream=True)
    assert raw.headers["content-type"].startswith("text/event-stream") and "[DONE]" not in raw.text
    parts = [json.loads(line[6:]) for line in raw.text.split("\n\n") if line]
    assert "".join(part["content"] for part in parts) == ANSWER
    assert [part["stop"] for part in parts] == [False] * 13 + [True]
    assert parts[4]["tokens_predicted"] == 5 and parts[-1]["stop_type"] == "eos" and parts[-1]["timings"]
    failed = served.post("/completion", prompt=[FAIL], stream=True).text
    assert "error" in json.loads(failed.strip().split("\n\n")[-1][6:])


PROMPTS = [
    ("hi", [(256, *b"hi")], True),
    ([12, 34], [(12, 34)], True),
    ([12, "hi", 34], [(12, *b"hi", 34)], True),
    (["a", "b"], [(256, *b"a"), (256, *b"b")], False),
    ([[12, "a"], "b", {"prompt_string": "c"}], [(12, *b"a"), (256, *b"b"), (256, *b"c")], False),
    ({"prompt_string": "hi"}, [(256, *b"hi")], True),
]


@pytest.mark.parametrize(("prompt", "ids", "single"), PROMPTS)
def test_forms_of_prompts(served, prompt, ids, single):
    before = len(served.backend.asked)
    answer = served.post("/completion", prompt=prompt).json()
    assert sorted(asked[0] for asked in served.backend.asked[before:]) == sorted(ids)
    answers = [answer] if single else answer
    assert [part["index"] for part in answers] == list(range(len(ids)))
    assert all(part["content"] == ANSWER for part in answers)


def test_several_completions_of_a_prompt(served):
    assert [part["content"] for part in served.post("/completion", prompt="x", n_cmpl=2).json()] == [
        ANSWER
    ] * 2


def test_infill(served):
    body = {"input_prefix": "a", "input_suffix": "b", "prompt": "c"}
    assert served.post("/infill", **body).json()["content"] == ANSWER
    assert served.backend.asked[-1][0] == (256, 1, *b"a", 2, *b"b", 5, *b"c")
    files = [{"filename": "x.py", "text": "X"}]
    served.post("/infill", **body, input_extra=files)
    assert served.backend.asked[-1][0] == (256, *b"x.py\nX\n", 1, *b"a", 2, *b"b", 5, *b"c")
    served.words.infill = SEVERAL
    served.post("/infill", **body, input_extra=files)
    expected = (256, 6, *b"repository\n", 7, *b"x.py\nX\n", 7, *b"file\n", 1, *b"a", 2, *b"b", 5, *b"c")
    assert served.backend.asked[-1][0] == expected and served.backend.asked[-1][1].stop_ids == (7, 6)
    served.words.infill = {}
    refused = served.post("/infill", **body)
    served.words.infill = INFILL
    assert refused.status_code == 400 and "no tokens for filling in" in refused.json()["error"]["message"]


def test_properties_and_slots(served):
    properties = httpx.get(f"{served.url}/props").json()
    assert properties["total_slots"] == 0 and properties["chat_template"] == "tools"
    assert properties["default_generation_settings"]["n_ctx"] == 200
    assert properties["default_generation_settings"]["params"]["repeat_penalty"] == 1.25
    assert httpx.get(f"{served.url}/slots").json() == []
    assert httpx.get(f"{served.url}/slots?fail_on_no_slot=1").status_code == 503
    with leaving(served.url, {"prompt": [SLOW], "stream": True}, "/completion"):
        until(lambda: len(httpx.get(f"{served.url}/slots").json()) == 1)
        assert httpx.get(f"{served.url}/slots").json()[0]["is_processing"]
    until(lambda: not served.backend.open)


def test_tokens_by_llama_cpps_names(served):
    assert served.post("/tokenize", content="hé").json()["tokens"] == list("hé".encode())
    assert served.post("/tokenize", content="h", add_special=True).json()["tokens"] == [256, 104]
    pieces = served.post("/tokenize", content="hé", with_pieces=True).json()["tokens"]
    assert pieces[0] == {"id": 104, "piece": "h"} and pieces[1] == {"id": 195, "piece": [195]}
    assert served.post("/detokenize", tokens=[104, 105]).json()["content"] == "hi"
    assert httpx.get(f"{served.url}/v1/health").json() == {"status": "ok"}


def test_biases_and_limits():
    def fields(**body):
        return LlamaCppCompletionRequest(prompt="x", **body).all_fields({})

    assert fields(logit_bias=[[5, 1.5], ["6", False]])["logit_bias"] == {5: 1.5, 6: -1e6}
    assert fields(logit_bias={"7": -1})["logit_bias"] == {7: -1.0}
    assert [fields(n_predict=n)["max_tokens"] for n in (-1, 0, 5)] == [None, 1, 5]
    assert fields(max_tokens=4)["max_tokens"] == 4 and fields(temperature=-1)["temperature"] == 0
    assert SamplingParams(**fields(json_schema={"type": "object"}, seed=-1, top_k=-1, stop="x")).top_k == 0


REFUSED = [
    {"prompt": []},
    {"prompt": [[]]},
    {"prompt": [-1]},
    {"prompt": [1.5]},
    {"prompt": [True, 1]},
    {"prompt": None},
    {"prompt": {"prompt_string": 5}},
    {"prompt": {"prompt_string": "x", "multimodal_data": ["aGk="]}},
    {"prompt": [257]},
    {"prompt": "x", "grammar": "root ::= x"},
    {"prompt": "x", "post_sampling_probs": True},
    {"prompt": "x", "logit_bias": [["hello", 1]]},
    {"prompt": "x", "logit_bias": [[1, 1e9]]},
    {"prompt": "x", "logit_bias": [[300, 1]]},
    {"prompt": "x", "n_probs": 10**6},
    {"prompt": "x", "n_predict": "many"},
    {"prompt": ["x"] * 1000},
    {"prompt": "x" * 5000},
    {},
]


@pytest.mark.parametrize("body", REFUSED, ids=lambda body: json.dumps(body)[:40])
def test_what_is_refused_is_refused_in_a_line(served, body):
    response = served.post("/completion", **body)
    assert response.status_code == 400, response.text
    assert "\n" not in response.json()["error"]["message"]


def test_what_is_ignored_is_noted(served):
    response = served.post("/completion", prompt="x", mirostat=2, cache_prompt=False, id_slot=3)
    assert response.headers["x-ignored-fields"] == "cache_prompt, mirostat, id_slot"
