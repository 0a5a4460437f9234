"""Random errors in every internal call of a server under mixed traffic: no foreign request suffers.

The same requests are answered one by one by an undisturbed server; each answer of the disturbed one
is compared with that, unless its own request was broken: then it gets an error in OpenAI's shape.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx")
pytest.importorskip("llguidance")
import httpx

from attar.runtime.admission import Limits
from tests.runtime.faults import Fault
from tests.serving.http.faults import ENGINE_PLACES, SERVER_PLACES, UNSEEN, ServerFaults, faulty
from tests.serving.http.real import CHAT, COMPLETIONS, body, load_tiny, serving
from tests.serving.http.test_live import until

RATE = 0.35  # of the requests are broken
TOGETHER = 24
KEYS = """
keys:
  - {name: rich, key: key-of-the-rich}
  - {name: other, key: key-of-others, priority: 1}
  - {name: poor, key: key-of-the-poor, tokens_per_minute: 60, max_texts: 6}
"""
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
SPECIAL = "<|endoftext|>"


def talk(content: Any = "def f(x):", **more: Any) -> dict[str, Any]:
    config = {"model": "tiny", "messages": [{"role": "user", "content": content}], "temperature": 0}
    return config | {"max_tokens": 6} | more


def text(**more: Any) -> dict[str, Any]:
    return body(**{"max_tokens": 6} | more)


ASKED: list[tuple[str, Any]] = [
    (COMPLETIONS, text()),
    (COMPLETIONS, text(prompt=[5, 6, 7], max_tokens=9, echo=True, logprobs=2)),
    (COMPLETIONS, text(prompt=["a = 1", "b = 2"], n=2, temperature=1.0, seed=5)),
    (COMPLETIONS, text(prompt="import " * 30, n=3, temperature=0.8, seed=1, logprobs=1)),
    (COMPLETIONS, text(stop=["e", "QQ"], max_tokens=12)),
    (COMPLETIONS, text(regex="[ab]{3,6}", seed=3, temperature=1.0)),
    (COMPLETIONS, text(prompt="x", max_tokens=0, echo=True, logprobs=1)),
    (COMPLETIONS, text(prompt="class A:\n" * 12, max_tokens=20, presence_penalty=0.5)),
    (CHAT, talk()),
    (CHAT, talk(f"a {SPECIAL} b", logprobs=True, top_logprobs=2)),
    (CHAT, talk(response_format=FORMAT, max_tokens=12)),
    (CHAT, talk([{"type": "text", "text": "x = 1\n" * 20}], n=2, temperature=1.0, seed=9)),
    (COMPLETIONS, text(temperature=-1)),
    (COMPLETIONS, text(prompt=[10**6])),
    (COMPLETIONS, text(regex="(")),
    (CHAT, talk(5)),
    ("/tokenize", {"model": "tiny", "prompt": "def f(x):"}),
    ("/tokenize", {"model": "tiny", "messages": [{"role": "user", "content": SPECIAL}]}),
    ("/detokenize", {"model": "tiny", "tokens": [5, 6, 7]}),
]
STREAMS = [(path, asked | {"stream": True}) for path, asked in ASKED if path.startswith("/v1")]
REQUESTS = [
    *ASKED,
    *STREAMS,
    *((path, asked | {"stream_options": {"include_usage": True}}) for path, asked in STREAMS[:4]),
]


@dataclass
class Sent:
    """One request of the traffic.

    Args:
        kind: of REQUESTS.
        key: of the file.
        fault: its own error.
        leaves: its client hangs up early.
    """

    kind: int
    key: str = "key-of-the-rich"
    fault: Fault | None = None
    leaves: bool = False
    number: int = -1


def traffic(count: int, seed: int) -> list[Sent]:
    draws, sent = random.Random(seed), []
    for _ in range(count):
        fault = None
        if draws.random() < RATE:
            index = draws.choice(SERVER_PLACES if draws.random() < 0.6 else ENGINE_PLACES)
            fault = Fault(index, after=draws.choice([0, 0, 0, 1, 2, 4]))
        key = draws.choices(["key-of-the-rich", "key-of-others", "key-of-the-poor"], [6, 3, 1])[0]
        sent.append(Sent(draws.randrange(len(REQUESTS)), key, fault, draws.random() < 0.08))
    return sent


def each_place() -> list[Sent]:
    """Every call of the server's, at once and later, for answers in one piece and in chunks, and for a
    refusal."""
    kinds = [number + more for number in (1, 9) for more in (0, len(ASKED))]
    sent = [
        Sent(kind, fault=Fault(index, after)) for index in SERVER_PLACES for kind in kinds for after in (0, 1)
    ]
    sent += [Sent(0, fault=Fault("encode")), Sent(5, fault=Fault("compile"))]
    return [*sent, *(Sent(12, fault=Fault(index)) for index in UNSEEN)]


async def ask(http: httpx.AsyncClient, one: Sent, headers: dict[str, str]) -> tuple[int, str]:
    """Status and answer; an empty one of a client that leaves."""
    path, asked = REQUESTS[one.kind]
    headers = headers | {"Authorization": f"Bearer {one.key}"}
    async with http.stream("POST", path, json=asked, headers=headers) as response:
        if one.leaves:
            async for _ in response.aiter_bytes():
                break
            return 0, ""
        return response.status_code, (await response.aread()).decode()


async def vanish(http: httpx.AsyncClient, one: Sent, headers: dict[str, str]) -> tuple[int, str]:
    """As ``ask``; a client that leaves may do so before anything came."""
    if one.leaves and not REQUESTS[one.kind][1].get("stream"):
        task = asyncio.ensure_future(ask(http, one, headers))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return 0, ""
    return await ask(http, one, headers)


async def crowd(url: str, sent: list[Sent], faults: ServerFaults | None) -> list[tuple[int, str]]:
    room = asyncio.Semaphore(TOGETHER if faults else 1)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=TOGETHER)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as http:

        async def send(one: Sent) -> tuple[int, str]:
            headers: dict[str, str] = {}
            if one.fault is not None and faults is not None:
                one.number, headers = faults.blame(one.fault)
            async with room:
                try:
                    return await vanish(http, one, headers)
                except httpx.TransportError as error:
                    return -1, f'{{"lost": "{error!r}"}}'

        return await asyncio.gather(*map(send, sent))


def shown(answer: tuple[int, str]) -> Any:
    """An answer without what differs each time: names, times, and what the cache had."""
    status, content = answer
    if not content.startswith("data: ") and not content.startswith(": "):
        data = json.loads(content)
        return status, _steady(data) if "choices" in data else data
    events = [line[6:] for line in content.split("\n\n") if line.startswith("data: ")]
    assert events[-1] == "[DONE]", content[-200:]
    choices: dict[int, dict[str, Any]] = {}
    last: dict[str, Any] = {}
    for event in map(json.loads, events[:-1]):
        if "error" in event:
            return status, event
        last = event
        for choice in event["choices"]:
            _join(choices.setdefault(choice["index"], Counter()), choice)
    return status, _steady(
        {"choices": [choices[index] for index in sorted(choices)], "usage": last.get("usage")}
    )


def _join(whole: dict[str, Any], choice: dict[str, Any]) -> None:
    whole["text"] = (whole["text"] or "") + (
        choice.get("text") or choice.get("delta", {}).get("content") or ""
    )
    for name, values in (choice["logprobs"] or {}).items():
        if isinstance(values, list):
            whole[name] = (whole[name] or []) + values
    whole["finish_reason"] = choice["finish_reason"] or whole["finish_reason"]


def _steady(data: dict[str, Any]) -> Any:
    usage = {name: value for name, value in (data["usage"] or {}).items() if name != "prompt_tokens_details"}
    return _rounded({"choices": data["choices"], "usage": usage})


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def is_error(answer: Any) -> bool:
    """Whether it is one in OpenAI's shape."""
    status, data = answer
    if "error" not in data or (status < 400 and status != 200):
        return False
    return set(data["error"]) == {"message", "type", "param", "code"} and bool(data["error"]["message"])


