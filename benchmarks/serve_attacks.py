"""What attacks on the server do to everybody else: the longest wait for /health, and between two tokens.

    python benchmarks/serve_attacks.py [MODEL] [--seconds 5] [--only NAME ...] [--url http://...]

Starts ``attar serve MODEL``, and for each attack asks for /health twenty times a second and reads a stream
with log-probabilities, while another process attacks for some seconds. The first row is without an attack:

    kept       /health on a connection that is kept open: the longest time to its answer, milliseconds, and
               the 99th percentile. It is what the server itself takes
    fresh      the same on a new connection each time: with the wait to be accepted, and the second after
               which a client's kernel asks again where the queue of connections was full
    load       of the machine, in the minute before the row's end
    gap        the longest time between two pieces of the stream, milliseconds
    bound      whether /health was answered within 0.2 s on the connection that is kept open
    answers    what the attack was answered, by status; 0: the connection was closed without an answer
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HEALTH_S = 0.2
HALF = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


AMBIGUOUS = 'start: e\ne: e e e e | "a" | "b" | "\\n"'
ENDLESS = {"max_tokens": 200, "ignore_eos": True}


def completion(**more: object) -> bytes:
    return json.dumps({"model": "m", "prompt": "def f(x):", "max_tokens": 4, **more}).encode()


def chat(content: object, **more: object) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": content}], **more}).encode()


def nested(levels: int) -> object:
    value: object = "x"
    for _ in range(levels):
        value = {"a": value}
    return value


def schema(levels: int) -> dict[str, object]:
    schema: dict[str, object] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return {"type": "json_schema", "json_schema": {"name": "deep", "schema": schema}}


def chat_schema(schema: dict[str, object]) -> bytes:
    """A completion under a JSON schema."""
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    return completion(response_format=form)


BODIES: dict[str, list[tuple[str, Callable[[], bytes]]]] = {
    "big prompt": [(COMPLETIONS, lambda: completion(prompt="x = 1\n" * 300_000))],
    "prompt of 1 MiB": [(COMPLETIONS, lambda: completion(prompt="x = 1\n" * 145_000))],
    "prompt of 90 kB": [(COMPLETIONS, lambda: completion(prompt="x = 1\n" * 13_000))],
    "parts, 3.9 MB, wrong model": [
        (CHAT, lambda: chat([{"type": "text", "text": "a"}] * 130_000, model="x"))
    ],
    "parts, 1 MiB": [(CHAT, lambda: chat([{"type": "text", "text": "a"}] * 34_000, model="x"))],
    "messages, 1 MiB": [(CHAT, lambda: b'{"model":"x","messages":[' + b'{"role":"user"},' * 65_000 + b"1]}")],
    "8,000 wrong values": [(CHAT, lambda: chat([{}] * 8_000, model="x"))],
    "1.3 M ids": [(COMPLETIONS, lambda: completion(prompt=[5] * 1_300_000))],
    "300k ids": [(COMPLETIONS, lambda: completion(prompt=[5] * 300_000))],
    "300k logit_bias": [(COMPLETIONS, lambda: completion(logit_bias={str(t): 1 for t in range(300_000)}))],
    "80k logit_bias": [(COMPLETIONS, lambda: completion(logit_bias={str(t): 1 for t in range(80_000)}))],
    "deep schema": [(CHAT, lambda: chat("a", response_format=schema(900)))],
    "deep template variables": [(CHAT, lambda: chat("a", chat_template_kwargs={"x": nested(900)}))],
    "deep JSON": [(COMPLETIONS, lambda: b"[" * 1_000_000)],
    "/tokenize, 1 MB": [("/tokenize", lambda: json.dumps({"prompt": "x = 1\n" * 145_000}).encode())],
    "regex bombs": [
        (COMPLETIONS, lambda: completion(regex=r"(.{1,5000}){1,5000}x")),
        (COMPLETIONS, lambda: completion(regex="(a|b|ab)*" * 50 + "c", max_tokens=50)),
        (COMPLETIONS, lambda: completion(grammar="start: start")),
    ],
    "grammars that compile for long": [
        (COMPLETIONS, lambda: completion(grammar="start: T\nT: /.*a.{15}/ & /.*b.{14}/ & ~/.*c.{13}.*/")),
        (COMPLETIONS, lambda: chat_schema({"type": "integer", "multipleOf": 1_000_003})),
    ],
    "ambiguous grammar, n=16": [(COMPLETIONS, lambda: completion(grammar=AMBIGUOUS, n=16, **ENDLESS))],
    "ambiguous grammar, n=63": [(COMPLETIONS, lambda: completion(grammar=AMBIGUOUS, n=63, **ENDLESS))],
    "temperature 1e-300": [(COMPLETIONS, lambda: completion(temperature=1e-300))],
    "64 prompts times 64": [(COMPLETIONS, lambda: completion(prompt=["a"] * 64, n=64))],
}


def attack_with_bodies(name: str, url: str, seconds: float) -> Counter[int]:
    """Post the attack's bodies one after the other."""
    bodies, statuses = [(path, build()) for path, build in BODIES[name]], Counter[int]()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for path, content in bodies:
            connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
            try:
                connection.request("POST", path, content, {"Content-Type": "application/json"})
                statuses[connection.getresponse().status] += 1
            except OSError:
                statuses[0] += 1
            finally:
                connection.close()
    return statuses


