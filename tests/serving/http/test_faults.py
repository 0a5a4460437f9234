"""What goes wrong, with a real model behind a real socket: the right status, no leak, the server lives."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import time
from collections import Counter

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx")
import httpx

from attar.runtime.admission import Limits
from attar.runtime.results import Event
from attar.serving.http.request_handler import MAX_EVENTS, EventQueue
from tests.serving.http.real import (
    CHAT,
    COMPLETIONS,
    body,
    holding,
    load_tiny,
    refused,
    scraped,
    serving,
    settled,
)


@pytest.fixture(scope="module")
def server():
    """One that many tests share; each must leave it as it was."""
    with serving(model=load_tiny()) as (url, _, _):
        yield url


@pytest.mark.parametrize("clients", [24, pytest.param(200, marks=pytest.mark.slow)])
def test_half_of_the_clients_vanish_and_the_others_are_answered(server, clients):
    """Every second one leaves: half of them in the middle of a stream, half before anything came."""
    before = settled(server)
    texts = asyncio.run(_crowd(server, clients))
    kept = texts[1::2]
    assert len(kept) == clients // 2 and all(len(text) > 12 for text in kept), kept
    assert len(set(kept)) == 1, "who else is there must not matter"
    after = settled(server)
    gone = 'request_success_total{finished_reason="cancelled"}'
    assert after[gone] - before.get(gone, 0) == clients // 2


def _arrived(url):
    """Requests that wait, run or have ended."""
    seen = scraped(url)
    ended = (value for name, value in seen.items() if name.startswith("request_success_total"))
    return seen["num_requests_waiting"] + seen["num_requests_running"] + sum(ended)


async def _crowd(url, clients):
    everyone, inside = _arrived(url) + clients, asyncio.Event()

    async def one(http, number):
        asked = body(max_tokens=24 if number % 2 else 500, stream=number % 4 != 2)
        if number % 2:
            async with http.stream("POST", url + COMPLETIONS, json=asked) as response:
                assert response.status_code == 200
                lines = [line[6:] async for line in response.aiter_lines() if line.startswith("data: {")]
            return "".join(json.loads(line)["choices"][0]["text"] for line in lines)
        if number % 4 == 2:
            task = asyncio.create_task(http.post(url + COMPLETIONS, json=asked))
            await inside.wait()
            assert task.cancel(), "it was answered before it could leave"
            return ""
        async with http.stream("POST", url + COMPLETIONS, json=asked) as response:
            return await anext(response.aiter_text()) and ""

    async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=None)) as http:
        tasks = [asyncio.create_task(one(http, number)) for number in range(clients)]
        while await asyncio.to_thread(_arrived, url) < everyone:
            await asyncio.sleep(0.02)
        inside.set()
        return await asyncio.gather(*tasks)


WRONG = {
    "a prompt longer than the context": (body([5] * 3000), 400, "context_length_exceeded", "prompt"),
    "tokens that are none": (body([10**6]), 400, "invalid_value", "prompt"),
    "an unknown model": (body() | {"model": "gpt-9"}, 404, "model_not_found", "model"),
    "negative max_tokens": (body(max_tokens=-5), 400, "invalid_value", "max_tokens"),
    "an endless stop list": (body(stop=["x"] * 10_000), 400, None, None),
    "a stop string as long as a book": (body(stop="x" * 100_000), 400, None, None),
    "too many texts": (body(n=17), 400, None, "n"),
    "more tokens than there is room for": (body(max_tokens=10**9, prompt=[5]), 200, None, None),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("what", WRONG)
def test_wrong_requests(server, what):
    asked, status, code, param = WRONG[what]
    if status == 200:
        asked = asked | {"stop": ["e"]}
        assert httpx.post(server + COMPLETIONS, json=asked, timeout=60).status_code == 200
    else:
        for stream in (False, True):
            refused(httpx.post(server + COMPLETIONS, json=asked | {"stream": stream}), status, code, param)
    settled(server)


def test_the_error_for_a_long_prompt_has_both_lengths(server):
    fields = refused(httpx.post(server + COMPLETIONS, json=body([5] * 3000)), 400)["message"]
    assert "3,000" in fields and "2,048" in fields
    talk = {"model": "tiny", "messages": [{"role": "user", "content": "x = 1\n" * 3000}]}
    fields = refused(httpx.post(server + CHAT, json=talk), 400)["message"]
    assert "context" in fields and "2,048" in fields


@pytest.mark.parametrize("content", [b"{", b"\xff", b"null", b'{"model": "tiny", "prompt": NaN}'])
def test_no_json(server, content):
    refused(httpx.post(server + COMPLETIONS, content=content), 400)
    refused(httpx.post(server + CHAT, content=content), 400)
    form = httpx.post(server + COMPLETIONS, data={"model": "tiny"})  # what curl -d sends without a header
    assert "application/json" in refused(form, 400)["message"]


@pytest.mark.few(1)
@pytest.mark.parametrize("declared", [True, False])
def test_a_body_of_50_mb(server, declared):
    content = b'{"model": "tiny", "prompt": "' + b"x" * 50_000_000 + b'"}'
    pieces = content if declared else (content[at : at + 65536] for at in range(0, len(content), 65536))
    response = httpx.post(server + COMPLETIONS, content=pieces, timeout=60)
    refused(response, 413, "body_too_large")
    assert httpx.get(f"{server}/health").status_code == 200


@pytest.mark.parametrize("declared", [True, False])
def test_a_client_that_sends_all_before_it_reads_sees_the_answer(server, declared):
    """Its connection must not be cut off while it sends."""
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += "Content-Length: 50000000\r\n\r\n" if declared else "Transfer-Encoding: chunked\r\n\r\n"
    piece = b"x" * 500_000 if declared else b"7a120\r\n" + b"x" * 500_000 + b"\r\n"
    host, port = server.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as client:
        client.sendall(head.encode())
        for _ in range(100):
            client.sendall(piece)
        client.sendall(b"" if declared else b"0\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 413 ")


def test_a_body_of_50_mb_that_never_comes(server):
    """A client that asks first (curl does) is answered before it sends anything."""
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    head += "Content-Length: 50000000\r\nExpect: 100-continue\r\n\r\n"
    host, port = server.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as client:
        client.sendall(head.encode())
        assert client.recv(100).startswith(b"HTTP/1.1 413 ")


def test_a_wrong_key():
    with serving(api_key=("a-good-key",)) as (url, _, _):
        for headers in ({}, {"Authorization": "Bearer a-bad-key"}, {"Authorization": "Basic a-good-key"}):
            for path in (COMPLETIONS, CHAT):
                refused(httpx.post(url + path, json=body(), headers=headers), 401, "invalid_api_key")
            assert httpx.get(f"{url}/metrics", headers=headers).status_code == 401
        good = {"Authorization": "Bearer a-good-key"}
        assert httpx.post(url + COMPLETIONS, json=body(max_tokens=1), headers=good).status_code == 200


def test_a_full_queue():
    """One runs and two wait, also in a burst that comes before the engine's first step."""
    with serving(Limits(sequences=1), max_queue=2) as (url, engine, _):
        go = holding(engine)
        go.clear()

        async def crowd():
            async with httpx.AsyncClient(timeout=60) as http:
                asked = body(max_tokens=60)
                tasks = [asyncio.create_task(http.post(url + COMPLETIONS, json=asked)) for _ in range(12)]
                while sum(task.done() for task in tasks) < 9:
                    await asyncio.sleep(0.01)
                go.set()
                return await asyncio.gather(*tasks)

        answers = asyncio.run(crowd())
        assert Counter(answer.status_code for answer in answers) == {200: 3, 429: 9}
        for answer in answers:
            if answer.status_code == 429:
                refused(answer, 429, "queue_full")
                assert 1 <= int(answer.headers["retry-after"]) <= 60
        seen = settled(url)
        assert seen['request_refused_total{status="429"}'] + seen["e2e_request_latency_seconds_count"] == 12


