"""Metrics of a real engine after a workload whose every number is known."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx")
import httpx

from tests.runtime.server.real import COMPLETIONS, body, load_tiny, serving, settled

NAMES = ("time_to_first_token", "inter_token_latency", "e2e_request_latency", "request_queue_time")


def test_a_known_workload():
    """Twice the same 40 tokens, then 2 texts behind 7 others; of the second 40, two blocks are found."""
    with serving(model=load_tiny()) as (url, _, _):
        for prompt, n in (([*range(100, 140)], 1), ([*range(100, 140)], 1), ([*range(300, 307)], 2)):
            asked = body(prompt, max_tokens=5, n=n)
            usage = httpx.post(url + COMPLETIONS, json=asked).raise_for_status().json()["usage"]
            assert usage["completion_tokens"] == 5 * n
        httpx.post(url + COMPLETIONS, json=body(max_tokens=-1))
        seen = settled(url)
    assert seen["prompt_tokens_total"] == 40 + 40 + 7 and seen["generation_tokens_total"] == 20
    assert seen["prefix_cache_queries_total"] == 87 and seen["prefix_cache_hits_total"] == 32
    assert seen["num_preemptions_total"] == 0
    assert seen['request_success_total{finished_reason="length"}'] == 4
    assert seen['request_refused_total{status="400"}'] == 1
    counts = [seen[f"{name}_seconds_count"] for name in NAMES]
    assert counts == [3, 16, 3, 3]
    for name, count in zip(NAMES, counts, strict=True):
        buckets = [value for key, value in seen.items() if key.startswith(f"{name}_seconds_bucket")]
        assert buckets == sorted(buckets) and buckets[-1] == count and len(buckets) > 10
    first, between, whole, queue = (seen[f"{name}_seconds_sum"] for name in NAMES)
    assert 0 <= queue < first < whole and between < whole * 2


def test_a_slow_reader_is_not_in_the_times():
    """Events are timed when they come, so what a client does with them does not show."""
    with serving(model=load_tiny()) as (url, _, _):
        asked = body(max_tokens=200, stream=True, logprobs=5)
        with httpx.stream("POST", url + COMPLETIONS, json=asked) as response:
            assert response.status_code == 200
            while not (seen := settled(url))["e2e_request_latency_seconds_count"]:
                time.sleep(0.02)
    assert seen["inter_token_latency_seconds_count"] == 199
