"""Metrics of a real engine after a workload whose every number is known."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx")
import httpx

from attar.runtime.llm import LLM
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.speculate.draft import Draft
from tests.runtime.speculate.proposing import speculator
from tests.serving.http.real import COMPLETIONS, body, lent, load_tiny, serving, settled

ROOT = Path(__file__).parents[3]
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


@pytest.mark.slow
def test_a_slow_reader_is_not_in_the_times():
    """Events are timed when they come, so what a client does with them does not show."""
    with serving(model=load_tiny()) as (url, _, _):
        asked = body(max_tokens=200, stream=True, logprobs=5)
        with httpx.stream("POST", url + COMPLETIONS, json=asked) as response:
            assert response.status_code == 200
            while not (seen := settled(url))["e2e_request_latency_seconds_count"]:
                time.sleep(0.02)
    assert seen["inter_token_latency_seconds_count"] == 199


class Known:
    """Two drafts in every pass: the text's own next token, and one that is never right."""

    name, is_free_of_compute, samples_from_q, needs_full_tree = "known", False, False, False
    branches, confident, trees = 1, False, False

    def __init__(self, text):
        self.text = text

    def propose(self, wishes):
        return [self.draft(len(wish.tokens)) if wish.most >= 2 else None for wish in wishes]

    def draft(self, index):
        return Draft.chain([self.text[index], (self.text[index + 1] + 1) % 300])

    def observe(self, news):
        pass

    def forget(self, sequence):
        pass


def test_drafts_are_counted_under_the_names_that_are_scraped():
    """20 tokens: the prompt's first, nine passes of two while two drafts have room, and the last alone."""
    prompt, params = [*range(100, 140)], SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    text = [*prompt, *LLM.of(lent()).generate(prompt, params)[0].token_ids]
    asked = body(prompt, max_tokens=20)
    with serving() as (url, _, _):
        quiet = httpx.post(url + COMPLETIONS, json=asked).raise_for_status().json()
        assert not [name for name in settled(url) if "spec_decode" in name], "nothing is drafted"
    subject = speculator(Known(text), most=2)
    with serving(model=load_tiny(), speculator=subject) as (url, _, _):
        messages = httpx.post(url + COMPLETIONS, json=asked).raise_for_status().json()
        seen, page = settled(url), httpx.get(url + "/metrics").text
    assert messages["choices"] == quiet["choices"] and subject.failure is None
    assert messages["usage"]["completion_tokens"] == 20
    actual = {name: value for name, value in seen.items() if "spec_decode" in name and "_created" not in name}
    assert actual == {
        "spec_decode_num_drafts_total": 9,
        "spec_decode_num_draft_tokens_total": 18,
        "spec_decode_num_accepted_tokens_total": 9,
        'spec_decode_num_accepted_tokens_per_pos_total{position="0"}': 9,
    }
    for name in ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos"):
        assert f"# TYPE attar:spec_decode_num_{name}_total counter" in page
    assert seen["generation_tokens_total"] == 20 and seen["inter_token_latency_seconds_count"] == 19


def test_the_dashboard_asks_for_metrics_that_there_are():
    dashboard = json.loads((ROOT / "deploy/grafana.json").read_text())
    asked = {name for panel in dashboard["panels"] for target in panel["targets"]
             for name in re.findall(r"attar:(\w+)", target["expr"])}  # fmt: skip
    named = re.findall(r"`(\w+)(?:\{[^`]*\})?`", (ROOT / "docs/serve.md").read_text())
    bare = {name.removesuffix("_bucket") for name in asked}
    assert len(bare) > 12 and bare <= set(named), bare - set(named)
    places = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places) == len({panel["id"] for panel in dashboard["panels"]})
