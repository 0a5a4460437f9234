"""Connections that send half of something, nothing, or never read: they end, and others are answered."""

from __future__ import annotations

import logging
import resource
import socket
import threading
import time
from contextlib import contextmanager

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx")
import httpx

from attar.errors import AttarError
from attar.runtime.results import Event, Usage
from attar.serving.http import run as running_module
from attar.serving.http.app import create_app
from attar.serving.http.connection import RepeatFilter, ShortTracebacks, raise_file_limit
from attar.serving.http.run import run
from attar.serving.http.settings import ServerSettings
from tests.serving.http.fake import SLOW, FakeBackend, FakeTokenizer
from tests.serving.http.test_live import body, running, until

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HALF = b"GET /health HTTP/1.1\r\nHost: loc"


@contextmanager
def connections(url, count, sent=b""):
    """Some connections, each of which has sent something."""
    host, port = url.removeprefix("http://").split(":")
    opened = []
    try:
        for _ in range(count):
            opened.append(socket.create_connection((host, int(port)), timeout=60))
            opened[-1].sendall(sent)
        yield opened
    finally:
        for item in opened:
            item.close()


def ended(client):
    """All that a connection says until the server closes it."""
    message = b""
    try:
        while piece := client.recv(65536):
            message += piece
    except ConnectionResetError:
        pass
    return message


def until_body(client):
    """An answer of one line of JSON."""
    message = b""
    while not message.endswith(b"}"):
        message += client.recv(4096)
    return message


def trickle(client, piece=b"x"):
    """Send a byte every 20 ms until the server hangs up; seconds that took."""
    began = time.monotonic()
    with pytest.raises(OSError):
        while time.monotonic() - began < 60:
            client.sendall(piece)
            time.sleep(0.02)
    return time.monotonic() - began


@pytest.mark.few(2)
@pytest.mark.parametrize("sent", [b"", HALF, HEAD + b"Content-Length: 9\r\n\r\n{"])
def test_what_is_not_complete_in_time_is_closed(sent):
    with running(header_s=0.3, body_s=0.3) as (url, _, _), connections(url, 1, sent) as (client,):
        assert ended(client).startswith(b"HTTP/1.1 408 ")
        until(lambda: httpx.get(f"{url}/health").status_code == 200)  # a slow machine may take 0.3 s itself


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("sent", "options"),
    [
        (HALF, {}),
        (HEAD + b"Content-Length: 99999\r\n\r\n", {}),
        (HEAD + b"Content-Length: 99999\r\n\r\n", {"api_key": ("a-good-key",)}),  # answered before its end
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n5000\r\n", {}),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" + HALF, {}),  # the second of a connection
    ],
)
def test_a_trickle_does_not_keep_it_open(sent, options):
    with running(header_s=0.4, body_s=0.4, **options) as (url, _, _), connections(url, 1, sent) as (client,):
        assert trickle(client) < 30


@pytest.mark.parametrize("more", [b"", b"Content-Length: 5\r\n"])
def test_a_body_with_two_lengths_ends_its_connection(more):
    """Behind a proxy that reads the other one, its end could be a request of somebody else's."""
    asked = b"POST /detokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    asked += more + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    smuggled = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with running() as (url, _, _), connections(url, 1, asked + smuggled) as (client,):
        answers = ended(client)
    assert answers.startswith(b"HTTP/1.1 400 ") and answers.count(b"HTTP/1.1 ") == (1 if more else 2)


