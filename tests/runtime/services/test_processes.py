"""Draft, target and coordinator as processes: the same answers as one process, and nothing is left over."""

from __future__ import annotations

import pytest

pytest.importorskip("grpc")
pytest.importorskip("httpx")
import httpx

from attar.runtime.llm import LLM
from attar.runtime.sampling.params import SamplingParams
from tests.runtime.server.real import COMPLETIONS, scraped
from tests.runtime.server.test_process import until
from tests.runtime.services.processes import service

pytestmark = pytest.mark.slow
PROMPTS = ["def f(x):\n", "import os\n", "class A:\n    def __init__(self", "for i in range("]


def requests():
    """Greedy and seeded."""
    for number, prompt in enumerate(PROMPTS):
        for temperature in (0, 0.8):
            asked = {"model": "tiny", "prompt": prompt, "max_tokens": 60, "seed": number, "ignore_eos": True}
            yield asked | {"temperature": temperature}


def wanted():
    """Texts of one process without drafts."""
    llm = LLM("attar:tiny")
    names = ("max_tokens", "seed", "ignore_eos", "temperature")
    for asked in requests():
        params = SamplingParams(**{name: asked[name] for name in names})
        yield llm.generate(asked["prompt"], params)[0].text


def answers(url):
    """One after the other, then all together."""
    with httpx.Client(timeout=60) as http:
        for asked in requests():
            response = http.post(url + COMPLETIONS, json=asked)
            assert response.status_code == 200, response.text
            yield response.json()["choices"][0]["text"]


def test_an_ordinary_server_with_a_draft_service(tmp_path):
    with service(tmp_path, "draft", "--role", "draft", model="attar:draft") as (_, drafts, endpoint):
        options = ("--draft-endpoint", endpoint)
        with service(tmp_path, "server", *options) as (_, url, _):
            until(lambda: any("replica_ready" in name and value for name, value in scraped(url).items()))
            assert list(answers(url)) == list(wanted())
            numbers = scraped(url)
            assert numbers['draft_offers_total{outcome="new"}'] > 0
            assert numbers['draft_offers_total{outcome="wrong"}'] == 0
            until(lambda: scraped(drafts)["num_requests_running"] == 0)
            assert scraped(drafts)["draft_tokens_total"] > 0
        refused = httpx.post(drafts + COMPLETIONS, json=next(requests()))
        assert refused.status_code == 400 and "only drafts for others" in refused.json()["error"]["message"]
