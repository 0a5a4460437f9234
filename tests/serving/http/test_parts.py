"""Settings, log, metrics and admission control."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest

from attar.errors import SettingsError
from attar.serving.http.settings import ServerSettings

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
from fastapi.testclient import TestClient

from attar.serving.http import with_environment_keys
from attar.serving.http.app import create_app
from tests.serving.http.fake import BUSY, FakeBackend, FakeTokenizer


def serve(**settings):
    app = create_app(FakeBackend(), ServerSettings(**settings), tokenizer=FakeTokenizer(), model="tiny")
    return TestClient(app, base_url="http://localhost", raise_server_exceptions=False)


def test_settings():
    settings = ServerSettings()
    assert settings.host == "127.0.0.1" and settings.loopback and not settings.log_prompts
    assert ServerSettings(host="::1").loopback and not ServerSettings(host="0.0.0.0").loopback
    for wrong in (
        {"port": 70_000},
        {"max_body": 1},
        {"max_queue": 0},
        {"host": ""},
        {"drain_s": float("nan")},
    ):
        with pytest.raises(SettingsError):
            ServerSettings(**wrong)
    with pytest.raises(SettingsError) as caught:
        ServerSettings(api_key=("se cret",))
    assert "se cret" not in str(caught.value)


def test_keys_from_the_environment(monkeypatch):
    monkeypatch.setenv("ATTAR_API_KEY", "key-number-1, key-number-2")
    assert with_environment_keys(ServerSettings(api_key=("key-number-0",))).api_key == (
        "key-number-0",
        "key-number-1",
        "key-number-2",
    )
    monkeypatch.setenv("ATTAR_API_KEY", " ,")
    with pytest.raises(SettingsError):
        with_environment_keys(ServerSettings())


def test_settings_import_no_torch_and_no_fastapi():
    code = "import sys, attar.serving.http.settings; print({'torch', 'fastapi'} & set(sys.modules))"
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert got.stdout.strip() == "set()"


@pytest.mark.parametrize("prompts", [False, True])
def test_log_lines(prompts, caplog):
    caplog.set_level(logging.INFO, "attar.server")
    client = serve(log_prompts=prompts)
    asked = {"model": "tiny", "prompt": "my secret", "max_tokens": 50}
    response = client.post("/v1/completions", json=asked, headers={"X-Request-Id": "mine"})
    assert response.headers["x-request-id"] == "mine"
    assert client.get("/v1/models", headers={"X-Request-Id": "x" * 500}).headers["x-request-id"] != "x" * 500
    client.get("/health")
    lines = [json.loads(record.message) for record in caplog.records if record.name == "attar.server"]
    assert [line["path"] for line in lines] == ["/v1/completions", "/v1/models"]
    assert lines[0]["id"] == "mine" and lines[0]["status"] == 200
    assert (lines[0]["prompt_tokens"], lines[0]["completion_tokens"]) == (10, 13)
    assert lines[0]["finished"] == ["stop"] and lines[0]["request"] == response.json()["id"]
    assert ("my secret" in caplog.text) == prompts and "Hello" not in caplog.text


def test_metrics():
    client = serve()
    client.post("/v1/completions", json={"model": "tiny", "prompt": "hi", "max_tokens": 13, "n": 2})
    client.post("/v1/completions", json={"model": "tiny"})
    client.post("/v1/completions", json={"model": "tiny", "prompt": [BUSY]})
    lines = dict(
        line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines() if not line.startswith("#")
    )
    label = '{model_name="tiny"}'
    assert float(lines["attar:num_requests_running" + label]) == 0
    assert float(lines["attar:num_requests_waiting" + label]) == 0
    assert float(lines["attar:kv_cache_usage_perc" + label]) == 0.25
    assert float(lines["attar:prefix_cache_queries_total" + label]) == 100
    assert float(lines["attar:prefix_cache_hits_total" + label]) == 40
    assert float(lines["attar:num_preemptions_total" + label]) == 2
    assert float(lines["attar:prompt_tokens_total" + label]) == 3
    assert float(lines["attar:generation_tokens_total" + label]) == 26
    assert float(lines["attar:time_to_first_token_seconds_count" + label]) == 1
    assert float(lines["attar:inter_token_latency_seconds_count" + label]) == 24
    assert float(lines["attar:e2e_request_latency_seconds_count" + label]) == 1
    assert float(lines["attar:request_queue_time_seconds_sum" + label]) == 0.01
    assert float(lines['attar:request_success_total{finished_reason="length",model_name="tiny"}']) == 2
    assert float(lines['attar:request_refused_total{model_name="tiny",status="400"}']) == 1
    assert float(lines['attar:request_refused_total{model_name="tiny",status="429"}']) == 1
    assert not any("cancelled" in name for name in lines)
    assert float(lines["attar:spec_decode_num_drafts_total" + label]) == 5
    assert float(lines["attar:spec_decode_num_accepted_tokens_total" + label]) == 12
    at = 'attar:spec_decode_num_accepted_tokens_per_pos_total{model_name="tiny",position="1"}'
    assert float(lines[at]) == 4


def test_the_runner_of_the_model_is_reported():
    facts = {"model": "m", "runner": "modules", "why": 'no "compiler"', "threads": 2, "context": None}
    app = create_app(FakeBackend(), tokenizer=FakeTokenizer(), model="tiny", facts=facts)
    client = TestClient(app, base_url="http://localhost")
    assert client.get("/v1/models/tiny").json()["runtime"] == facts
    line = next(line for line in client.get("/metrics").text.splitlines() if line.startswith("attar:info{"))
    assert 'model_name="tiny"' in line and 'runner="modules"' in line and 'why="no \\"compiler\\""' in line
    assert line.endswith(" 1.0")
