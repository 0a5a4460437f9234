"""Bodies of HTTP requests, through the whole application with an engine that needs no model.

An input is a body; its first byte chooses the route where the rest is JSON. Every answer must be a success or
an error of the client in the form of its path's API.
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

ROUTES = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/v1/messages")


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
    blocks: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "redacted_thinking", "data": "d"},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "1", "content": "e", "is_error": True}],
        },
    ]
    of_blocks = {
        "model": "tiny", "max_tokens": 3, "system": [{"type": "text", "text": "s"}], "messages": blocks,
        "tools": [{"name": "f", "input_schema": schema}], "tool_choice": {"type": "auto"}, "top_k": 3,
        "thinking": {"type": "enabled", "budget_tokens": 2}, "stop_sequences": ["x"], "temperature": 0.5,
        "output_config": {"effort": "low"}, "stream": True, "metadata": {"user_id": "u"},
    }  # fmt: skip
    answer = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    bodies = [
        {"route": 0, **common, "messages": talk, "logprobs": True, "top_logprobs": 2},
        {"route": 0, "model": "tiny", "messages": talk[:2], "response_format": answer, "max_tokens": 2},
        {"route": 1, **common, "prompt": ["a", "b"], "logprobs": 2, "best_of": 2},
        {"route": 1, "model": "tiny", "prompt": [[1, 2], [5]], "echo": True, "max_tokens": 1, "regex": "a+"},
        {"route": 2, "model": "tiny", "prompt": "hello"},
        {"route": 2, "model": "tiny", "messages": talk[:2]},
        {"route": 3, "model": "tiny", "tokens": [5, 6, 7]},
        {"route": 4, **of_blocks},
        {"route": 4, "model": "tiny", "max_tokens": 2, "system": "s", "messages": blocks[:1]},
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
            detail, more = json.loads(answer)["error"], set() if "messages" in route else {"param", "code"}
            assert detail["message"] and set(detail) == {"message", "type"} | more, detail
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