def judge(sent: list[Sent], got: list[Any], want: list[Any], faults: ServerFaults) -> None:
    """Every answer against that of the undisturbed server."""
    for one, raw in zip(sent, got, strict=True):
        if one.leaves:
            continue
        answer, expected = shown(raw), want[one.kind]
        index = faults.raised.get(one.number)
        spent = one.key == "key-of-the-poor" and answer[0] == 429
        if one.fault is None or (index in UNSEEN) or (index is None and one.fault.place in SERVER_PLACES):
            assert spent or answer == expected, (one, REQUESTS[one.kind], answer, expected)
        else:
            assert is_error(answer) or (index is None and answer == expected), (one, answer)
            assert is_error(answer) or index is None, (one, answer)
        assert "tests." not in raw[1] and "Traceback" not in raw[1]


def held(sent: list[Sent], url: str, server: Any, faults: ServerFaults, want: list[Any]) -> set[str]:
    """Some traffic, and what it must leave behind: nothing. The places where something was raised."""
    parts = server.config.app.state.service
    judge(sent, asyncio.run(crowd(url, sent, faults)), want, faults)
    loop = server.servers[0].get_loop()
    http = {"Authorization": "Bearer key-of-the-rich"}
    until(lambda: not parts.admission.active and not parts.admission.arriving)
    assert not parts.admission._completions and not parts.admission._requests.completions
    until(lambda: faults.engine.engine.idle and not faults.engine.engine._requests)
    assert not parts.backend._streams._readers and parts.backend.failure is None
    until(lambda: len(asyncio.all_tasks(loop)) <= 3)  # serve, lifespan, main
    seen = httpx.get(f"{url}/metrics", headers=http).text
    assert 'attar:num_requests_running{model_name="tiny"} 0.0' in seen
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}
    manager = faults.engine.engine.scheduler.manager
    assert manager.free + manager.cached == manager.capacity
    return {*faults.raised.values(), *(index for index, _ in faults.engine.raised)}