def silent(url: str, seconds: float) -> Counter[int]:
    """Open 1,500 connections that say nothing; with TLS, none gets through its handshake."""
    return _hold(url, seconds, b"", 1500)


def half_open(url: str, seconds: float) -> Counter[int]:
    """Open 1,500 connections with half a header, again and again."""
    return _hold(url, seconds, HALF, 1500)


def slow_bodies(url: str, seconds: float) -> Counter[int]:
    """Open 1,500 connections that announce a body and send a byte of it."""
    return _hold(url, seconds, HALF + b"Content-Length: 100000\r\n\r\n{", 1500)


def _hold(url: str, seconds: float, sent: bytes, count: int) -> Counter[int]:
    opened: list[socket.socket] = []
    end, failed = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        try:
            opened.append(socket.create_connection(address(url), timeout=2))
            opened[-1].sendall(sent)
        except OSError:
            failed += 1
        if len(opened) > count:
            opened.pop(0).close()
    statuses = Counter[int]({0: failed}) if failed else Counter[int]()
    for client in opened:
        client.setblocking(False)
        with suppress(OSError):
            if status := re.match(rb"HTTP/1.1 (\d+)", client.recv(100)):
                statuses[int(status[1])] += 1
        client.close()
    return statuses


def header_flood(url: str, seconds: float) -> Counter[int]:
    """Send headers without an end."""
    end, statuses = time.monotonic() + seconds, Counter[int]()
    while time.monotonic() < end:
        with socket.create_connection(address(url), timeout=5) as client:
            with suppress(OSError):
                client.sendall(HALF)
                while time.monotonic() < end:
                    client.sendall(b"".join(b"X-%d: %b\r\n" % (number, b"a" * 90) for number in range(1000)))
            with suppress(OSError):
                status = re.match(rb"HTTP/1.1 (\d+)", client.recv(100))
                statuses[int(status[1]) if status else 0] += 1
    return statuses


def vanishing(url: str, seconds: float) -> Counter[int]:
    """200 clients at a time ask for a stream and hang up after its first bytes."""
    end, statuses = time.monotonic() + seconds, Counter[int]()
    asked = completion(stream=True, max_tokens=200, logprobs=5)
    sent = HALF + b"Content-Length: %d\r\n\r\n" % len(asked) + asked
    while time.monotonic() < end:
        clients = [socket.create_connection(address(url), timeout=5) for _ in range(200)]
        for client in clients:
            client.sendall(sent)
        for client in clients:
            with suppress(OSError):
                status = re.match(rb"HTTP/1.1 (\d+)", client.recv(300))
                statuses[int(status[1]) if status else 0] += 1
            client.close()
    return statuses


CONNECTIONS = {
    "silent connections": silent,
    "half-open connections": half_open,
    "slow bodies": slow_bodies,
    "header floods": header_flood,
    "200 clients vanishing": vanishing,
}


