"""Bodies of HTTP requests, through the whole application with an engine that needs no model.

An input is a body; its first byte chooses the route where the rest is JSON. Every answer must be a success or
an error of the client in OpenAI's shape.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attar.serving.http.app import create_app
from attar.serving.http.settings import ServerSettings
from tests.serving.http.fake import FakeBackend, FakeTokenizer

ROUTES = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")


def seeds(folder: Path) -> list[bytes]:
    """Bodies that use every field."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    common = {
        "model": "tiny", "n": 2, "stream": True, "stream_options": {"include_usage": True},
        "temperature": 0.7, "top_p": 0.9, "presence_penalty": 0.1, "frequency_penalty": -0.1,
        "logit_bias": {"5": 1.5},
        "max_tokens": 3, "seed": 7, "stop": ["x", "yy"], "top_k": 5, "min_p": 0.1, "min_tokens": 1,
        "repetition_penalty": 1.1, "ignore_eos": False, "stop_token_ids": [3], "user": "u",
    }  # fmt: skip
    talk: list[dict[str, Any]] = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]},
        {"role": "tool", "content": "1", "tool_call_id": "1"},
    ]
    answer = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    bodies = [
        {"route": 0, **common, "messages": talk, "logprobs": True, "top_logprobs": 2},
        {"route": 0, "model": "tiny", "messages": talk[:2], "response_format": answer, "max_tokens": 2},
        {"route": 1, **common, "prompt": ["a", "b"], "logprobs": 2, "best_of": 2},
        {"route": 1, "model": "tiny", "prompt": [[1, 2], [5]], "echo": True, "max_tokens": 1, "regex": "a+"},
        {"route": 2, "model": "tiny", "prompt": "hello"},
        {"route": 2, "model": "tiny", "messages": talk[:2]},
        {"route": 3, "model": "tiny", "tokens": [5, 6, 7]},
    ]
    return [json.dumps(body).encode() for body in bodies]


class WillingBackend(FakeBackend):
    """Answers every prompt, also those that stand for trouble in the tests of the application."""

    async def submit(self, prompt: Any, params: Any, **options: Any) -> Any:
        """The events of the answer."""
        self.asked.clear()
        async for event in super().submit([ord("a"), *prompt[1:]], params, **options):
            yield event


def target(folder: Path) -> Callable[[bytes], bool]:
    """Sends the body to its route and checks the answer."""
    app = create_app(WillingBackend(), ServerSettings(), tokenizer=FakeTokenizer(), model="tiny")
    loop = asyncio.new_event_loop()

    def handle(data: bytes) -> bool:
        route, body = _routed(data)
        status, answer = loop.run_until_complete(asyncio.wait_for(_post(app, route, body), 10))
        assert status < 500, (status, answer[:300])
        if status >= 400:
            detail = json.loads(answer)["error"]
            assert detail["message"] and set(detail) == {"message", "type", "param", "code"}, detail
            assert "Traceback" not in detail["message"]
        return status < 400

    return handle


def _routed(data: bytes) -> tuple[str, bytes]:
    """The route that an input names, and the body without that name."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return ROUTES[len(data) % len(ROUTES)], data
    if not isinstance(document, dict):
        return ROUTES[len(data) % len(ROUTES)], data
    route = document.pop("route", 0)
    body = json.dumps(document, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return ROUTES[route % len(ROUTES) if isinstance(route, int) else 0], body


async def _post(app: Any, route: str, body: bytes) -> tuple[int, bytes]:
    """Status and content of the application's answer to a body."""
    sent: list[dict[str, Any]] = []
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    finished = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await finished.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": route, "raw_path": route.encode(), "query_string": b"", "root_path": "",
        "headers": [*headers, (b"content-length", str(len(body)).encode())],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8000), "state": {},
    }  # fmt: skip
    try:
        await app(scope, receive, send)
    finally:
        finished.set()
    status = next(message["status"] for message in sent if message["type"] == "http.response.start")
    return status, b"".join(message.get("body", b"") for message in sent if "body" in message)
