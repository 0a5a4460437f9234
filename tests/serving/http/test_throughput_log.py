"""A line about the last ten seconds: what was done in them, and nothing of an idle model."""

import asyncio
import json
import logging

import pytest

pytest.importorskip("prometheus_client")

from attar.serving.http import throughput_log
from attar.serving.http.backend import Stats
from attar.serving.http.metrics import Metrics
from attar.serving.http.throughput_log import ThroughputLog, log_throughput


class Backend:
    def __init__(self):
        self.now = Stats()

    def stats(self):
        return self.now


@pytest.fixture
def model():
    return Metrics(Backend(), "tiny", {})


def test_what_was_done_since_the_last_line(model):
    log = ThroughputLog()
    model.prompt_tokens.inc(1000)
    assert log.lines([model], 100.0) == []  # of what was done before there is no time
    assert log.lines([model], 110.0) == []
    model.prompt_tokens.inc(500)
    model.generation_tokens.inc(120)
    model.backend.now = Stats(prefix_queries=400, prefix_hits=100, running=2, waiting=1, cache_usage=0.25)
    (line,) = log.lines([model], 120.0)
    assert line == {
        "model": "tiny",
        "prompt_tokens_per_s": 50.0,
        "tokens_per_s": 12.0,
        "prefix_hits": 0.25,
        "running": 2,
        "waiting": 1,
        "cache_used": 0.25,
    }
    (line,) = log.lines([model], 130.0)  # it runs, and nothing was finished
    assert line["tokens_per_s"] == 0 and "prefix_hits" not in line
    model.backend.now = Stats()
    assert log.lines([model], 140.0) and log.lines([model], 150.0) == []


def test_a_model_that_was_closed_is_forgotten(model):
    log = ThroughputLog()
    log.lines([model], 0.0)
    log.lines([], 10.0)
    model.generation_tokens.inc(5)
    assert log.lines([model], 20.0) == []


def test_an_error_ends_no_log(model, caplog, monkeypatch):
    monkeypatch.setattr(throughput_log, "PERIOD_S", 0.001)
    calls = []

    def models():
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("torn")
        model.generation_tokens.inc(1)
        if len(calls) > 4:
            task.cancel()
        return [model]

    async def run():
        nonlocal task
        task = asyncio.ensure_future(log_throughput(models))
        await asyncio.wait([task])

    task = None
    with caplog.at_level(logging.INFO, logger=throughput_log.LOGGER):
        asyncio.run(run())
    lines = [record.getMessage() for record in caplog.records]
    assert "the log of throughput failed" in lines
    assert any(json.loads(line)["tokens_per_s"] > 0 for line in lines if line.startswith("{"))
