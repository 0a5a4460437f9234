"""Two models in one server: names, and the KL of each token against brute force."""

from __future__ import annotations

import math
from contextlib import contextmanager

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
import httpx
import torch

from attar.runtime.admission import Limits
from attar.runtime.llm import LLM
from attar.runtime.scoring import prompt_logits
from attar.serving.http.app import create_app
from attar.serving.http.backend import EngineBackend
from attar.serving.http.compare import compare_logits
from attar.serving.http.model_table import ServedModel
from attar.serving.http.settings import ServerSettings
from attar.serving.http.tokenizer import ServerTokenizer
from tests import tiny_models
from tests.serving.http.real import holding, leaving, refused
from tests.serving.http.test_live import running_app, until

CONTEXT, TOKENS = "one two three four five six seven " * 3, [7, 3, 9, 200, 5, 5, 31]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two tiny models of random weights with one tokenizer."""
    place = tmp_path_factory.mktemp("two")
    return [
        str(tiny_models.save(tiny_models.build("llama3", seed=seed), place / name))
        for seed, name in enumerate(("one", "two"))
    ]


@contextmanager
def serving_two(folders, **settings):
    llms = [LLM(folder, kv_tokens=512, limits=Limits(sequences=8, step_tokens=16)) for folder in folders]
    backends = [EngineBackend(llm.streams()) for llm in llms]
    words = [ServerTokenizer(llm.tokenizer) for llm in llms]
    settings = ServerSettings(port=0, **settings)
    second = ServedModel("two", backends[1], words[1])
    app = create_app(backends[0], settings, tokenizer=words[0], model="one", compare=second)
    with running_app(app, settings) as (url, _):
        yield url, llms
    for llm in llms:
        llm.engine.check()


@pytest.fixture(scope="module")
def served(folders):
    with serving_two(folders) as served:
        yield served


def post(url, **body):
    return httpx.post(
        f"{url}/attar/compare", json={"prompt": CONTEXT, "token_ids": TOKENS, **body}, timeout=60
    )


def test_the_kl_of_each_token_is_that_of_the_models(served, folders):
    """Brute force: the logits of the whole prompt of both models, the KL as a sum in float64."""
    url, llms = served
    answer = post(url).raise_for_status().json()
    hits = httpx.get(f"{url}/attar/state").json()["prefix_hits"]
    again = post(url).json()
    assert llms[0].engine.scheduler.manager.stats.hit >= hits + 16, "the context comes from the prefix cache"
    prompt = [*llms[0].encode(CONTEXT), *TOKENS]
    rows = [
        next(prompt_logits(LLM(folder, kv_tokens=512).engine.runner, [prompt])).double().softmax(-1)
        for folder in folders
    ]
    start = len(prompt) - len(TOKENS)
    want = []
    for token in range(start, len(prompt)):
        p, q = (row[token - 1].tolist() for row in rows)
        want.append(sum(a * (math.log(a) - math.log(b)) for a, b in zip(p, q, strict=True)))
    for body in (answer, again):
        assert [one["kl"] for one in body["tokens"]] == pytest.approx(want, rel=1e-4, abs=1e-6)
        assert body["models"] == ["one", "two"] and body["mean_kl"] == pytest.approx(
            sum(want) / len(want), rel=1e-4
        )
    for index, one in enumerate(answer["tokens"], start):
        for name, row in zip(("logprob", "other_logprob"), rows, strict=True):
            assert one[name] == pytest.approx(row[index - 1][prompt[index]].log().item(), rel=1e-4)
    assert min(want) > 1e-4, "the models differ"


def test_equal_logits_are_no_distance_apart():
    row = torch.randn(50)
    same = compare_logits(row, row + 3.0, 7)
    assert same.kl == pytest.approx(0, abs=1e-12) and same.logprob == pytest.approx(same.other_logprob)
    banned = row.clone()
    banned[3] = -torch.inf
    assert compare_logits(banned, row, 3).logprob == -9999.0 and compare_logits(row, banned, 3).kl == 9999.0


def test_each_model_answers_under_its_name(served):
    url, _ = served
    assert [card["id"] for card in httpx.get(f"{url}/v1/models").json()["data"]] == ["one", "two"]
    assert httpx.get(f"{url}/attar/state").json()["compare"] == "two"
    texts = []
    for name in ("one", "two"):
        body = {
            "model": name,
            "prompt": CONTEXT,
            "temperature": 0,
            "ignore_eos": True,
            "attar": {"tokens": True},
        }
        choice = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"][0]
        texts.append(choice["attar"]["token_ids"])
    assert texts[0] != texts[1]
    refused(httpx.post(f"{url}/v1/completions", json={"model": "three", "prompt": "x"}), 404)


def test_wrong_bodies_are_refused(served):
    url, llms = served
    for body in (
        {"token_ids": []},
        {"token_ids": [-1]},
        {"token_ids": ["a"]},
        {"messages": []},
        {"prompt": None},
    ):
        refused(post(url, **body), 400)
    refused(post(url, token_ids=[llms[0].engine.vocabulary]), 400)
    refused(post(url, token_ids=[5] * 600), 400)


def test_it_needs_the_key_and_a_client_that_leaves_stops_it(folders):
    with serving_two(folders, api_key=("long-enough",)) as (url, llms):
        refused(post(url), 401)
        go = holding(llms[1].engine)
        go.clear()
        key = {"Authorization": "Bearer long-enough"}
        body = {"prompt": CONTEXT, "token_ids": TOKENS * 6}
        with leaving(url, body, "/attar/compare", **key):
            until(lambda: not llms[1].engine.idle)
        go.set()
        until(lambda: all(llm.engine.idle for llm in llms))
        state = httpx.get(f"{url}/attar/state", headers=key).json()
        assert state["blocks"]["states"]["owned"] == 0
        again = httpx.post(
            f"{url}/v1/completions", json={"model": "two", "prompt": "x"}, headers=key, timeout=60
        )
        assert again.status_code == 200
