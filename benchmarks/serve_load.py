"""A load for a server with OpenAI's API, and what its clients saw.

Requests come as a Poisson process. A prompt is one of a few shared prefixes and an own tail; lengths, tokens
and times are drawn from the seed. A client is a bare socket: it must not use the cores that are measured.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Ask:
    """One request.

    Attributes:
        at: seconds after the beginning.
        prompt: token ids.
        tokens: to generate; the end token does not end it.
    """

    at: float
    prompt: list[int]
    tokens: int


@dataclass
class Seen:
    """What its client saw, in seconds after the request was sent.

    Attributes:
        chunks: when each piece of text came.
        end: when the answer was complete.
        prompt, tokens: counted by the server.
        failed: what came instead.
    """

    chunks: list[float] = field(default_factory=list)
    end: float = 0.0
    prompt: int = 0
    tokens: int = 0
    failed: str = ""

    @property
    def between(self) -> float:
        """Mean seconds between two tokens."""
        return (self.chunks[-1] - self.chunks[0]) / max(self.tokens - 1, 1)

    @property
    def silence(self) -> float:
        """The most seconds between two pieces."""
        return max((b - a for a, b in zip(self.chunks, self.chunks[1:], strict=False)), default=0.0)


def make_load(seed: int, count: int, rate: float, prefixes: int, prefix: int, vocabulary: int) -> list[Ask]:
    """Requests of mixed lengths.

    Args:
        count: requests.
        rate: of them in a second; 0: all at once.
        prefixes: different ones, of ``prefix`` tokens each.
        vocabulary: tokens are drawn from [10, vocabulary).
    """
    draw = random.Random(seed)
    shared = [[draw.randrange(10, vocabulary) for _ in range(prefix)] for _ in range(prefixes)]
    asks, at = [], 0.0
    for _ in range(count):
        tail = [draw.randrange(10, vocabulary) for _ in range(draw.choice((8, 24, 48, 96, 192)))]
        asks.append(Ask(at, draw.choice(shared) + tail, draw.choice((16, 32, 64, 96, 128))))
        at += draw.expovariate(rate) if rate else 0.0
    return asks


async def play(port: int, asks: list[Ask]) -> tuple[list[Seen], float]:
    """Send the requests at their times; what each client saw, and seconds until the last was answered."""
    began = time.perf_counter()

    async def one(ask: Ask) -> Seen:
        await asyncio.sleep(max(0.0, began + ask.at - time.perf_counter()))
        return await _client(port, ask)

    seen = await asyncio.gather(*map(one, asks))
    return list(seen), time.perf_counter() - began


async def _client(port: int, ask: Ask) -> Seen:
    body = {
        "model": "model",
        "prompt": ask.prompt,
        "max_tokens": ask.tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    content = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        "Content-Type: application/json\r\n"
    )
    seen, began = Seen(), time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    status = await reader.readline()
    if b" 200 " not in status:
        seen.failed = (status + await reader.read()).decode(errors="replace")[:300]
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            _read(line, time.perf_counter() - began, seen)
    seen.end = time.perf_counter() - began
    writer.close()
    if not seen.failed and (seen.tokens != ask.tokens or not seen.chunks):
        seen.failed = f"{seen.tokens} tokens in {len(seen.chunks)} chunks, {ask.tokens} were asked for"
    return seen


def _read(line: bytes, now: float, seen: Seen) -> None:
    """A chunk: only the last ones are looked into."""
    if b'"error"' in line[:20]:
        seen.failed = line.decode(errors="replace")[:300]
    elif b'"usage":{' in line:
        usage = json.loads(line[6:])["usage"]
        seen.prompt, seen.tokens = usage["prompt_tokens"], usage["completion_tokens"]
        if b'"choices":[]' in line:
            return
        seen.chunks.append(now)
    else:
        seen.chunks.append(now)