def address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return str(parts.hostname), int(parts.port or 80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?", default="attar:tiny")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each attack")
    parser.add_argument("--only", nargs="+", default=["", *BODIES, *CONNECTIONS], help="names of attacks")
    parser.add_argument("--url", help="of a server that runs already, called m")
    parser.add_argument("--attack", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.attack:
        one = CONNECTIONS.get(arguments.attack)
        seconds = arguments.seconds
        counted = (
            one(arguments.url, seconds)
            if one
            else attack_with_bodies(arguments.attack, arguments.url, seconds)
        )
        print(json.dumps(counted))
        return
    with serving(arguments.model, arguments.url) as url:
        print(
            f"{arguments.model}, {arguments.seconds:g} s each\n"
            f"{'':28}  kept   99 %  fresh   99 %    gap  load  0.2 s  answers"
        )
        with watched(url):  # the first answers take longer
            time.sleep(2)
        for name in arguments.only:
            row(name, url, arguments.seconds)


def row(name: str, url: str, seconds: float) -> None:
    """Attack, and print what it did."""
    with watched(url) as (kept, fresh, gaps):
        if name:
            command = [sys.executable, __file__, "--attack", name, "--url", url, "--seconds", str(seconds)]
            answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        else:
            time.sleep(seconds)
            answer = "{}"
    answers = ", ".join(f"{status}: {count:,}" for status, count in sorted(json.loads(answer).items()))
    times = "".join(f" {1e3 * max(waits):6,.0f} {1e3 * p99(waits):6,.0f}" for waits in (kept, fresh))
    load, bound = os.getloadavg()[0], "kept" if max(kept) <= HEALTH_S else "over"
    gap = 1e3 * max(gaps, default=0)
    print(f"{name or 'none':27} {times} {gap:6,.0f} {load:5.1f}  {bound:>5}  {answers}", flush=True)


def p99(waits: list[float]) -> float:
    """Their 99th percentile."""
    return sorted(waits)[int(0.99 * (len(waits) - 1))]


@contextmanager
def watched(url: str) -> Iterator[tuple[list[float], list[float], list[float]]]:
    """Times of /health on an open and on new connections, and of a stream, until the block ends."""
    over = threading.Event()
    kept: list[float] = []
    fresh: list[float] = []
    gaps: list[float] = []
    threads = [
        threading.Thread(target=probe, args=(url, over, kept, True)),
        threading.Thread(target=probe, args=(url, over, fresh, False)),
        threading.Thread(target=follow, args=(url, over, gaps)),
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    for seconds in (kept, fresh, gaps):
        seconds.clear()
    try:
        yield kept, fresh, gaps
    finally:
        over.set()
        for thread in threads:
            thread.join()


def probe(url: str, over: threading.Event, waits: list[float], keep: bool) -> None:
    """Ask for /health on one connection that is kept open, or on a new one each time."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    while not over.is_set():
        began = time.monotonic()
        try:
            connection.request("GET", "/health")
            connection.getresponse().read()
        except OSError as error:
            sys.exit(f"/health was not answered: {error}")
        if not keep:
            connection.close()
        waits.append(time.monotonic() - began)
        time.sleep(0.05)
    connection.close()


def follow(url: str, over: threading.Event, gaps: list[float]) -> None:
    """Read streams with log-probabilities, one after the other."""
    asked = completion(stream=True, max_tokens=400, logprobs=5, ignore_eos=True)
    while not over.is_set():
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
        with suppress(OSError):
            connection.request("POST", COMPLETIONS, asked, {"Content-Type": "application/json"})
            answer, last = connection.getresponse(), 0.0
            while not over.is_set() and (line := answer.readline()):
                if line.startswith(b"data: {"):
                    now = time.monotonic()
                    gaps += [now - last] if last else []
                    last = now
        connection.close()
        time.sleep(0.05)


@contextmanager
def serving(model: str, url: str | None) -> Iterator[str]:
    """The address of a server."""
    if url:
        yield url
        return
    command = [sys.executable, "-m", "attar.cli.main", "serve", model, "--port", "0", "--name", "m"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=dict(os.environ)) as child:
        assert child.stderr is not None
        try:
            for line in child.stderr:
                if line.startswith("http://"):
                    break
            threading.Thread(target=child.stderr.read, daemon=True).start()  # its log
            yield line.strip()
        finally:
            child.terminate()


if __name__ == "__main__":
    main()
