"""GET /attar/state: what it says, that it is behind the key, and that reading it disturbs nothing."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
import httpx

from attar.serving.http import engine_state
from attar.serving.http.backend import MetricSample
from attar.serving.http.engine_state import FRESH_S, StateReader
from tests.serving.http.real import COMPLETIONS, body, holding, serving, settled
from tests.serving.http.test_app import error, serve


def test_the_state_is_the_engines():
    client, _ = serve()
    state = client.get("/attar/state").json()
    assert (state["model"], state["chat"], state["context"]) == ("tiny", True, 100)
    assert state["blocks"]["cells"] == "ffco" and state["blocks"]["states"]["free"] == 2
    assert state["speculation"] == {
        "proposer": "",
        "drafts": 5,
        "drafted": 20,
        "accepted": 12,
        "accepted_at": [5, 4, 2, 1],
    }


def test_states_of_sequences_are_shown_where_there_are_any():
    """What the metrics of a model with such layers say."""
    client, backend = serve()
    assert client.get("/attar/state").json()["states"] is None
    names = ("state_bytes", "state_snapshots", "state_snapshots_reused")
    samples = [MetricSample(name, "", value) for name, value in zip(names, (9216, 2, 5), strict=True)]
    stats = dataclasses.replace(backend.stats(), samples=samples)
    backend.stats = lambda: stats
    state = StateReader(client.app.state.service).read()
    assert state.states.model_dump() == {"bytes": 9216, "snapshots": 2, "reused": 5}


def test_it_needs_the_key():
    client, _ = serve(api_key=("long-enough",))
    error(client.get("/attar/state"), 401, "invalid_api_key")
    assert client.get("/attar/state", headers={"Authorization": "Bearer long-enough"}).status_code == 200


def test_many_readers_read_once():
    client, backend = serve()
    now, reads = [100.0], []
    backend.block_map = lambda: reads.append(now[0])
    reader = StateReader(client.app.state.service, lambda: now[0])
    for _ in range(20):
        reader.read()
        now[0] += FRESH_S / 10
    assert len(reads) == 2


def test_a_running_engine_shows_its_blocks(monkeypatch):
    monkeypatch.setattr(engine_state, "FRESH_S", 0.0)
    with serving() as (url, engine, _):
        go = holding(engine)
        before = httpx.get(f"{url}/attar/state").json()["blocks"]
        assert before["states"]["owned"] == 0 and len(before["cells"]) == 256
        asked = body([*range(100, 140)], max_tokens=60, stream=True)
        with httpx.stream("POST", url + COMPLETIONS, json=asked, timeout=30) as response:
            lines = response.iter_lines()
            next(lines)
            go.clear()
            running = httpx.get(f"{url}/attar/state").json()
            assert running["running"] == 1 and running["blocks"]["states"]["owned"] >= 3
            go.set()
            assert list(lines)
        settled(url)