def test_a_step_that_fails_ends_its_requests_alone():
    """Two run at a time, and the third step breaks, also where it is run again for each: two are answered
    with 500, all others as ever."""

    def broken(engine):
        steps, run = [0], engine.runner.run

        def fails(step):
            steps[0] += 1
            if 3 <= steps[0] <= 5:
                raise RuntimeError("a secret of the machine")
            return run(step)

        engine.runner = _Wrapped(engine.runner, fails)

    with serving(Limits(sequences=2), before=broken) as (url, _, _):

        async def crowd():
            async with httpx.AsyncClient(timeout=60) as http:
                asked = (body(max_tokens=12, stream=number == 1) for number in range(6))
                return await asyncio.gather(*(http.post(url + COMPLETIONS, json=item) for item in asked))

        answers = asyncio.run(crowd())
        failed = [answer for answer in answers if answer.status_code == 500 or '"error"' in answer.text]
        assert len(failed) == 2 and "secret" not in "".join(answer.text for answer in answers)
        for answer in failed:
            if answer.status_code == 500:
                assert refused(answer, 500)["type"] == "server_error"
        assert all(answer.status_code == 200 for answer in answers if answer not in failed)
        seen = settled(url)
        assert seen['request_success_total{finished_reason="error"}'] == 2
        assert seen['request_success_total{finished_reason="length"}'] == 4
        assert httpx.post(url + COMPLETIONS, json=body(max_tokens=3)).status_code == 200


