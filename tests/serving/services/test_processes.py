"""Draft, target and coordinator as processes: the same answers as one process, and nothing is left over."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import contextmanager

import pytest

pytest.importorskip("grpc")
pytest.importorskip("httpx")
import httpx

from attar.runtime.llm import LLM
from attar.runtime.sampling.params import SamplingParams
from tests.serving.http.real import COMPLETIONS, scraped
from tests.serving.http.test_live import until
from tests.serving.services.processes import service

pytestmark = pytest.mark.slow
POOLED = ("--pooling", "last")
NEW = 'draft_offers_total{outcome="new"}'
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


def embedded(url):
    """Whether it embeds, and as it said how wide."""
    asked = {"model": "tiny", "input": PROMPTS}
    answer = httpx.post(f"{url}/v1/embeddings", json=asked, timeout=60).json()
    short = httpx.post(f"{url}/v1/embeddings", json=asked | {"dimensions": 8}, timeout=60).json()
    return len(answer["data"]) == len(PROMPTS) and len(short["data"][0]["embedding"]) == 8


def test_an_ordinary_server_with_a_draft_service(tmp_path):
    with service(tmp_path, "draft", "--role", "draft", model="attar:draft") as (_, drafts, endpoint):
        options = ("--draft-endpoint", endpoint, *POOLED)
        with service(tmp_path, "server", *options) as (_, url, _):
            until(lambda: any("replica_ready" in name and value for name, value in scraped(url).items()))
            assert list(answers(url)) == list(wanted())
            assert embedded(url)
            numbers = scraped(url)
            assert numbers[NEW] > 0
            assert numbers['draft_offers_total{outcome="wrong"}'] == 0
            until(lambda: scraped(drafts)["num_requests_running"] == 0)
            assert scraped(drafts)["draft_tokens_total"] > 0
        refused = httpx.post(drafts + COMPLETIONS, json=next(requests()))
        assert refused.status_code == 400 and "only drafts for others" in refused.json()["error"]["message"]


@contextmanager
def three(folder, **options):
    """Target, draft and coordinator: the addresses of each, and the process that drafts."""
    with (
        service(folder, "target", "--role", "target", *POOLED, **options) as (_, target, target_endpoint),
        service(folder, "draft", "--role", "draft", model="attar:draft") as (child, draft, endpoint),
        service(
            folder,
            "coordinator",
            *("--role", "coordinator", "--target-endpoint", target_endpoint, "--draft-endpoint", endpoint),
            *POOLED,
        ) as (_, url, _),
    ):
        until(lambda: drafters_ready(url))
        yield url, target, draft, (child, endpoint)


def drafters_ready(url):
    return sum(value for name, value in scraped(url).items() if name.startswith("replica_ready"))


async def together(url, count=16):
    """Answers of ``count`` streams at once, greedy and seeded."""
    asked = (list(requests()) * 2)[:count]
    async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None)) as http:
        answers = await asyncio.gather(*(http.post(url + COMPLETIONS, json=one) for one in asked))
    assert all(one.status_code == 200 for one in answers), [one.text for one in answers]
    return [one.json()["choices"][0]["text"] for one in answers]


def settled(*urls):
    """No service has anything left."""
    for url in urls:
        until(lambda url=url: scraped(url)["num_requests_running"] == 0)
        assert scraped(url)["num_requests_waiting"] == 0
        assert scraped(url).get('kv_cache_blocks{state="used"}', 0) == 0


@pytest.mark.timeout(900)
def test_three_processes_answer_as_one(tmp_path):
    """Sixteen streams; then the draft service is stopped, killed and started again; then clients vanish."""
    want = list(wanted()) * 2
    with three(tmp_path) as (url, target, draft, (child, endpoint)):
        assert asyncio.run(together(url)) == want
        while not scraped(url)[NEW]:  # on a busy machine the first offers may all be late
            assert asyncio.run(together(url)) == want
        assert embedded(url)
        settled(url, target, draft)

        os.kill(child.pid, signal.SIGSTOP)
        assert asyncio.run(together(url)) == want
        until(lambda: not drafters_ready(url))
        os.kill(child.pid, signal.SIGCONT)
        until(lambda: drafters_ready(url))
        assert asyncio.run(together(url)) == want

        child.kill()
        assert asyncio.run(together(url)) == want
        until(lambda: not drafters_ready(url))
        port = int(endpoint.rsplit(":", 1)[1])
        with service(tmp_path, "again", "--role", "draft", model="attar:draft", grpc_port=port) as (
            _,
            again,
            _,
        ):
            until(lambda: drafters_ready(url))
            offers = scraped(url)[NEW]
            while scraped(url)[NEW] == offers:  # the budget of losses may be closed for some passes
                assert asyncio.run(together(url)) == want

            asyncio.run(vanish(url))
            settled(url, target, again)


async def vanish(url, clients=200):
    """Streams of which half are closed by their clients in the middle."""
    asked = next(requests()) | {"stream": True, "max_tokens": 40}

    async def one(number):
        async with (
            httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None)) as http,
            http.stream("POST", url + COMPLETIONS, json=asked) as response,
        ):
            left = number % 7 if number % 2 else 10**6
            async for _ in response.aiter_lines():
                left -= 1
                if left <= 0:
                    return

    await asyncio.gather(*(one(number) for number in range(clients)))
