"""A server with attar:tiny behind a socket, and what its metrics say."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from contextlib import contextmanager
from copy import deepcopy
from functools import cache

import httpx

from attar.runtime.admission import Limits
from attar.runtime.llm import LLM
from attar.runtime.loading import load
from attar.serving.http.app import create_app
from attar.serving.http.backend import EngineBackend
from attar.serving.http.settings import ServerSettings
from attar.serving.http.tokenizer import ServerTokenizer
from tests.serving.http.test_live import running_app

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEMPLATE = "{% for each in messages %}# {{ each.role }}: {{ each.content }}\n{% endfor %}"  # tiny has none


def load_tiny():
    """The model, with room for 4,096 tokens."""
    return load("attar:tiny", kv_tokens=4096)


lent = cache(load_tiny)


@contextmanager
def serving(
    limits=None, before=None, model=None, speculator=None, template=TEMPLATE, answers=None, **settings
):
    """A server with an engine of its own: its address, the engine (to look at), the server.

    Args:
        model: its own; None: one that all use, one after the other, for it has one pool.
        before: is given the engine before its thread starts.
        speculator: drafts for it.
        template: for conversations; None: as the model is loaded.
        answers: how conversations become prompts.
    """
    llm = LLM.of(model or lent(), limits=limits or Limits(sequences=16), speculator=speculator)
    if before is not None:
        before(llm.engine)
    result = ServerSettings(port=0, **settings)
    tokenizer = deepcopy(llm.tokenizer)
    tokenizer.chat_template = template or tokenizer.chat_template
    words = ServerTokenizer(tokenizer)
    app = create_app(EngineBackend(llm.streams()), result, tokenizer=words, model="tiny", answers=answers)
    with running_app(app, result) as (url, server):
        yield url, llm.engine, server


def holding(engine):
    """An event without which the engine takes no step; it is set."""
    step, go = engine.step, threading.Event()
    go.set()

    def held():
        go.wait(60)
        return step()

    engine.step = held
    return go


@contextmanager
def leaving(url, body, path=COMPLETIONS, **headers):
    """A client that sends a request, and closes its connection at the end."""
    host, _, port = url.removeprefix("http://").partition(":")
    raw = json.dumps(body)
    lines = [f"POST {path} HTTP/1.1", f"Host: {host}", "Content-Type: application/json"]
    lines += [f"Content-Length: {len(raw)}", *(f"{name}: {value}" for name, value in headers.items())]
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall("\r\n".join([*lines, "", raw]).encode())
        yield


def scraped(url):
    """Name with labels, but without the model's, to value."""
    actual = {}
    for line in httpx.get(f"{url}/metrics").text.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            name = re.sub(r',?model_name="[^"]*"', "", name).replace("{,", "{").replace("{}", "")
            actual[name.removeprefix("attar:")] = float(value)
    return actual


def settled(url, seconds=60.0):
    """The metrics once nothing runs and nothing waits; every block must have come back."""
    end = time.monotonic() + seconds
    while True:
        seen = scraped(url)
        if not seen["num_requests_running"] and not seen["num_requests_waiting"]:
            break
        assert time.monotonic() < end, seen
        time.sleep(0.02)
    assert seen['kv_cache_blocks{state="used"}'] == 0 and seen["kv_cache_usage_perc"] == 0
    assert seen['kv_cache_blocks{state="free"}'] + seen['kv_cache_blocks{state="cached"}'] == 256
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}
    return seen


def refused(response, status, code=None, param=None):
    """The error, which must be OpenAI's."""
    assert response.status_code == status, (response.status_code, response.text[:500])
    detail = response.json()["error"]
    assert set(detail) == {"message", "type", "param", "code"} and detail["message"]
    assert (code is None or detail["code"] == code) and (param is None or detail["param"] == param), detail
    return detail


def body(prompt="def f(x):", **more):
    return {"model": "tiny", "prompt": prompt, "temperature": 0, "ignore_eos": True, **more}