@pytest.mark.slow
def test_a_connection_that_idles_is_closed_and_one_that_asks_is_not():
    with running(header_s=0.2, idle_s=4) as (url, backend, _):
        with connections(url, 1, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n") as (client,):
            assert until_body(client).endswith(b'"ok"}')
            time.sleep(0.5)  # longer than headers may take
            client.sendall(b"GET /ready HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert until_body(client).endswith(b'"ready"}')
            assert ended(client) == b""
        with httpx.stream("POST", f"{url}/v1/completions", json=body([SLOW], stream=True)) as response:
            lines = response.iter_lines()
            next(lines)
            time.sleep(4.3)  # an answer that takes its time is no idle connection
            backend.loop.call_soon_threadsafe(backend.release.set)
            assert list(lines)[-2:] == ["data: [DONE]", ""]


def test_half_open_connections_are_closed_for_new_ones():
    with running(max_connections=10) as (url, _, server), connections(url, 40, HALF) as clients:
        for _ in range(5):
            assert httpx.get(f"{url}/health").status_code == 200
        until(lambda: len(server.connections.idle) <= 10)
        assert ended(clients[0]) == b"", "the oldest had to go"


def test_connections_with_requests_are_not_closed_for_new_ones():
    asked = ("POST", "/v1/completions")
    with (
        running(max_connections=2) as (url, backend, _),
        httpx.Client(base_url=url) as http,
        http.stream(*asked, json=body([SLOW], stream=True)) as one,
        http.stream(*asked, json=body([SLOW], stream=True)) as two,
    ):
        answers = [one.iter_lines(), two.iter_lines()]
        assert all(next(lines) for lines in answers)
        with connections(url, 1) as (client,):
            assert ended(client).startswith(b"HTTP/1.1 503 ")
        backend.loop.call_soon_threadsafe(backend.release.set)
        assert all(list(lines)[-2:] == ["data: [DONE]", ""] for lines in answers)


def test_an_address_has_its_share_alone():
    with running(max_connections=10, client_share=0.3) as (url, _, server), connections(url, 9, HALF):
        until(lambda: len(server.connections.idle) == 3)
        assert httpx.get(f"{url}/health").status_code == 200


class Loud(FakeBackend):
    """Answers with pieces of a megabyte."""

    async def _events(self, prompt, params, id):
        for _ in range(40):
            yield Event(id, 0, "x" * (1 << 20), (1,))
            await self.release.wait()
        yield Event(id, 0, "", (), (), "stop", usage=Usage(1, 40, 0, 0.0, 0.0, 0.0))


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_never_reads_is_given_up(stream):
    asked = httpx.Request("POST", "http://localhost", json=body([SLOW], stream=stream)).read()
    sent = HEAD + b"Content-Length: %d\r\n\r\n" % len(asked) + asked
    with running(Loud(), write_s=0.5) as (url, backend, server):
        backend.release.set()
        with connections(url, 1, sent):
            until(lambda: backend.asked)
            admission = server.config.app.state.service.admission
            until(lambda: admission.active == 0 and not backend.open)
            until(lambda: not server.server_state.connections)


def test_a_log_line_comes_seldom():
    noise = RepeatFilter()

    def line(text, error=None):
        return logging.LogRecord("a", 40, "", 1, text, (), error and (error, error(), None))

    assert noise.filter(line("socket.accept() out of system resource"))
    assert not any(noise.filter(line("socket.accept() out of system resource")) for _ in range(1000))
    access = logging.LogRecord("a", logging.INFO, "", 1, "a request", (), None)
    assert all(noise.filter(access) for _ in range(3))
    assert noise.filter(line("something else")) and noise.filter(line("something else", ValueError))
    assert not noise.filter(line("something else", ValueError))


def test_a_traceback_is_a_few_lines():
    def one(depth):
        return other(depth - 1)

    def other(depth):
        return one(depth) if depth else 1 / 0

    try:
        one(400)
    except ZeroDivisionError as error:
        record = logging.LogRecord(
            "a", 40, "", 1, "a request failed", (), (type(error), error, error.__traceback__)
        )
    lines = ShortTracebacks().format(record).splitlines()
    assert len(lines) == 42 and lines[0] == "a request failed" and lines[-1].startswith("ZeroDivisionError")
    assert any("lines ..." in line for line in lines)


def test_the_limit_of_files_is_raised_as_far_as_it_may():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
        assert raise_file_limit(400) == 400
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 528
        if hard != resource.RLIM_INFINITY:
            assert raise_file_limit(hard * 2) == hard - 128
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_dead_engine_ends_the_process(monkeypatch):
    """Running requests get an error, then ``run`` raises: the exit code is not 0."""
    monkeypatch.setattr(running_module, "_STOPPED_S", 60.0)
    backend, messages, raised = FakeBackend(), [], []
    settings = ServerSettings(port=0)
    app = create_app(backend, settings, tokenizer=FakeTokenizer(), model="tiny")

    def serve():
        with pytest.raises(AttarError, match="the engine has stopped: ValueError") as caught:
            run(app, settings, messages.append)
        raised.append(caught.value.exit_code)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    until(lambda: messages)
    with httpx.stream("POST", f"{messages[-1]}/v1/completions", json=body([SLOW], stream=True)) as response:
        lines = response.iter_lines()
        next(lines)
        backend.failure, backend.alive = ValueError("what nobody should read"), False
        assert httpx.get(f"{messages[-1]}/health").status_code == 503
        refused = httpx.post(f"{messages[-1]}/v1/completions", json=body())
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "engine_stopped"
        backend.loop.call_soon_threadsafe(backend.release.set)
        assert list(lines)
    monkeypatch.setattr(running_module, "_STOPPED_S", 0.0)
    thread.join(60)
    assert raised == [1] and backend.closed