def ran(rounds: int, count: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> set[str]:
    """One run of a server, with the given number of requests in each round."""
    threads = set(threading.enumerate())
    (tmp_path / "keys.yaml").write_text(KEYS)
    settings = {"keys": str(tmp_path / "keys.yaml"), "max_queue": 1000, "client_share": 1.0}
    model = load_tiny()
    with serving(Limits(sequences=8), model=model, **settings) as (url, _, _):
        want = [*map(shown, asyncio.run(crowd(url, [*map(Sent, range(len(REQUESTS)))], None)))]
    assert sum(status == 200 for status, _ in want) > 25
    raised: set[str] = set()
    options = {"limits": Limits(sequences=8, step_tokens=64), "model": model, **settings}
    with faulty(monkeypatch, serving, **options) as (url, faults, server):
        for seed in range(rounds):
            sent = traffic(count, seed) + (each_place() if not seed else [])
            raised |= held(sent, url, server, faults, want)
    until(lambda: not [one for one in {*threading.enumerate()} - threads if one.name.startswith("attar-")])
    return raised


@pytest.mark.slow
def test_a_few_hundred_requests(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    raised = ran(1, 60, monkeypatch, tmp_path)
    assert raised >= {*SERVER_PLACES} - {"cancel"}, {*SERVER_PLACES} - raised


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_requests(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    raised = ran(10, 1000, monkeypatch, tmp_path)
    rare = {"move", "fork", "pack", "pages", "grammar"}
    assert raised >= {*SERVER_PLACES, *ENGINE_PLACES} - rare, {*SERVER_PLACES, *ENGINE_PLACES} - raised