class _Wrapped:
    """A runner whose steps go through something else first."""

    def __init__(self, runner, run):
        self._runner, self.run = runner, run

    def __getattr__(self, name):
        return getattr(self._runner, name)


@pytest.mark.slow
def test_a_client_that_does_not_read_delays_no_other(server):
    """Its answer waits in a queue; meanwhile others are served, and in the end it gets all of it."""
    asked = json.dumps(body(max_tokens=600, stream=True, logprobs=20)).encode()
    host, port = server.removeprefix("http://").split(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((host, int(port)))
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(asked)}\r\n\r\n"
    with client:
        client.sendall(head.encode() + asked)
        assert httpx.post(server + COMPLETIONS, json=body(max_tokens=8)).status_code == 200
        settled(server)  # the engine has finished it, read or not
        client.settimeout(60)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        got = b""
        while not got.endswith(b"0\r\n\r\n"):
            piece = client.recv(1 << 20)
            assert piece, "the server hung up"
            got += piece
    text = got.decode()
    assert "data: [DONE]" in text and '"finish_reason":"length"' in text
    assert text.count("data: {") < 600, "what waited was not joined"


def test_a_queue_stays_small_and_loses_nothing():
    queue = EventQueue()
    for number in range(1000):
        queue.put(number % 2, Event("r", number % 2, f"{number},", (number,)))
    assert len(queue) <= 2 * MAX_EVENTS
    queue.fail(ValueError("later"))
    queue.put(0, Event("r", 0, "too late"))
    news = asyncio.run(queue.get())
    assert [choice for choice, _ in news] == [0, 1]
    for choice, event in news:
        assert event.token_ids == tuple(range(choice, 1000, 2))
        assert event.text == "".join(f"{number}," for number in range(choice, 1000, 2))
    with pytest.raises(ValueError, match="later"):
        asyncio.run(queue.get())


def _leak(engine):
    """A block that no sequence gives back, as a bug would leave it."""
    engine.scheduler.manager.admit(10**6, [5, 6])
    assert engine.scheduler.manager.reserve(10**6, 2)


def _ill(url):
    """The first answer of /health that is not 200."""
    end = time.monotonic() + 60
    while (response := httpx.get(f"{url}/health")).status_code == 200:
        assert time.monotonic() < end, "the leak was not seen"
        time.sleep(0.02)
    return response


def test_a_leak_is_an_error_in_health():
    with serving() as (url, engine, _):
        assert httpx.post(url + COMPLETIONS, json=body(max_tokens=3)).status_code == 200
        _leak(engine)
        httpx.post(url + COMPLETIONS, json=body(max_tokens=3))
        response = _ill(url)  # an idle engine is checked behind its last answer
        assert response.status_code == 503 and response.json()["status"] == "stopped"
        assert "1000000" in response.json()["reason"]
        refused(httpx.post(url + COMPLETIONS, json=body()), 503, "engine_stopped")
        assert httpx.get(f"{url}/ready").status_code == 503


def test_a_leak_of_a_cancelled_request_is_found_too():
    with serving() as (url, engine, _):
        _leak(engine)  # nothing is checked before the engine is idle again
        with httpx.stream("POST", url + COMPLETIONS, json=body(max_tokens=1500, stream=True)) as response:
            next(response.iter_lines())
        _ill(url)


def test_sigterm_under_load_lets_those_inside_finish():
    with serving(Limits(sequences=4), drain_s=60) as (url, engine, server):
        go = holding(engine)

        async def crowd():
            async with httpx.AsyncClient(timeout=60) as http:
                asked = body(max_tokens=60, stream=True)
                inside = [asyncio.create_task(http.post(url + COMPLETIONS, json=asked)) for _ in range(12)]
                while scraped(url).get("time_to_first_token_seconds_count", 0) < 4:
                    await asyncio.sleep(0.02)
                go.clear()
                server.handle_exit(signal.SIGTERM, None)
                late = await http.post(url + COMPLETIONS, json=asked)
                go.set()
                return await asyncio.gather(*inside), late

        inside, late = asyncio.run(crowd())
        refused(late, 503, "shutting_down")
        assert int(late.headers["retry-after"]) >= 1
        assert all("[DONE]" in item.text and '"length"' in item.text for item in inside)
