"""A chat endpoint that is slow, refuses, breaks off and dies as a script says, and counts its answers."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def content_of(prompt: str) -> str:
    """The answer to a prompt."""
    return f"Answer to {prompt!r}: " + " ".join(f"{word}-{len(word)}" for word in prompt.split())


class _ManyConnections(ThreadingHTTPServer):
    request_queue_size = 128  # connections that come at once
    daemon_threads = True


class ChatServer:
    """Context manager; ``url`` is the base of its API.

    Args:
        script: prompt and number of the try (from 0) to what happens: ``ok``, ``slow``, ``half``, ``die``,
            ``broken``, ``empty``, ``hang``, ``hold``, ``drip``, ``echo``, a status, or one with Retry-After
            in seconds (``429:1``) or as a date that far away (``503:date1``).

    Attributes:
        answered: whole answers sent, by prompt; a system prompt does not count.
        bodies: of all requests; ``times`` and ``keys`` go with them.
    """

    def __init__(
        self, script: Callable[[str, int], str] = lambda prompt, number: "ok", slow: float = 0.2
    ) -> None:
        self.script, self.slow = script, slow
        self.answered: Counter[str] = Counter()
        self.tries: defaultdict[str, int] = defaultdict(int)
        self.bodies: list[dict[str, Any]] = []
        self.times: list[float] = []
        self.keys: list[str | None] = []
        self.running = self.most_running = 0
        self.lock, self.released = threading.Lock(), threading.Event()

    def __enter__(self) -> ChatServer:
        handler = type("Handler", (_Handler,), {"server_state": self})
        self.http = _ManyConnections(("127.0.0.1", 0), handler)
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        return self

    def __exit__(self, *error: object) -> None:
        self.released.set()
        self.http.shutdown()
        self.http.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_state: ChatServer

    def do_POST(self) -> None:
        state = self.server_state
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        prompt = body["messages"][-1]["content"]
        with state.lock:
            state.bodies.append(body)
            state.times.append(time.monotonic())
            state.keys.append(self.headers.get("authorization"))
            number = state.tries[prompt]
            state.tries[prompt] += 1
            state.running += 1
            state.most_running = max(state.most_running, state.running)
        try:
            self.act(state.script(prompt, number), body, prompt)
        finally:
            with state.lock:
                state.running -= 1

    def act(self, what: str, body: dict[str, Any], prompt: str) -> None:
        state = self.server_state
        answer = completion(body, prompt)
        if what == "slow":
            time.sleep(state.slow)
        if what in ("ok", "slow"):
            with state.lock:
                state.answered[prompt] += 1
            self.reply(200, answer)
        elif what == "half":
            data = json.dumps(answer).encode()
            self.head(200, len(data))
            self.wfile.write(data[: len(data) // 2])
            self.close_connection = True
        elif what == "broken":
            self.reply(200, None, json.dumps(answer).encode()[:-20])
        elif what == "empty":
            self.reply(200, {**answer, "choices": []})
        elif what == "die":
            self.close_connection = True
        elif what == "drip":
            data = json.dumps(answer).encode()
            self.head(200, len(data))
            for byte in data[:-1]:
                if state.released.wait(0.05):
                    break
                self.wfile.write(bytes([byte]))
                self.wfile.flush()
            self.close_connection = True
        elif what in ("hang", "hold"):
            state.released.wait(30 if what == "hold" else 2)
            self.close_connection = True
        elif what == "echo":
            self.reply(200, completion(body, f"{self.headers.get('authorization')}"))
        else:
            status, _, after = what.partition(":")
            headers = {"retry-after": after} if after else {}
            if after.startswith("date"):
                headers = {"retry-after": formatdate(time.time() + float(after[4:]) + 1, usegmt=True)}
            message = f"status {status}, you sent {self.headers.get('authorization')}"
            self.reply(int(status), {"error": {"message": message, "code": None}}, headers=headers)

    def reply(
        self, status: int, content: Any, data: bytes | None = None, headers: dict[str, str] | None = None
    ) -> None:
        data = json.dumps(content).encode() if data is None else data
        self.head(status, len(data), headers)
        self.wfile.write(data)

    def head(self, status: int, length: int, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(length))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


def completion(body: dict[str, Any], prompt: str) -> dict[str, Any]:
    """The answer to a request, as OpenAI's API has it; its seed and sample change nothing."""
    text = content_of(prompt)
    used = {"prompt_tokens": len(prompt.split()) + 4, "completion_tokens": len(text.split())}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1_700_000_000 + len(prompt),
        "model": body["model"],
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
        "usage": {**used, "total_tokens": sum(used.values())},
    }
