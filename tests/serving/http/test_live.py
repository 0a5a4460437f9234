"""The server behind a socket: the official client, clients that vanish, and the way down."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
import time
from contextlib import contextmanager

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx")
import httpx

from attar.errors import OutputError
from attar.serving.http import serve
from attar.serving.http.app import create_app
from attar.serving.http.run import Server, listen
from attar.serving.http.settings import ServerSettings
from tests.serving.http.fake import ANSWER, BUSY, SLOW, FakeBackend, FakeTokenizer


@contextmanager
def running_app(app, settings):
    """A server on a free port, in a thread: its address, and the server."""
    listening, server = listen(settings), Server(app, settings)
    thread = threading.Thread(target=asyncio.run, args=(server.serve([listening]),), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", server
    finally:
        server.should_exit = True
        thread.join(60)
        listening.close()
        assert not thread.is_alive()


@contextmanager
def running(backend=None, **settings):
    """With an engine that is none: the address, the backend, the server."""
    backend = backend or FakeBackend()
    result = ServerSettings(port=0, **settings)
    app = create_app(backend, result, tokenizer=FakeTokenizer(), model="tiny")
    with running_app(app, result) as (url, server):
        yield url, backend, server


def until(true, seconds=60.0):
    """Wait for something that happens soon; on a machine that is slow or busy, later."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def body(prompt="hi", **more):
    return {"model": "tiny", "prompt": prompt, **more}


def test_the_official_client():
    openai = pytest.importorskip("openai")
    with running(api_key=("secret-one",)) as (url, _, _):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="secret-one", max_retries=0)
        lines = [{"role": "user", "content": "hi"}]
        assert client.models.list().data[0].id == "tiny"
        answer = client.chat.completions.create(model="tiny", messages=lines, seed=1, stop=["\n"], n=2)
        assert [choice.message.content for choice in answer.choices] == [ANSWER] * 2
        assert answer.usage.total_tokens == 10 + 26
        scored = client.chat.completions.create(model="tiny", messages=lines, logprobs=True, top_logprobs=1)
        assert scored.choices[0].logprobs.content[0].top_logprobs[0].token == "H"
        stream = client.chat.completions.create(
            model="tiny", messages=lines, stream=True, stream_options={"include_usage": True}
        )
        parts = list(stream)
        assert "".join(part.choices[0].delta.content or "" for part in parts[:-1]) == ANSWER
        assert parts[-1].usage.completion_tokens == 13 and parts[-2].choices[0].finish_reason == "stop"
        text = client.completions.create(model="tiny", prompt="hi", max_tokens=3, logprobs=1)
        assert text.choices[0].text == "Hel" and text.choices[0].finish_reason == "length"
        assert text.choices[0].logprobs.top_logprobs[0] == {"H": -0.5}
        pieces = client.completions.create(model="tiny", prompt="hi", stream=True)
        assert "".join(piece.choices[0].text for piece in pieces) == ANSWER
        with pytest.raises(openai.NotFoundError) as caught:
            client.completions.create(model="other", prompt="hi")
        assert caught.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="tiny", prompt="hi", max_tokens=-1)
        assert caught.value.param == "max_tokens"
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model="tiny", prompt=[BUSY])
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0).models.list()


def test_clients_that_vanish_are_cancelled_and_the_others_go_on():
    with running() as (url, backend, server):
        admission = server.config.app.state.service.admission

        async def client(http, number):
            path = f"{url}/v1/completions"
            if number % 2:
                return (await http.post(path, json=body())).json()["choices"][0]["text"]
            asked = body([SLOW, number], stream=number % 4 == 0)
            if number % 4:  # in one piece: it gives up before anything came
                task = asyncio.create_task(http.post(path, json=asked))
                while not any(prompt == (SLOW, number) for prompt, _, _ in backend.asked):
                    await asyncio.sleep(0.01)
                task.cancel()
                return None
            async with http.stream("POST", path, json=asked) as response:
                assert response.status_code == 200
                return await anext(response.aiter_text()) and None

        async def all_of_them():
            async with httpx.AsyncClient(timeout=60) as http:
                return await asyncio.gather(*(client(http, number) for number in range(40)))

        got = asyncio.run(all_of_them())
        assert got == [None, ANSWER] * 20
        until(lambda: admission.active == 0 and not backend.open)
        assert len(backend.cancelled) == 20
        text = httpx.get(f"{url}/metrics").text
        assert 'finished_reason="cancelled",model_name="tiny"} 20.0' in text


def test_a_stream_that_waits_says_that_it_lives():
    with (
        running(alive_s=0.05) as (url, _, _),
        httpx.stream("POST", f"{url}/v1/completions", json=body([SLOW], stream=True)) as response,
    ):
        lines = response.iter_lines()
        assert next(line for line in lines if line).startswith("data: ")
        assert next(line for line in lines if line) == ": alive"


def test_sigterm_lets_running_requests_finish():
    with running(drain_s=60) as (url, backend, server):
        with httpx.stream("POST", f"{url}/v1/completions", json=body([SLOW], stream=True)) as response:
            lines = response.iter_lines()
            next(lines)
            server.handle_exit(signal.SIGTERM, None)
            assert server.config.app.state.service.admission.draining
            assert httpx.get(f"{url}/ready").status_code == 503
            refused = httpx.post(f"{url}/v1/completions", json=body())
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
            assert httpx.get(f"{url}/health").status_code == 200 and not backend.closed
            backend.loop.call_soon_threadsafe(backend.release.set)
            assert list(lines)[-2:] == ["data: [DONE]", ""]
        until(lambda: backend.closed)
        assert backend.open == {}


def test_a_second_sigterm_ends_at_once():
    with running(drain_s=60) as (url, backend, server):
        with httpx.stream("POST", f"{url}/v1/completions", json=body([SLOW], stream=True)) as response:
            lines = response.iter_lines()
            next(lines)
            server.handle_exit(signal.SIGTERM, None)
            assert httpx.get(f"{url}/ready").status_code == 503
            server.handle_exit(signal.SIGTERM, None)
            message, done = [line for line in lines if line.startswith("data: ")][-2:]
            assert '"shutting_down"' in message and done == "data: [DONE]"
        until(lambda: backend.closed)
        assert backend.open == {}


def test_sigterm_cancels_those_that_take_too_long():
    with running(drain_s=1) as (url, backend, server):
        with httpx.stream("POST", f"{url}/v1/completions", json=body([SLOW], stream=True)) as response:
            lines = response.iter_lines()
            next(lines)
            server.handle_exit(signal.SIGTERM, None)
            message, done = [line for line in lines if line.startswith("data: ")][-2:]
            assert '"shutting_down"' in message and done == "data: [DONE]"
        until(lambda: backend.closed)
        assert backend.open == {} and len(backend.cancelled) == 1


def test_a_port_that_is_taken_is_refused_before_the_model_is_loaded(monkeypatch):
    def load(*args, **options):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("attar.serving.http.roles.LLM", load)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        settings = ServerSettings(port=taken.getsockname()[1])
        with pytest.raises(OutputError, match="cannot listen on 127"):
            serve("attar:tiny", settings, show=lambda line: None)


def test_a_port_that_is_taken():
    first = listen(ServerSettings(port=0))
    with first, pytest.raises(OutputError, match="cannot listen"):
        listen(ServerSettings(port=first.getsockname()[1]))
